"""Conversations that were served as an environment: what `stateset-agents served` wrote, played again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.chat_logs import read_chats
from stateset_agents.core.sources.served_conversations import expect_served
from stateset_agents.environments.chat_logs import ChatLogs, made_the_recorded_calls
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario

__all__ = ["HELD_OUT", "made_the_confirmed_calls", "served_conversations"]

HELD_OUT: Mapping[str, float] = {"validation": 0.1, "test": 0.1}
"""Shares that are not trained on. The conversation's id decides, so they stay held out as the file grows."""


def served_conversations(
    logs: str | Path | Sequence[Mapping[str, Any]],
    *,
    shares: Mapping[str, float] | None = None,
    only_checked: bool = True,
    **arguments: Any,
) -> ChatLogs:
    """`ChatLogs` of what `stateset-agents served` wrote: users repeat their words, tools their results.

    There is a verdict only where a rule can check it: the conversation was reported as a success and made
    calls, and the agent makes them all or not (`made_the_confirmed_calls`).

    Args:
        logs: The file, or its lines. Others are refused: they may hold personal text.
        shares: Held out; `HELD_OUT` if left out.
        only_checked: Leave out conversations without such a verdict; if not, give a reward that needs none.
        arguments: As of `ChatLogs`.
    """
    of = str(logs) if isinstance(logs, str | Path) else "logs"
    lines = read_chats(logs) if isinstance(logs, str | Path) else list(logs)
    expect_served(lines, of)
    if only_checked:
        checked = [line for line in lines if _is_checked(line)]
        if not checked:
            raise ConfigurationError(
                f"{of}: none of {len(lines)} conversations was reported as a success and made calls, so "
                "no rule can check another: set only_checked to false, with a reward that needs no verdict"
            )
        lines = checked
    arguments.setdefault("success", made_the_confirmed_calls)
    return ChatLogs(lines, shares=HELD_OUT if shares is None else shares, **arguments)


def made_the_confirmed_calls(scenario: Scenario, messages: Sequence[Message]) -> bool | None:
    """`made_the_recorded_calls` where the conversation was reported as a success; else None."""
    if scenario.context.get("success") is not True:
        return None
    return made_the_recorded_calls(scenario, messages)


def _is_checked(line: Mapping[str, Any]) -> bool:
    made_calls = any(message.get("tool_calls") for message in line.get("messages", ()))
    return line.get("success") is True and made_calls
