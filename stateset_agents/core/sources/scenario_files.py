"""Scenarios from rows: plain dicts, files and tables, in any shape of `row_shapes`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.files import read_rows
from stateset_agents.core.sources.row_shapes import DataRow, expect_chat, read_row, read_schemas, shapes
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message, calls_answered, tool_results
from stateset_agents.types.scenario import OPENING_COLUMNS, Scenario, expect_scenarios

_log = get_logger(__name__)
_OURS = ("id", "family", "topic", "split", "context")
_SPEAKS = (*OPENING_COLUMNS, "utterance", "message", "conversation", "dialogue", "dialog", "chosen")
"""Columns whose names say that somebody speaks in them; those of no known shape are not read."""


def load_scenarios(
    items: Iterable[Scenario | Mapping[str, Any]], *, needs_opening: bool = False
) -> list[Scenario]:
    """Scenarios from scenarios or plain dicts; an empty list or two equal ids are refused.

    With `needs_opening` a dict is refused, too, that has no opening and could have one under another name:
    nobody else opens the conversation.
    """
    items = list(items)
    if not items:
        raise ConfigurationError("scenarios is empty: give at least one scenario")
    located = [(f"scenario {number}", item) for number, item in enumerate(items, start=1)]
    return located_scenarios(located, of="scenarios", needs_opening=needs_opening)


def as_scenarios(value: object) -> list[Scenario]:
    """The scenarios of a list of scenarios and plain dicts; it may be empty, and one may come twice.

    Raises ConfigurationError for anything else.
    """
    expect_scenarios(value)
    items: Any = value
    return [item if isinstance(item, Scenario) else scenario_of(item, RowCounts(), False) for item in items]


def read_scenarios(path: str | Path, *, needs_opening: bool = False) -> list[Scenario]:
    """Scenarios from a file, a row each (see `sources.files`); errors name file and line."""
    located = read_rows(path, of="scenario file")
    if not located:
        raise ConfigurationError(f"{path} holds no scenario: write one JSON object a line")
    named = [(f"{path}, {where}", row) for where, row in located]
    return located_scenarios(named, of=str(path), needs_opening=needs_opening)


def located_scenarios(
    located: Iterable[tuple[str, Any]],
    *,
    of: str,
    needs_opening: bool = False,
    needs_chat: bool = False,
    keep_duplicates: bool = False,
) -> list[Scenario]:
    """The scenario of each row; with `needs_chat` none of its own shape, with an opening, is taken.

    Raises ConfigurationError, naming the row's place.
    """
    counts = RowCounts()
    scenarios: list[Scenario] = []
    places: dict[str, str] = {}
    for where, item in located:
        try:
            if needs_chat:
                scenario = replayed(counts.add(expect_chat(item)))
            else:
                scenario = item if isinstance(item, Scenario) else scenario_of(item, counts, needs_opening)
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        if scenario.id in places:
            has_id = isinstance(item, Scenario) or item.get("id") not in (None, "")
            if has_id or not keep_duplicates:
                raise ConfigurationError(_same(where, places[scenario.id], scenario.id if has_id else None))
            number = 2
            while f"{scenario.id}-{number}" in places:
                number += 1
            scenario = replace(scenario, id=f"{scenario.id}-{number}")
        places[scenario.id] = where
        scenarios.append(scenario)
    counts.tell(of)
    return scenarios


def _same(where: str, first: str, id: str | None) -> str:
    path, _, line = first.rpartition(", ")
    first = line if path and where.startswith(f"{path}, ") else first
    if id is not None:
        return f"{where}: id {id!r} stands twice, first at {first}: ids must be unique"
    return (
        f"{where} is {first} again, word by word: take one out, or give each an `id` "
        "(keep_duplicates: true keeps both in ChatLogs, {dataset: FILE} numbers its rows)"
    )


def scenario_of(item: Any, counts: RowCounts, needs_opening: bool) -> Scenario:
    """The scenario of a row in any shape. Raises ConfigurationError for a row that is none."""
    row = read_row(item) if isinstance(item, Mapping) else None
    if row is not None:
        return replayed(counts.add(row))
    scenario = Scenario.from_dict(item)
    if not scenario.opening and needs_opening:
        _expect_subject(item)
        counts.num_made_up += 1
    system = item.get("system")
    if scenario.opening and isinstance(system, str) and system.strip():
        counts.shapes["scenario", ("opening", "system"), ()] += 1
        messages = (Message(role="system", content=system), *scenario.messages())
        scenario = replace(scenario, prompt=messages)
    return _with_tools(scenario)


def replayed(row: DataRow) -> Scenario:
    """The scenario of a row. Raises ConfigurationError for what a scripted user cannot say."""
    for message in row.completion:
        if message.role == "system" or (message.role == "user" and message.images):
            kind = "a system message" if message.role == "system" else "a picture of the user's"
            raise ConfigurationError(
                f"{kind} stands behind the first reply, where a replay cannot show it: leave the row out"
            )
    return scenario_of_row(row)


def _with_tools(scenario: Scenario) -> Scenario:
    """Offer a row's `tools` to the agent where they are schemas; else they stay a field of the scenario."""
    tools = scenario.context.get("tools")
    is_list = isinstance(tools, list | tuple) and tools and all(isinstance(tool, Mapping) for tool in tools)
    if not is_list or not all("function" in tool or "parameters" in tool for tool in tools or ()):
        return scenario
    rest = {key: value for key, value in scenario.context.items() if key != "tools"}
    return replace(scenario, tools=read_schemas(tools), context=rest)


def _expect_subject(row: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a row without an opening whose user would speak of something else."""
    context = row.get("context")
    inner = context if isinstance(context, Mapping) else {}
    names = [key for key, value in row.items() if value is not None and key != "opening"]
    opening_column = next((key for key in names if key in _SPEAKS), None)
    opening_column = opening_column or next((key for key in OPENING_COLUMNS if inner.get(key)), None)
    has_subject = any(row.get(key) for key in ("topic", "family")) or context not in (None, "")
    if opening_column is None and has_subject:
        return
    column = opening_column or next((key for key in names if key not in _OURS), "COLUMN")
    raise ConfigurationError(
        f"which column is the user's first message? The row has no opening; there are "
        f"{', '.join(map(str, names)) or 'no others'}: name it `opening`, or map it, scenarios: {{dataset: "
        f"FILE, columns: {{opening: {column}}}}}"
    )


def scenario_of_row(row: DataRow) -> Scenario:
    """The scenario of a row.

    The context gets, where the row has it: `script`, the user's later messages, which `default_user` says
    again; `recorded`, every call with its result, [{"name", "arguments", "content"}, ...]; `reference`, the
    assistant's last words; the row's other columns, and the keys of its own `context`.
    """
    user_messages = [message for message in row.prompt if message.role == "user"]
    answers = [
        message.content for message in row.completion if message.role == "assistant" and message.content
    ]
    context: dict[str, Any] = {
        "script": [message.content for message in row.completion if message.role == "user"]
    }
    if recorded := _calls_with_results(row.completion):
        context["recorded"] = recorded
    if answers:
        context["reference"] = answers[-1]
    context |= {key: value for key, value in row.rest.items() if key not in _OURS}
    inner = row.rest.get("context") or {}
    context |= inner if isinstance(inner, Mapping) else {"text": inner}
    opening = user_messages[-1].content
    is_bare = len(row.prompt) == 1 and not row.prompt[0].images and row.prompt[0].name is None
    data: dict[str, Any] = {
        key: row.rest[key]
        for key in ("id", "family", "topic", "split")
        if row.rest.get(key) not in (None, "")
    }
    if "id" not in data:
        records = [message.to_record() for message in (*row.prompt, *row.completion)]
        text = json.dumps(records, sort_keys=True, default=str)
        data["id"] = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    scenario = Scenario.from_dict({**data, "opening": opening, "context": context})
    return replace(scenario, prompt=() if is_bare else row.prompt, tools=row.tools)


def _calls_with_results(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Each call with the content of the tool message that answered it."""
    calls: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not message.tool_calls:
            continue
        answers = tool_results(messages[index + 1 :])
        numbers = calls_answered(message.tool_calls, answers)
        results = dict(zip(numbers, (answer.content for answer in answers), strict=True))
        calls += [
            {"name": call.name, "arguments": dict(call.arguments), "content": results.get(number)}
            for number, call in enumerate(message.tool_calls)
            if call.error is None
        ]
    return calls


@dataclass(slots=True, eq=False)
class RowCounts:
    """Counts of the ways in which the rows of a source were read; each gives one line."""

    shapes: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = field(default_factory=Counter)
    """Name, the columns that are read, and those that could have been."""
    unread: Counter[str] = field(default_factory=Counter)
    num_made_up: int = 0

    def add(self, row: DataRow) -> DataRow:
        contents = [*row.columns, *(message.content for message in (*row.prompt, *row.completion))]
        rest = [key for key in OPENING_COLUMNS if key in row.rest and key not in contents]
        passed = tuple(key for key in rest if row.rest[key] and row.rest[key] not in contents)
        if passed or row.shape != "OpenAI messages":
            self.shapes[row.shape, row.columns, passed] += 1
        self.unread.update(row.unread)
        return row

    def tell(self, of: str) -> None:
        """Log a line for what somebody may have meant otherwise."""
        for line in self.lines():
            _log.warning(f"{of}: {line}")

    def lines(self) -> Iterator[str]:
        chats = {shape.name for shape in shapes() if not shape.completions}
        for (shape, (prompt, *others), passed), number in self.shapes.items():
            more = f", {' and '.join(map(repr, others))} beside it" if others else ""
            more += f", {' and '.join(map(repr, passed))} is not" if passed else ""
            role = "the conversation" if shape in chats else "what is asked"
            yield f"{prompt!r} is read as {role}{more} (shape {shape}, rows: {number})"
        for key, number in self.unread.items():
            yield f"the key {key!r} of messages is not read (messages with it: {number})"
        if self.num_made_up:
            yield f"openings are made up of topic and context (rows: {self.num_made_up})"
