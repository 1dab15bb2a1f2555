"""Logged conversations as an environment: users repeat their messages, tools their recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.core.conversation_state import StateFactory
from stateset_agents.core.environment import ConversationEnvironment, Success
from stateset_agents.core.sources.chat_logs import chat_scenarios
from stateset_agents.core.tools import Tool, Toolbox, bounded
from stateset_agents.core.users.simulated_user import UserFactory, default_user
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.schemas import call_key

__all__ = ["ChatLogs", "made_the_recorded_calls"]

NOT_RECORDED = "error: no answer is recorded for this call"


class ChatLogs(ConversationEnvironment):
    """Logs in OpenAI's chat format, played again with another agent (format: `core.sources.chat_logs`).

        ChatLogs("calls.jsonl", shares={"test": 0.2})

    The agent gets the log's system message and its user's words, one message after another whatever it says,
    and the tools that any log offers or calls. A call that the log made, with the same arguments, is answered
    as it was there (the first time, however often it is made); any other gets an error. That is a replay and
    no world: give `tools` that really run (they stand in for recorded ones of their name) and a `user` that
    listens as soon as you have them.

    Where a log made calls and does not say `"success": false`, its verdict is whether the agent made them all
    (`made_the_recorded_calls`), unless `success` is given.
    """

    def __init__(
        self,
        logs: str | Path | Sequence[Mapping[str, Any]],
        *,
        shares: Mapping[str, float] | None = None,
        max_turns: int = 6,
        tools: Sequence[Tool | Callable[..., Any]] | type = (),
        user: UserFactory | str | None = default_user,
        success: Success | str | None = None,
        state: StateFactory | str | None = None,
        system_prompt: str | None = None,
        local: bool | None = None,
        max_result_chars: int = 10_000,
    ) -> None:
        """
        Args:
            logs: A JSONL file, one `{"messages": [...]}` a line, or such mappings.
            shares: Held out, such as {"validation": 0.1, "test": 0.2}, of the logs that name no split.
            system_prompt: Instead of the logs' own. The rest is as in `ConversationEnvironment`.
        """
        scenarios = chat_scenarios(logs, shares=shares)
        super().__init__(
            scenarios,
            max_turns=max_turns,
            tools=tools,
            user=user,
            success=success or made_the_recorded_calls,
            state=state,
            system_prompt=system_prompt,
            local=local,
            max_result_chars=max_result_chars,
        )
        self._toolbox = _RecordedToolbox(tools, scenarios, max_result_chars)

    def _system_of(self, scenario: Scenario) -> tuple[Message, ...]:
        logged = scenario.context.get("system")
        if self._system or not logged:
            return self._system
        return (Message(role="system", content=str(logged)),)


class _RecordedToolbox(Toolbox):
    """Tools that answer as the scenario's log did; those that really run go first."""

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]] | type,
        scenarios: Sequence[Scenario],
        max_result_chars: int,
    ) -> None:
        super().__init__(tools, max_result_chars=max_result_chars)
        self._offered: dict[str, Mapping[str, Any]] = {}
        for scenario in scenarios:
            for schema in scenario.context.get("tools", ()):
                function = schema.get("function", schema) if isinstance(schema, Mapping) else None
                if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                    raise ConfigurationError(
                        f"scenario {scenario.id}: a tool must be in OpenAI's shape, {{type: function, "
                        f"function: {{name: ...}}}}, got {schema!r:.80}"
                    )
                self._offered.setdefault(function["name"], {"type": "function", "function": dict(function)})
        for scenario in scenarios:
            for call in scenario.context.get("recorded", ()):
                self._offered.setdefault(call["name"], _shape_of(call))

    def _unknown(self, name: str) -> str:
        there = {**self._offered, **self._tools}
        return f"unknown tool {name!r}; there are: {', '.join(there)}" if there else super()._unknown(name)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        running = {schema["function"]["name"]: schema for schema in super().schemas}
        return [dict(schema) for schema in {**self._offered, **running}.values()]

    async def call(self, call: ToolCall, *, scenario: Scenario | None = None, state: Any = None) -> Message:
        """As recorded; an unreadable or unknown call is told as everywhere."""
        if call.error is not None or call.name in self._tools or call.name not in self._offered:
            return await super().call(call, scenario=scenario, state=state)
        recorded = () if scenario is None else scenario.context.get("recorded", ())
        schemas = self.schemas
        made = _key(call.name, call.arguments, schemas)
        same = [
            entry["content"] for entry in recorded if _key(entry["name"], entry["arguments"], schemas) == made
        ]
        content = next((text for text in same if text is not None), NOT_RECORDED)
        return Message(
            role="tool",
            content=bounded(content, self._max_result_chars),
            tool_call_id=call.id or None,
            name=call.name,
        )


def made_the_recorded_calls(scenario: Scenario, messages: Sequence[Message]) -> bool | None:
    """Did the agent make every call of the log, in any order?

    Arguments are compared by value: without case and blanks, 20.0 is 20, and one that is left out is null, or
    the default of the log's schema of the tool.

    None for a log without calls, and for one that says `"success": false`: what it did is no example. Further
    calls are not held against the agent: where they do harm, write a verdict of your own.
    """
    recorded = scenario.context.get("recorded")
    if not recorded or scenario.context.get("success") is False:
        return None
    tools = scenario.context.get("tools", ())
    made = {_key(call.name, call.arguments, tools) for message in messages for call in message.tool_calls}
    return all(_key(entry["name"], entry["arguments"], tools) in made for entry in recorded)


def _key(name: str, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str:
    """One text for calls that are alike but for case and blanks."""
    return call_key(name, arguments, tools, fold=lambda text: " ".join(text.casefold().split()))


def _shape_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema for a tool of which only calls are known."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {
        key: {"type": kinds[type(value)]} if type(value) in kinds else {}
        for key, value in call["arguments"].items()
    }
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": call["name"], "description": "", "parameters": parameters},
    }
