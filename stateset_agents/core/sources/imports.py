"""What a file of rows or traces can become: scenarios, logs to replay, rows to imitate, an evaluation set.

Called by `stateset-agents import`. Where the doors refuse a file for one row, a row that a form cannot have is
left out here, and counted by its reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.files import read_records
from stateset_agents.core.sources.personal_text import Redactor
from stateset_agents.core.sources.row_shapes import DataRow, expect_reply, read_row
from stateset_agents.core.sources.scenario_files import RowCounts, replayed, scenario_of
from stateset_agents.core.sources.served_conversations import redacted
from stateset_agents.core.sources.trace_rows import Traces, read_traces
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, calls_answered
from stateset_agents.types.scenario import Scenario

Row = DataRow | Mapping[str, Any]
"""A row of a published shape, or a scenario of ours with its `opening`."""


@dataclass(slots=True, eq=False)
class LeftOut:
    """Rows that are left out, by the reason."""

    counts: Counter[str] = field(default_factory=Counter)
    """Number of rows by the reason, in which values are left out."""
    firsts: dict[str, str] = field(default_factory=dict)
    """The first place of each, and what was said there."""

    def add(self, where: str, reason: str) -> None:
        kind = re.sub(r"'[^']*'|\d+", "...", reason)
        self.counts[kind] += 1
        self.firsts.setdefault(kind, f"{reason} (first: {where})")

    def lines(self) -> list[str]:
        """A line for each reason."""
        return [f"left out: {count}: {self.firsts[kind]}" for kind, count in self.counts.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of a file, read."""

    num_records: int
    traces: Traces | None
    rows: tuple[tuple[str, Row], ...]
    left_out: LeftOut
    removed: Mapping[str, int]
    """Number of replacements by kind of personal text."""

    def summary(self) -> list[str]:
        """What was found, in lines."""
        shapes = Counter(row.shape if isinstance(row, DataRow) else "scenario" for _, row in self.rows)
        if self.traces is not None:
            calls = f"{self.traces.num_calls} calls of models, {len(self.traces.rows)} conversations"
            lines = [f"format: {self.traces.platform}, {self.num_records} records, {calls}"]
        else:
            named = ", ".join(f"{name} ({count})" for name, count in shapes.most_common())
            lines = [f"format: {named or 'none that is known'}, {self.num_records} rows"]
        talks = [
            (row.tools, (*row.prompt, *row.completion)) for _, row in self.rows if isinstance(row, DataRow)
        ]
        offered = {tool["function"]["name"]: 0 for tools, _ in talks for tool in tools or ()}
        called = Counter(call.name for _, said in talks for message in said for call in message.tool_calls)
        tools = [f"{name} (calls: {called[name]})" for name in (*offered, *(called.keys() - offered.keys()))]
        systems = Counter(
            message.content for _, said in talks for message in said if message.role == "system"
        )
        lines.append(f"tools: {', '.join(tools) or 'none'}")
        prompts = "".join(f"; {count} rows: {text[:60]!r}" for text, count in systems.most_common(3))
        return [*lines, f"system prompts: {len(systems)}{prompts}"]


def read_import(path: str | Path, *, redacts: bool = False) -> Imported:
    """The rows of a file, of which each is read, or left out and counted; with `redacts` without personal text
    (see `personal_text`).

    Raises ConfigurationError for a file that cannot be read at all.
    """
    located = read_records(path, of="file")
    traces = read_traces(located)
    left_out = LeftOut()
    for reason, count in ({} if traces is None else traces.left_out).items():
        left_out.counts[reason] += count
        left_out.firsts[reason] = reason
    rows: list[tuple[str, Row]] = []
    removed: Counter[str] = Counter()
    for where, item in located if traces is None else traces.rows:
        redactor = Redactor()
        try:
            row = read_row(item) or item
            rows.append((where, _without_personal_text(row, redactor) if redacts else row))
            removed += redactor.counts
        except ConfigurationError as error:
            left_out.add(where, str(error))
    return Imported(
        num_records=len(located), traces=traces, rows=tuple(rows), left_out=left_out, removed=dict(removed)
    )


def _without_personal_text(row: Row, redactor: Redactor) -> Row:
    """Ids are hashed: they may be a person's."""
    if not isinstance(row, DataRow):
        return _hashed(redactor.value(row))
    if any(message.images for message in (*row.prompt, *row.completion)):
        raise ConfigurationError("it has pictures, of which nobody can say what they show")
    return replace(
        row,
        prompt=tuple(redacted(message, redactor) for message in row.prompt),
        completion=tuple(redacted(message, redactor) for message in row.completion),
        tools=None if row.tools is None else tuple(redactor.value(row.tools)),
        rest=_hashed(redactor.value(row.rest)),
    )


def _hashed(data: dict[str, Any]) -> dict[str, Any]:
    if data.get("id") in (None, ""):
        return data
    digest = hashlib.blake2b(str(data["id"]).encode(errors="surrogatepass"), digest_size=8)
    return {**data, "id": digest.hexdigest()}


def convert(rows: Iterable[tuple[str, Row]], form: str) -> tuple[list[dict[str, Any]], LeftOut]:
    """The rows in one of `FORMS`, and those that it cannot have. Ids are unique."""
    made: list[dict[str, Any]] = []
    left_out, places = LeftOut(), dict[str, str]()
    for where, row in rows:
        try:
            scenario = _scenario(row)
            if scenario.id in places:
                raise ConfigurationError("its id, or all that it says, stands in an earlier row")
            made += FORMS[form](row, scenario)
            places[scenario.id] = where
        except ConfigurationError as error:
            left_out.add(where, str(error))
    return made, left_out


def _scenario(row: Row) -> Scenario:
    return replayed(row) if isinstance(row, DataRow) else scenario_of(row, RowCounts(), True)


_READ_FIRST = ("messages", "conversations", "traj", "query", "prompt")
"""Columns that would be read instead of the prompt."""


def _as_scenario(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """The user's words, with what the tools answered and what was said last; replies are not in it."""
    if not isinstance(row, DataRow):
        yield {**row, "id": scenario.id}
        return
    rest = {key: value for key, value in scenario.context.items() if key not in _READ_FIRST}
    prompt = [message.to_record() for message in with_call_ids(scenario.messages())]
    yield {"id": scenario.id, "prompt": prompt, **_beside(row), **rest}


def _beside(row: DataRow) -> dict[str, Any]:
    named = {key: row.rest[key] for key in ("family", "topic", "split") if row.rest.get(key)}
    return named if row.tools is None else {**named, "tools": [dict(tool) for tool in row.tools]}


def _as_evaluation(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Scenarios of the split test that something can be checked by."""
    checks = ("recorded", "answer", "expected_facts", "ground_truth", "solution", "reference")
    if not any(scenario.context.get(key) for key in checks):
        raise ConfigurationError(f"nothing in it says what is right: no {', '.join(checks)}")
    yield from ({**made, "split": "test"} for made in _as_scenario(row, scenario))


def _as_replay(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """The whole conversation, with all that is known beside it; what comes before it does not train."""
    if not isinstance(row, DataRow) or not row.completion:
        raise ConfigurationError("it shows no reply")
    weights = [*(0.0 if message.role == "assistant" else 1.0 for message in row.prompt), *row.weights]
    messages = with_call_ids((*row.prompt, *row.completion))
    records = [
        message.to_record() | ({} if weight == 1 else {"weight": weight})
        for message, weight in zip(messages, weights, strict=True)
    ]
    rest = {key: value for key, value in row.rest.items() if key not in (*_READ_FIRST, "id")}
    yield {"id": scenario.id, "messages": records, **_beside(row), **rest}


def _as_sft(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """A conversation to imitate: one that nobody called a failure, up to its last reply."""
    for made in _as_replay(row, scenario):
        assert isinstance(row, DataRow)
        expect_reply(row, (*row.columns, *row.rest))
        if row.rest.get("success") is False or (row.shape == "tau-bench" and row.rest.get("reward") == 0):
            raise ConfigurationError("it was reported as a failure")
        replies = [
            weight for message, weight in zip(row.completion, row.weights) if message.role == "assistant"
        ]
        roles = [message.role for message in row.completion]
        if ("assistant", "assistant") in itertools.pairwise(roles):
            raise ConfigurationError("two replies stand behind one another")
        for message, weight in zip(row.completion, row.weights, strict=True):
            is_empty = not (
                message.content.strip() or message.tool_calls or (message.reasoning or "").strip()
            )
            if message.role == "assistant" and weight and (is_empty or not message.is_example):
                raise ConfigurationError("a reply is empty, or cannot be written as it was")
        if not any(replies):
            raise ConfigurationError("all its replies have the weight 0")
        last = max(place for place, record in enumerate(made["messages"]) if record["role"] == "assistant")
        yield {**made, "messages": made["messages"][: last + 1]}


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The same with an id for each call, and each result with its call's; ids that are there and unique stay."""
    ids = [call.id for message in messages for call in message.tool_calls]
    keeps = "" not in ids and len(set(ids)) == len(ids)
    numbers = itertools.count(1)
    named = list(messages)
    for place, message in enumerate(messages):
        if not message.tool_calls:
            continue
        calls = [call if keeps else replace(call, id=f"call_{next(numbers)}") for call in message.tool_calls]
        named[place] = replace(message, tool_calls=tuple(calls))
        results = list(itertools.takewhile(lambda result: result.role == "tool", messages[place + 1 :]))
        for offset, number in enumerate(calls_answered(message.tool_calls, results), start=1):
            if number is not None:
                named[place + offset] = replace(messages[place + offset], tool_call_id=calls[number].id)
    return named


# --- rows for others


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _for_openai(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """A line of OpenAI's fine-tuning API: https://platform.openai.com/docs/guides/supervised-fine-tuning."""
    for made in _as_sft(row, scenario):
        tools = made.get("tools") or []
        messages = made["messages"]
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        answered = {message.get("tool_call_id") for message in messages}
        last = messages[-1].get("tool_calls") or ()
        names = {tool["function"]["name"] for tool in tools}
        for call in calls:
            if (name := call["function"]["name"]) not in names or not _NAME.fullmatch(name):
                raise ConfigurationError(
                    f"OpenAI takes no call of {name!r}: no tool of the row has that name"
                )
            if call["id"] not in answered and call not in last:
                raise ConfigurationError(f"OpenAI takes no call without a result, and {name!r} has none")
        if any(message.get("weight", 1) not in (0, 1) for message in messages):
            raise ConfigurationError("OpenAI takes the weights 0 and 1 alone")
        beside = {"parallel_tool_calls": made["parallel_tool_calls"]} if "parallel_tool_calls" in made else {}
        yield {
            "messages": list(map(_openai_message, messages)),
            **({"tools": tools, **beside} if tools else {}),
        }


def _openai_message(record: Mapping[str, Any]) -> dict[str, Any]:
    """Thoughts have no place there."""
    keys = ("role", "content", "tool_calls", "tool_call_id", *(["name"] if record["role"] != "tool" else []))
    message = {key: record[key] for key in keys if key in record}
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    return (
        {**message, "weight": int(record["weight"])}
        if "weight" in record and record["role"] == "assistant"
        else message
    )


def _for_trl(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """A row for each reply that trains: what it was asked, and what it said, with the tools as JSON text; the
    scalars beside it are columns, which rewards get."""
    for made in _as_sft(row, scenario):
        messages = [_trl_message(message) for message in made["messages"]]
        beside = {key: value for key, value in made.items() if isinstance(value, str | int | float)}
        tools = {"tools": json.dumps(made["tools"], ensure_ascii=False)} if made.get("tools") else {}
        for place, message in enumerate(made["messages"]):
            if message["role"] == "assistant" and message.get("weight", 1):
                yield {**beside, "prompt": messages[:place], "completion": [messages[place]], **tools}


def _trl_message(record: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are objects there, as templates want them, and thoughts `reasoning_content`."""
    message = {key: record[key] for key in ("role", "content", "tool_call_id", "name") if key in record}
    if "reasoning" in record:
        message["reasoning_content"] = record["reasoning"]
    if "tool_calls" in record:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in record["tool_calls"]
        ]
    return message


FORMS: Mapping[str, Callable[[Row, Scenario], Iterator[dict[str, Any]]]] = {
    "scenarios": _as_scenario,
    "replay": _as_replay,
    "sft": _as_sft,
    "evaluation": _as_evaluation,
    "openai": _for_openai,
    "trl": _for_trl,
}
"""Forms that the house reads, and those of others."""
