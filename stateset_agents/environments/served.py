"""Conversations that were served as an environment: what `import --as served` wrote, played again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.core.environment import Success
from stateset_agents.core.sources.files import read_rows
from stateset_agents.core.sources.served_conversations import expect_served
from stateset_agents.core.tools import Tools
from stateset_agents.core.users.simulated_user import UserFactory, default_user
from stateset_agents.environments.chat_logs import ChatLogs, made_the_recorded_calls
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario

HELD_OUT: Mapping[str, float] = {"validation": 0.1, "test": 0.1}
"""Shares that are not trained on. The conversation's id decides, so they stay held out as the file grows."""


class ServedConversations(ChatLogs):
    """`ChatLogs` of what `import --as served` wrote: users repeat their words, tools their results.

    There is a verdict only where a rule can check it: the conversation was reported as a success and made
    calls, and the agent makes them all or not (`made_the_confirmed_calls`).
    """

    def __init__(
        self,
        logs: str | Path | Sequence[Mapping[str, Any]],
        *,
        shares: Mapping[str, float] | None = None,
        only_checked: bool = True,
        max_turns: int = 6,
        tools: Tools = (),
        user: UserFactory | str | None = default_user,
        success: Success | str | None = None,
        system_prompt: str | None = None,
    ) -> None:
        """
        Args:
            logs: The file, or its lines. Others are refused: they may hold personal text.
            shares: Held out; `HELD_OUT` if left out.
            only_checked: Leave out conversations that `made_the_confirmed_calls` gives no verdict of; if not,
                give a reward that needs none.
            success: Instead of `made_the_confirmed_calls`. The rest is as in `ChatLogs`.
        """
        of = str(logs) if isinstance(logs, str | Path) else "logs"
        if isinstance(logs, str | Path):
            logs = [row for _, row in read_rows(logs, of="conversations")]
        lines = list(logs)
        expect_served(lines, of)
        if only_checked:
            lines = _checked(lines, of)
        super().__init__(
            lines,
            shares=HELD_OUT if shares is None else shares,
            max_turns=max_turns,
            tools=tools,
            user=user,
            success=success or made_the_confirmed_calls,
            system_prompt=system_prompt,
        )


def made_the_confirmed_calls(scenario: Scenario, messages: Sequence[Message]) -> bool | None:
    """`made_the_recorded_calls` where the conversation was reported as a success; else None."""
    if scenario.context.get("success") is not True:
        return None
    return made_the_recorded_calls(scenario, messages)


def _checked(lines: Sequence[Mapping[str, Any]], of: str) -> list[Mapping[str, Any]]:
    """The lines of which `made_the_confirmed_calls` gives a verdict. Raises ConfigurationError for none."""
    checked = [
        line
        for line in lines
        if line.get("success") is True and any(message.get("tool_calls") for message in line["messages"])
    ]
    if not checked:
        raise ConfigurationError(
            f"{of}: none of {len(lines)} conversations was reported as a success and made calls, so "
            "no rule can check another: set only_checked to false, with a reward that needs no verdict"
        )
    return checked
