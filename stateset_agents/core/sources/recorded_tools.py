"""Tools that rows offer, answered as the rows have it: a call that was recorded gets its result again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.core.tools import Toolbox, Tools, bounded
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.schemas import call_key

NOT_RECORDED = "error: no answer is recorded for this call"


class RecordedToolbox(Toolbox):
    """Tools that answer as the scenario's row did; those that really run go first.

    A scenario that names tools (`Scenario.tools`) is offered those. One that names none is offered what such
    scenarios call, all of it, so that what is offered does not give away what is to be called.
    """

    def __init__(
        self,
        tools: Tools = (),
        *,
        scenarios: Sequence[Scenario] = (),
        max_result_chars: int = 10_000,
    ) -> None:
        super().__init__(tools, max_result_chars=max_result_chars)
        self._called: dict[str, Mapping[str, Any]] = {}
        for scenario in scenarios:
            if scenario.tools is None:
                for call in recorded_calls(scenario):
                    self._called.setdefault(call["name"], _shape_of(call))

    def offered(self, scenario: Scenario) -> list[dict[str, Any]]:
        """The schemas that a scenario's agent is told."""
        running = {schema["function"]["name"]: schema for schema in self.schemas}
        return [dict(schema) for schema in {**self._recorded(scenario), **running}.values()]

    def _recorded(self, scenario: Scenario) -> Mapping[str, Mapping[str, Any]]:
        """Name -> schema of what the scenario's row offers."""
        if scenario.tools is None:
            return self._called
        offered = {schema["function"]["name"]: schema for schema in scenario.tools}
        calls = {call["name"]: _shape_of(call) for call in recorded_calls(scenario)}
        return {**offered, **{name: schema for name, schema in calls.items() if name not in offered}}

    async def call(self, call: ToolCall, *, scenario: Scenario | None = None, state: Any = None) -> Message:
        """As recorded; an unreadable or unknown call is told as everywhere."""
        known = {} if scenario is None else self._recorded(scenario)
        if call.error is not None or call.name in self._tools or not known:
            return await super().call(call, scenario=scenario, state=state)
        if call.name not in known:
            names = dict.fromkeys([*known, *self._tools])
            content = f"error: unknown tool {call.name!r}; there are: {', '.join(names)}"
        else:
            schemas = list(known.values())
            made = folded_key(call.name, call.arguments, schemas)
            recorded = [
                entry["content"]
                for entry in recorded_calls(scenario)
                if folded_key(entry["name"], entry["arguments"], schemas) == made
            ]
            content = next((text for text in recorded if text is not None), NOT_RECORDED)
        return Message(
            role="tool",
            content=bounded(content, self._max_result_chars),
            tool_call_id=call.id or None,
            name=call.name,
        )


def recorded_calls(scenario: Scenario | None) -> Sequence[Mapping[str, Any]]:
    """Calls with their results, as `scenario_files.scenario_of_row` writes them into a context."""
    entries = () if scenario is None else scenario.context.get("recorded")
    if not isinstance(entries, list | tuple):
        return ()
    return [
        entry
        for entry in entries
        if isinstance(entry, Mapping) and entry.keys() == {"name", "arguments", "content"}
    ]


def folded_key(name: str, arguments: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]) -> str:
    """One text for calls that are alike but for case and blanks."""
    return call_key(name, arguments, schemas, fold=lambda text: " ".join(text.casefold().split()))


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
