"""Logged conversations as an environment: users repeat their messages, tools their recorded results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stateset_agents.core.environment import ConversationEnvironment, StateFactory, Success
from stateset_agents.core.sources.datasets import Chats, chat_scenarios
from stateset_agents.core.sources.row_shapes import is_failure
from stateset_agents.core.tools import Tools, folded_key, recorded_calls
from stateset_agents.core.users.simulated_user import UserFactory, default_user
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario


class ChatLogs(ConversationEnvironment):
    """Logs, played again with another agent: `{"messages": [...]}` or a shape of `core.sources.row_shapes`.

        ChatLogs("calls.jsonl", shares={"test": 0.2})

    The agent gets the log's system message and its user's words, one message after another whatever it says,
    and the tools that the log offers; where it names none, those that such logs call. A call that the log
    made, with the same arguments, is answered as it was there (the first time, however often it is made); any
    other gets an error. That is a replay and no world: give `tools` that really run (they stand in for
    recorded ones of their name) and a `user` that listens as soon as you have them.

    Where a log made calls and does not say `"success": false`, its verdict is whether the agent made them all
    (`made_the_recorded_calls`), unless `success` is given.
    """

    def __init__(
        self,
        logs: Chats,
        *,
        shares: Mapping[str, float] | None = None,
        keep_duplicates: bool = False,
        max_turns: int = 6,
        tools: Tools = (),
        user: UserFactory | str | None = default_user,
        success: Success | str | None = None,
        state: StateFactory | str | None = None,
        system_prompt: str | None = None,
        local: bool | None = None,
        max_result_chars: int = 10_000,
    ) -> None:
        """
        Args:
            logs: A file of conversations (see `core.sources.row_shapes`), such mappings, or the arguments of
                `dataset_scenarios`, {"dataset": ..., "columns": {"messages": ...}}.
            shares: Held out, such as {"validation": 0.1, "test": 0.2}, of the logs that name no split.
            keep_duplicates: Take conversations that are equal, word by word, instead of refusing them.

        The rest is as in `ConversationEnvironment`.
        """
        super().__init__(
            chat_scenarios(logs, shares=shares, keep_duplicates=keep_duplicates),
            max_turns=max_turns,
            tools=tools,
            user=user,
            success=success or made_the_recorded_calls,
            state=state,
            system_prompt=system_prompt,
            local=local,
            max_result_chars=max_result_chars,
        )

    def may_judge(self, scenario: Scenario) -> bool:
        """Not by calls that the log did not make."""
        by_calls = self._success is not None and self._success.function is made_the_recorded_calls
        return not by_calls or made_the_recorded_calls(scenario, ()) is not None


def made_the_recorded_calls(scenario: Scenario, messages: Sequence[Message]) -> bool | None:
    """Tells whether the agent made every call of the log, in any order.

    Arguments are compared by value: without case and blanks, 20.0 is 20, and one that is left out is null, or
    the default of the log's schema of the tool.

    None for a log without calls, and for one that was reported as a failure (`is_failure`): what it did is no
    example. Further calls are not held against the agent: where they do harm, write a verdict of your own.
    """
    recorded = recorded_calls(scenario)
    if not recorded or is_failure(scenario.context):
        return None
    schemas = scenario.tools or ()
    calls = [call for message in messages for call in message.tool_calls]
    agent_calls = {folded_key(call.name, call.arguments, schemas) for call in calls}
    return all(folded_key(entry["name"], entry["arguments"], schemas) in agent_calls for entry in recorded)
