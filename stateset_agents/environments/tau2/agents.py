"""Scripted agents: one that knows the gold actions, and two that show what a figure is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.tau2.tasks import TaskEntry
from stateset_agents.environments.tau2.world import Domain
from stateset_agents.types.messages import Message, ToolCall

_WHO = "Could you tell me your name and zip code, your e-mail or your user id, please?"
_ANYTHING = "Is there anything else I can help you with?"
_GOODBYE = "Thank you for calling. Goodbye."
_HOLD = "You are being transferred to a human agent. Please hold on."
_TRANSFER = "transfer_to_human_agents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """An agent that does nothing and ends the conversation."""

    solo: bool = False

    def reply(self, messages: Sequence[Message]) -> Message:
        return _call("done", {}) if self.solo else _say("I am sorry, I am unable to help you. Goodbye.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferAtOnce:
    """An agent that hands everybody over to a human."""

    solo: bool = False

    def reply(self, messages: Sequence[Message]) -> Message:
        if not any(message.role == "assistant" for message in messages):
            return _call(_TRANSFER, {"summary": "The user needs help."})
        return _call("done", {}) if self.solo else _say(_HOLD)


class Oracle:
    """An agent that does a task's gold actions: finds out who calls, asks before it changes anything, tells
    the user what to do on the phone, and says what is to be told.

    It shows that a task can be done, and how; a demonstration to learn from. It holds no conversation: what
    it says next follows from how often it spoke.
    """

    def __init__(self, domain: Domain, entry: TaskEntry, *, asks_who: bool = True) -> None:
        self._plan = _solo_plan(entry) if domain.solo else _plan(domain, entry, asks_who)

    def reply(self, messages: Sequence[Message]) -> Message:
        num_replies = sum(message.role == "assistant" for message in messages)
        return self._plan[num_replies] if num_replies < len(self._plan) else _say(_GOODBYE)


def _solo_plan(entry: TaskEntry) -> list[Message]:
    return [*(_call(action.name, action.arguments) for action in entry.actions), _call("done", {})]


def _plan(domain: Domain, entry: TaskEntry, asks_who: bool) -> list[Message]:
    plan = [_say(_WHO)] if asks_who else []
    agent_actions = [action for action in entry.actions if action.requestor == "assistant"]
    writes = [action for action in agent_actions if action.name in domain.writes]
    has_asked = not asks_who or not writes
    for action in entry.actions:
        if action.requestor == "user":
            plan.append(_say(f"Please use this on your phone: {_shown(action)}"))
            continue
        if action.name in domain.writes and not has_asked:
            has_asked = True
            changes = "; ".join(map(_shown, writes))
            plan.append(_say(f"I would make this change: {changes}. Do you confirm (yes/no)?"))
        plan.append(_call(action.name, action.arguments))
    facts = entry.task.evaluation_criteria.communicate_info or []
    if facts:
        plan.append(_say(f"This is what I can tell you: {'; '.join(facts)}. {_ANYTHING}"))
    if any(action.name == _TRANSFER for action in agent_actions):
        plan.append(_say(_HOLD))
    elif not facts:
        plan.append(_say(f"{'That is done' if writes else 'I have looked into it'}. {_ANYTHING}"))
    return plan


def _shown(action: Any) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in action.arguments.items())
    return f"{action.name}({arguments})"


def _say(text: str) -> Message:
    return Message(role="assistant", content=text)


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=dict(arguments)),))
