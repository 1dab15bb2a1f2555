"""What a file of rows or traces can become: scenarios, logs to replay, rows to imitate, an evaluation set.

Called by `stateset-agents import`. Where the doors refuse a file for one row, a row that a form cannot have
is left out here, with the reason.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.files import read_records
from stateset_agents.core.sources.personal_text import Redactor
from stateset_agents.core.sources.row_shapes import DataRow, as_json, expect_reply, is_failure, read_row
from stateset_agents.core.sources.scenario_files import RowCounts, replayed, scenario_of, scenario_of_row
from stateset_agents.core.sources.served_conversations import hashed_id, redacted, through_last_reply
from stateset_agents.core.sources.trace_rows import Traces, read_traces
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, calls_answered, tool_results
from stateset_agents.types.scenario import Scenario

Row = DataRow | Mapping[str, Any]
"""A row of a published shape, or a scenario of ours with its `opening`."""
LeftOut = list[tuple[str, str]]
"""The places of rows that are left out, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The rows of a file, read."""

    num_records: int
    traces: Traces | None
    """The export that they came from; None for a file of rows."""
    rows: list[tuple[str, Row]]
    left_out: LeftOut
    removed: Mapping[str, int]
    """Number of replacements by kind of personal text."""

    def summary(self) -> list[str]:
        """What was found: a line each for format, tools and system prompts, and for what was read how."""
        counts = RowCounts()
        chats = [counts.add(row) for _, row in self.rows if isinstance(row, DataRow)]
        messages = [message for row in chats for message in (*row.prompt, *row.completion)]
        shapes = Counter([*(row.shape for row in chats), *["scenario"] * (len(self.rows) - len(chats))])
        format = f"{', '.join(shapes) or 'none that is known'}, {self.num_records} rows"
        if (of := self.traces) is not None:
            format = f"{of.platform}, {self.num_records} records, "
            format += f"{of.num_calls} calls of models, {len(of.rows)} conversations"
        calls = Counter(call.name for message in messages for call in message.tool_calls)
        offered = [tool["function"]["name"] for row in chats for tool in row.tools or ()]
        tools = ", ".join(f"{name} (calls: {calls[name]})" for name in dict.fromkeys((*offered, *calls)))
        systems = Counter(message.content for message in messages if message.role == "system")
        prompts = "".join(f"; {text[:60]!r} (rows: {count})" for text, count in systems.most_common(3))
        found = [f"format: {format}", f"tools: {tools or 'none'}", f"system prompts: {len(systems)}{prompts}"]
        return [*found, *counts.lines()]


def read_import(path: str | Path, *, redacts: bool = False) -> Imported:
    """The rows of a file, of which each is read, or left out; with `redacts` without personal text (see
    `personal_text`).

    Raises ConfigurationError for a file that cannot be read at all.
    """
    located = read_records(path, of="file")
    traces = read_traces(located)
    rows, removed = list[tuple[str, Row]](), Counter[str]()
    left_out = [] if traces is None else list(traces.left_out)
    for where, item in located if traces is None else traces.rows:
        redactor = Redactor()
        try:
            row = read_row(item) or item
            rows.append((where, _without_personal_text(row, redactor) if redacts else row))
            removed += redactor.counts
        except ConfigurationError as error:
            left_out.append((where, str(error)))
    return Imported(num_records=len(located), traces=traces, rows=rows, left_out=left_out, removed=removed)


def _without_personal_text(row: Row, redactor: Redactor) -> Row:
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
    name = data.get("id")
    return data if name in (None, "") else {**data, "id": hashed_id(str(name))}


def convert(rows: Iterable[tuple[str, Row]], form: str) -> tuple[list[dict[str, Any]], LeftOut]:
    """The rows in one of `FORMS`, and those that it cannot have. Ids are unique."""
    read = replayed if form in _PLAYED else scenario_of_row
    made, left_out, seen = list[dict[str, Any]](), LeftOut(), set[str]()
    for where, row in rows:
        try:
            scenario = read(row) if isinstance(row, DataRow) else scenario_of(row, RowCounts(), True)
            new = list(FORMS[form](row, scenario))
            columns = (column for each in new for column in each.items())
            texts = [(key, as_json(value, f"the values of {key!r}")) for key, value in columns]
            text = str(sorted(column for column in texts if column[0] not in ("id", "split")))
            if text in seen:
                raise ConfigurationError("all that it says stands in an earlier row")
            if scenario.id in seen:
                raise ConfigurationError(f"its id {scenario.id!r} is an earlier row's: give it another")
            made += new
            seen |= {scenario.id, text}
        except ConfigurationError as error:
            left_out.append((where, str(error)))
    return made, left_out


_PLAYED = ("scenarios", "replay", "evaluation")
"""Forms of which a user is made who says the row's words again."""
_READ_FIRST = ("messages", "conversations", "traj", "query", "prompt", "id")
"""Columns that would be read instead of the prompt, or name the row."""


def _scenario(row: Row, scenario: Scenario) -> dict[str, Any]:
    """The user's words, with what the tools answered and what was said last; replies are not in it."""
    if not isinstance(row, DataRow):
        return {**row, "id": scenario.id}
    prompt = [message.to_record() for message in with_call_ids(scenario.messages())]
    return {"id": scenario.id, "prompt": prompt, **_beside(row, scenario.context)}


def _beside(row: DataRow, context: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: row.rest[key] for key in ("family", "topic", "split") if row.rest.get(key)}
    tools = {} if row.tools is None else {"tools": list(row.tools)}
    return {**named, **tools, **{key: value for key, value in context.items() if key not in _READ_FIRST}}


_CHECKS = ("answer", "expected_facts", "ground_truth", "solution")
_DONE = ("recorded", "reference")
"""Checks by what the agent of the row did, which are right where it did not fail."""


def _evaluation(row: Row, scenario: Scenario) -> dict[str, Any]:
    """A scenario of the split test that something can be checked by."""
    checks = _CHECKS if is_failure(scenario.context) else (*_DONE, *_CHECKS)
    if all(scenario.context.get(key) in (None, "", [], {}) for key in checks):
        raise ConfigurationError(f"nothing in it says what is right: no {', '.join(checks)}")
    return {**_scenario(row, scenario), "split": "test"}


def _chat(row: Row, scenario: Scenario) -> tuple[DataRow, list[dict[str, Any]], dict[str, Any]]:
    """The row, all its messages, of which replies in the prompt do not train, and what stands beside them."""
    if not isinstance(row, DataRow) or not row.completion:
        raise ConfigurationError("it shows no reply")
    records = [message.to_record() for message in with_call_ids((*row.prompt, *row.completion))]
    weights = [*(float(message.role != "assistant") for message in row.prompt), *row.weights]
    for record, weight in zip(records, weights, strict=True):
        record.update({} if weight == 1 else {"weight": weight})
    return row, records, {"id": scenario.id, **_beside(row, row.rest)}


def _replay(row: Row, scenario: Scenario) -> dict[str, Any]:
    """The whole conversation, with all that is known beside it."""
    chat, messages, beside = _chat(row, scenario)
    asked = len(chat.prompt)
    if any(message.role == "assistant" for message in chat.prompt):  # `messages` would end before it
        return {**beside, "prompt": messages[:asked], "completion": messages[asked:]}
    return {**beside, "messages": messages}


def _example(row: Row, scenario: Scenario) -> dict[str, Any]:
    """A conversation to imitate: one that nobody called a failure, up to its last reply."""
    chat, messages, beside = _chat(row, scenario)
    expect_reply(chat, beside)
    if chat.is_failure:
        raise ConfigurationError("it was reported as a failure")
    messages = through_last_reply(messages)
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in messages):
        raise ConfigurationError("all its replies have the weight 0")
    return {**beside, "messages": messages}


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The same with an id for each call, and with it for its result; where all have their own, they stay."""
    ids = [call.id for message in messages for call in message.tool_calls]
    keeps = "" not in ids and len(set(ids)) == len(ids)
    numbers, named = itertools.count(1), list(messages)
    for place, message in enumerate(messages):
        calls = [call if keeps else replace(call, id=f"call_{next(numbers)}") for call in message.tool_calls]
        named[place] = replace(named[place], tool_calls=tuple(calls))
        results = tool_results(messages[place + 1 :])
        for result, number in enumerate(calls_answered(message.tool_calls, results), start=place + 1):
            if number is not None:
                named[result] = replace(named[result], tool_call_id=calls[number].id)
    return named


# --- rows for others


def _for_openai(row: Row, scenario: Scenario) -> dict[str, Any]:
    """A line of OpenAI's fine-tuning: https://platform.openai.com/docs/guides/supervised-fine-tuning."""
    made = _example(row, scenario)
    messages, tools = made["messages"], made.get("tools") or []
    names = [tool["function"]["name"] for tool in tools]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for name in (call["function"]["name"] for call in calls):
        if name not in names or not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name):
            raise ConfigurationError(f"OpenAI takes no call of {name!r}: no tool of the row, or no name")
    if not {message.get("weight", 1) for message in messages} <= {0, 1}:
        raise ConfigurationError("OpenAI takes the weights 0 and 1 alone")
    offers = ("tools", "parallel_tool_calls") if tools else ()
    lines = [_openai_message(message) for message in messages]
    return {"messages": lines, **{key: made[key] for key in offers if key in made}}


def _openai_message(record: Mapping[str, Any]) -> dict[str, Any]:
    """Thoughts have no place there, and only replies a weight."""
    message = {key: record[key] for key in ("role", "content", "tool_calls", "tool_call_id") if key in record}
    if record["role"] == "assistant":
        message["content"] = message["content"] or (None if "tool_calls" in record else "")
        message |= {"weight": int(record["weight"])} if "weight" in record else {}
    return message


def _for_trl(row: Row, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """A row for each reply that trains: what it was asked, and what it said, with the tools as JSON text; the
    texts and numbers beside it are columns, which rewards get."""
    made = _example(row, scenario)
    messages = list(map(_trl_message, made["messages"]))
    beside = {key: value for key, value in made.items() if isinstance(value, str | int | float)}
    beside |= {"tools": json.dumps(made["tools"], ensure_ascii=False)} if made.get("tools") else {}
    for place, message in enumerate(made["messages"]):
        if message["role"] == "assistant" and message.get("weight", 1):
            yield {**beside, "prompt": messages[:place], "completion": [messages[place]]}


def _trl_message(record: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are objects there, as templates want them, and thoughts `reasoning_content`."""
    message = {{"reasoning": "reasoning_content"}.get(key, key): value for key, value in record.items()}
    message.pop("weight", None)
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


_ROWS = {"scenarios": _scenario, "replay": _replay, "sft": _example, "evaluation": _evaluation}
FORMS: Mapping[str, Callable[[Row, Scenario], Iterable[dict[str, Any]]]] = {
    name: (lambda row, scenario, make=make: [make(row, scenario)])
    for name, make in (_ROWS | {"openai": _for_openai}).items()
} | {"trl": _for_trl}
"""Forms that the house reads, and those of others."""
