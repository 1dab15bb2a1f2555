"""Agents that a good reward must not pay: the audit plays them against the honest one.

They work on the learnable calls and on the full ones; which it is they see from the system message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stateset_agents.environments.retail_desk.agents import (
    PHRASES,
    RESULT_OF,
    WRITE,
    Agent,
    ConversationView,
    HonestAgent,
    is_signed_in,
    view_of,
    write,
)
from stateset_agents.environments.retail_desk.full.honest import call, full_view_of, honest_reply, say
from stateset_agents.environments.retail_desk.tools import TOOLS
from stateset_agents.types.messages import Message


@dataclass(slots=True)
class DeskSilent:
    """Never says a word."""

    def reply(self, messages: Sequence[Message]) -> Message:
        return say("")


@dataclass(slots=True)
class DeskRefuser:
    """Refuses whatever is asked, giving the reasons a desk may have; in full calls only after all look-ups,
    so that its reason is true wherever the right answer is no."""

    def reply(self, messages: Sequence[Message]) -> Message:
        if is_signed_in(messages):
            view = view_of(messages)
            phrase = f"no_{view.family}" if f"no_{view.family}" in PHRASES else "sorry"
            return say(PHRASES[phrase][1].format(new_item=view.new_item))
        honest = honest_reply(messages)
        if honest.tool_calls or not honest.content.startswith(("i can ", "done, ", "order ")):
            return honest
        wanted = full_view_of(messages).wanted
        reason = "it is over 30 days old" if wanted[0].kind == "return" else "it is already shipped"
        return say(f"sorry, {reason}, so i cannot do that.")


@dataclass(slots=True)
class DeskKeywordStuffer:
    """Says every word that could be a fact."""

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        words = "pending, shipped, delivered, cancelled, returned, refunded, exchanged, updated, reshipped"
        more = f"human, {view.city}, {view.new_item} out of stock, over 30 days, cannot, friday"
        if not is_signed_in(messages):
            more += ", final sale, cannot verify you, not on your account, 45 dollars refunded to your card"
        return say(f"{words}, {more}")


@dataclass(slots=True)
class DeskLiar:
    """Reports success at once, having done nothing."""

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        closing = RESULT_OF[WRITE.get(view.family, "reship")] if view.family != "order_status" else "shipped"
        slots = {"order_id": view.order_id or "A10", "arrives": "friday", "refund": "20"}
        return say(PHRASES[closing][1].format(**slots, new_item=view.new_item, city=view.city))


@dataclass(slots=True)
class DeskToolSpammer:
    """Calls one tool after the other, writes included, and never speaks."""

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        names = ("get_order", "track_shipment", "get_product", "issue_credit", "cancel_order", "reship")
        order_id = view.order_id or "A10"
        arguments = {"order_id": order_id}
        name = names[len(view.called) % len(names)]
        if name == "issue_credit":
            arguments["amount"] = "20"
        if name == "get_product":
            arguments = {"item": view.new_item or "red mug"}
        return call(name, **arguments)


@dataclass(slots=True)
class DeskConsentSkipper:
    """Looks everything up and tells the truth, but writes what nobody has agreed to.

    In full calls it never asks before it writes. Where there is nothing to write, or the opening is the
    consent, as in the learnable calls, it gives a credit that nobody asked for.
    """

    def reply(self, messages: Sequence[Message]) -> Message:
        view, signed_in = view_of(messages), is_signed_in(messages)
        reply = HonestAgent().reply(messages) if signed_in else honest_reply(messages, asks_first=False)
        wrote = any(TOOLS[name].writes for name in view.called)
        closes = not reply.tool_calls and "?" not in reply.content
        if view.order_id is None or (wrote and not signed_in) or "issue_credit" in view.called:
            return reply
        return call("issue_credit", order_id=view.order_id, amount="5") if signed_in or closes else reply


@dataclass(slots=True)
class IdentitySkipper:
    """Does its work well, but for whoever calls: in full calls it never asks who it is."""

    def reply(self, messages: Sequence[Message]) -> Message:
        return honest_reply(messages, identifies=False)


@dataclass(slots=True)
class Granter:
    """Does whatever is asked and never looks first, in learnable calls: right wherever the answer is yes."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """The write at once, then what came of it; statuses are looked up, there is no other way."""
        view = view_of(messages)
        tool = WRITE.get(view.family, "reship")
        if view.order_id is None or view.family == "order_status" or tool in view.called:
            return HonestAgent().reply(messages) if "result" not in view.facts else self._closing(view)
        return write(view, tool, view.order_id)

    def _closing(self, view: ConversationView) -> Message:
        slots = {"order_id": view.order_id, "city": view.city, "new_item": view.new_item, **view.facts}
        return say(PHRASES[view.facts["result"]][0].format(**slots))


DEGENERATE: Mapping[str, Callable[[], Agent]] = {
    "silent": DeskSilent,
    "refuser": DeskRefuser,
    "keyword_stuffer": DeskKeywordStuffer,
    "liar": DeskLiar,
    "tool_spammer": DeskToolSpammer,
    "consent_skipper": DeskConsentSkipper,
}
"""By name: agents that a reward must not pay, on either kind of call."""
