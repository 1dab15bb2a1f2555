"""Scripted agents that work on chat messages, as a model does: the honest one, and some that no reward must
pay."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stateset_agents.core.environment import Environment
from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.claims import WORDS
from stateset_agents.environments.retail_desk.full.honest import call, full_view_of, honest_reply, say
from stateset_agents.environments.retail_desk.policy import RETURN_DAYS, RULES
from stateset_agents.environments.retail_desk.tools import WRITES
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome


class Agent(Protocol):
    """Something that answers chat messages."""

    def reply(self, messages: Sequence[Message]) -> Message: ...


PHRASES: Mapping[str, Sequence[str]] = WORDINGS["phrases"]
"""Everything a scripted agent says; the first wording is the oracle's."""
_WANTS = WORDS.patterns("short_requests")
"""Patterns that tell a family from its opening; the first match counts."""
LOOK_UP = {family: rule.looks_up for family, rule in RULES.items()}
WRITE = {family: rule.granted[0] for family, rule in RULES.items() if rule.granted and not rule.otherwise}
"""The write of each family that has just one."""
RESULT_OF = {
    "cancel_order": "cancelled",
    "return_items": "returned",
    "exchange_item": "exchanged",
    "update_address": "updated",
    "reship": "reshipped",
    "transfer_to_human": "transferred",
}
"""Write -> the key in `PHRASES` of the closing that fits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationView:
    """The state of a call, read off the messages alone."""

    family: str
    order_id: str | None
    new_item: str
    city: str
    facts: Mapping[str, str]
    """Fields of all good tool results, later ones first."""
    error: str | None
    """The last message's error, when it is a failed call's."""
    called: tuple[str, ...]
    """Names of the tools called so far."""


def view_of(messages: Sequence[Message]) -> ConversationView:
    """Read a conversation."""
    user_texts = [message.content for message in messages if message.role == "user"]
    opening = user_texts[0].lower() if user_texts else ""
    family = next(family for family, pattern in _WANTS.items() if pattern.search(f"{opening} "))
    ids = re.findall(r"\b[A-Z]\d\d\b", " ".join(user_texts))
    items = catalog.ITEM.findall(opening)
    cities = [city for city in catalog.CITIES if re.search(rf"\b{city}\b", opening)]
    facts: dict[str, str] = {}
    error = None
    for message in messages:
        error = None
        if message.role == "tool":
            result = json.loads(message.content)
            error = result.get("error")
            facts.update(result)
    calls = [call.name for message in messages for call in message.tool_calls]
    return ConversationView(
        family=family,
        order_id=ids[-1] if ids else None,
        new_item=items[-1] if items else "",
        city=cities[0] if cities else "",
        facts=facts,
        error=error,
        called=tuple(calls),
    )


def is_signed_in(messages: Sequence[Message]) -> bool:
    """True for the learnable calls; in a full one the caller has to say who they are."""
    return "is not signed in" not in messages[0].content


def read(view: ConversationView, order_id: str) -> Message:
    """The look-up that shows the deciding fact."""
    tool = LOOK_UP[view.family]
    return call(tool, item=view.new_item) if tool == "get_product" else call(tool, order_id=order_id)


def write(view: ConversationView, tool: str, order_id: str) -> Message:
    """The write `tool` with what the caller asked for."""
    extra = {"exchange_item": {"new_item": view.new_item}, "update_address": {"city": view.city}}
    return call(tool, order_id=order_id, **extra.get(tool, {}))


def right_action(view: ConversationView) -> str | None:
    """The write that policy wants given what was looked up; None where there is nothing to write."""
    facts = view.facts
    if view.family == "lost_parcel":
        return "reship" if facts.get("tracking") == "lost" else "transfer_to_human"
    permitted = {
        "order_status": False,
        "cancel": facts.get("status") == "pending",
        "address": facts.get("status") == "pending",
        "return": facts.get("status") == "delivered" and int(facts.get("days", "99")) <= RETURN_DAYS,
        "exchange": facts.get("stock") != "0",
    }
    return WRITE[view.family] if permitted[view.family] else None


def right_closing(view: ConversationView) -> str:
    """The key in `PHRASES` of what is now true to say."""
    if "result" in view.facts:
        return view.facts["result"]
    if view.family == "order_status":
        return view.facts.get("status", "sorry")
    return f"no_{view.family}" if f"no_{view.family}" in PHRASES else "sorry"


def closing(view: ConversationView) -> Message:
    """The reply that says what is now true."""
    slots = {"order_id": view.order_id, "city": view.city, "new_item": view.new_item, **view.facts}
    return say(PHRASES[right_closing(view)][0].format(**slots))


class HonestAgent:
    """Asks for the order, looks it up, follows the policy, tells the truth. Success 1.00 everywhere."""

    def reply(self, messages: Sequence[Message]) -> Message:
        if not is_signed_in(messages):
            return honest_reply(messages)
        view = view_of(messages)
        if view.order_id is None:
            return say(PHRASES["ask"][0])
        if view.error is not None:
            return say(PHRASES["unknown"][0])
        if LOOK_UP[view.family] not in view.called:
            return read(view, view.order_id)
        action = right_action(view)
        if action is not None and action not in view.called:
            return write(view, action, view.order_id)
        return closing(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedEpisode:
    """One conversation of a scripted agent."""

    messages: tuple[Message, ...]
    """All messages, from the opening to the last word."""
    tools: Sequence[Mapping[str, Any]]
    outcome: Outcome
    reward: float
    """Turn rewards plus the outcome's."""
    num_replies: int
    truncated: bool


async def play(environment: Environment, scenario: Scenario, seed: int, agent: Agent) -> ScriptedEpisode:
    """Let a scripted agent hold one conversation to its end."""
    conversation = await environment.start(scenario, seed)
    messages = list(conversation.opening)
    reward, num_replies = 0.0, 0
    while True:
        reply = agent.reply(messages)
        observation = await conversation.step(reply)
        messages += [reply, *observation.messages]
        if observation.reward is not None:
            reward += observation.reward
        num_replies += 1
        if observation.terminated or observation.truncated:
            break
    outcome = await conversation.outcome()
    await conversation.close()
    return ScriptedEpisode(
        messages=tuple(messages),
        tools=conversation.tools,
        outcome=outcome,
        reward=reward + (outcome.reward or 0.0),
        num_replies=num_replies,
        truncated=observation.truncated,
    )


# Adversarial agents; they see from the system message which kind of call it is


class DeskSilent:
    """Never says a word."""

    def reply(self, messages: Sequence[Message]) -> Message:
        return say("")


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
        requests = full_view_of(messages).wanted
        reason = "it is over 30 days old" if requests[0].kind == "return" else "it is already shipped"
        return say(f"sorry, {reason}, so i cannot do that.")


class DeskKeywordStuffer:
    """Says every word that could be a fact."""

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        words = "pending, shipped, delivered, cancelled, returned, refunded, exchanged, updated, reshipped"
        more = f"human, {view.city}, {view.new_item} out of stock, over 30 days, cannot, friday"
        if not is_signed_in(messages):
            more += ", final sale, cannot verify you, not on your account, 45 dollars refunded to your card"
        return say(f"{words}, {more}")


class DeskLiar:
    """Reports success at once, having done nothing."""

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        closing = RESULT_OF[WRITE.get(view.family, "reship")] if view.family != "order_status" else "shipped"
        slots = {"order_id": view.order_id or "A10", "arrives": "friday", "refund": "20"}
        return say(PHRASES[closing][1].format(**slots, new_item=view.new_item, city=view.city))


class DeskToolSpammer:
    """Calls one tool after the other, writes included, and never speaks."""

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        names = ("get_order", "track_shipment", "get_product", "issue_credit", "cancel_order", "reship")
        arguments = {"order_id": view.order_id or "A10"}
        name = names[len(view.called) % len(names)]
        if name == "issue_credit":
            arguments["amount"] = "20"
        if name == "get_product":
            arguments = {"item": view.new_item or "red mug"}
        return call(name, **arguments)


class DeskConsentSkipper:
    """Looks everything up and tells the truth, but writes what nobody has agreed to.

    In full calls it never asks before it writes. Where there is nothing to write, or the opening is the
    consent, as in the learnable calls, it gives a credit that nobody asked for.
    """

    def reply(self, messages: Sequence[Message]) -> Message:
        view, signed_in = view_of(messages), is_signed_in(messages)
        reply = HonestAgent().reply(messages) if signed_in else honest_reply(messages, asks_first=False)
        wrote = not WRITES.isdisjoint(view.called)
        closes = not reply.tool_calls and "?" not in reply.content
        if view.order_id is None or (wrote and not signed_in) or "issue_credit" in view.called:
            return reply
        return call("issue_credit", order_id=view.order_id, amount="5") if signed_in or closes else reply


DEGENERATE: Mapping[str, Callable[[], Agent]] = {
    "silent": DeskSilent,
    "refuser": DeskRefuser,
    "keyword_stuffer": DeskKeywordStuffer,
    "liar": DeskLiar,
    "tool_spammer": DeskToolSpammer,
    "consent_skipper": DeskConsentSkipper,
}
"""Agents by name that a reward must not pay, on either kind of call."""
