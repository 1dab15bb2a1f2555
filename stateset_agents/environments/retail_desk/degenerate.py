"""Agents that a good reward must not pay: the audit plays them against the honest one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stateset_agents.environments.retail_desk.agents import PHRASES, WRITE, Agent, call, look, result_of, say
from stateset_agents.messages import Message

__all__ = ["DEGENERATE", "KeywordStuffer", "Liar", "Refuser", "Silent", "ToolSpammer"]


@dataclass(slots=True)
class Silent:
    """Never says a word."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """An empty reply."""
        return say("")


@dataclass(slots=True)
class Refuser:
    """Refuses whatever is asked, giving the reasons a desk may have."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """A refusal with the reason that fits the request."""
        view = look(messages)
        phrase = f"no_{view.family}" if f"no_{view.family}" in PHRASES else "sorry"
        return say(PHRASES[phrase][1].format(new_item=view.new_item))


@dataclass(slots=True)
class KeywordStuffer:
    """Says every word that could be a fact."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """The keywords of all families."""
        view = look(messages)
        words = "pending, shipped, delivered, cancelled, returned, refunded, exchanged, updated, reshipped"
        return say(f"{words}, human, {view.city}, {view.new_item} out of stock, over 30 days, cannot, friday")


@dataclass(slots=True)
class Liar:
    """Reports success at once, having done nothing."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """A happy lie."""
        view = look(messages)
        closing = result_of(WRITE.get(view.family, "reship")) if view.family != "order_status" else "shipped"
        slots = {"order_id": view.order_id or "A10", "arrives": "friday", "refund": "20"}
        return say(PHRASES[closing][1].format(**slots, new_item=view.new_item, city=view.city))


@dataclass(slots=True)
class ToolSpammer:
    """Calls one tool after the other, writes included, and never speaks."""

    def reply(self, messages: Sequence[Message]) -> Message:
        """The next tool in the list."""
        view = look(messages)
        names = ("get_order", "track_shipment", "get_product", "issue_credit", "cancel_order", "reship")
        order_id = view.order_id or "A10"
        arguments = {"order_id": order_id}
        name = names[len(view.called) % len(names)]
        if name == "issue_credit":
            arguments["amount"] = "20"
        if name == "get_product":
            arguments = {"item": view.new_item or "red mug"}
        return call(name, **arguments)


DEGENERATE: Mapping[str, Callable[[], Agent]] = {
    "silent": Silent,
    "always_refuses": Refuser,
    "keyword_stuffer": KeywordStuffer,
    "liar": Liar,
    "tool_spammer": ToolSpammer,
}
"""By name: agents that a reward must not pay."""
