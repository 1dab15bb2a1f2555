"""Conversations in what tracing platforms export: Langfuse, LangSmith, OpenTelemetry's spans, Inspect's logs.

    call 1: a -> b      call 2: a b c -> d      call 3: a b c d e -> f      ->      one row, a b c d e f

A platform keeps each call of a model with the messages that it read. A call whose messages and answer stand
at the beginning of a later call's is part of that one. The tables stand in row_shapes.yaml.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.core.sources.row_shapes import as_openai, read_json, tables
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

Located = tuple[str, Any]
"""A place in a file, `line 3` say, and what stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The conversations of an export."""

    platform: str
    rows: list[Located]
    """Each with the place of its last call: `messages`, `tools` and what the platform knows beside."""
    num_calls: int
    """Calls of models that were read; those beyond one a row stand whole in a later one."""
    left_out: list[tuple[str, str]]
    """The places of records that are in no row, each with the reason."""


def read_traces(located: Sequence[Located]) -> Traces | None:
    """The conversations of an export's records; None for rows that are none of a platform's.

    Raises ConfigurationError for an export of which each record is in a form that is not known.
    """
    firsts = [_snake(item) for _, item in located[:10] if isinstance(item, Mapping)]
    firsts += [span for item in firsts for span in _spans(item)]
    for platform, of in tables()["platforms"].items():
        if any(item.keys() >= set(columns) for item in firsts for columns in of["has"]):
            return _conversations(located, platform, of)
    return None


def reason_lines(left_out: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason, whatever values stand in it: how often, where first, and with which others."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for where, reason in left_out:
        alike.setdefault(re.sub(r"'[^']*'|\d+", "", reason), []).append((where, reason))
    lines = []
    for [(where, first), *more] in alike.values():
        values = (value for _, reason in more for value in re.findall(r"'[^']*'", reason))
        others = ", ".join(dict.fromkeys(value for value in values if value not in first))
        lines.append(f"{len(more) + 1}: {first} (first: {where})" + f"; also {others:.80}" * bool(others))
    return lines


def _conversations(located: Sequence[Located], platform: str, of: Mapping[str, Any]) -> Traces:
    left_out, calls, begins = list[tuple[str, str]](), list[Located](), list[list[bytes]]()
    for where, item in _records(located, platform, left_out):
        with _counted(where, left_out):
            row = _call(item, of)
            begins.append(list(_begins(row["messages"])))
            calls.append((where, row))
    if left_out and not calls and all(reason.startswith(_ODD) for _, reason in left_out):
        where, reason = left_out[0]
        raise ConfigurationError(f"{where}: this {platform} export has a form{reason.removeprefix(_ODD)}")
    sessions = {str(row["id"]): str(row["session"]) for _, row in calls if row.keys() >= {"id", "session"}}
    names = [str(row.get("id", row.get("session", where))) for where, row in calls]
    # two people's conversations may begin alike: only those of one trace or session are one
    of_each = zip(names, begins, strict=True)
    within = [[(sessions.get(name, name), begin) for begin in each] for name, each in of_each]
    rows, seen = _merged(calls, within) if "output" in of else calls, Counter[str]()
    for _, row in rows:  # a trace may have several conversations, a sample several epochs
        seen[name := str(row.get("id"))] += 1
        row["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    return Traces(platform=platform, rows=rows, num_calls=len(calls), left_out=left_out)


_ODD = "it has a form"


@contextlib.contextmanager
def _counted(where: str, left_out: list[tuple[str, str]]) -> Iterator[None]:
    """While open, a record that cannot be read is left out, and counted with the reason."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        is_told = isinstance(error, ConfigurationError)
        left_out.append((where, str(error) if is_told else f"{_ODD} of its own ({error})"))


def _call(item: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """A call as a row. Raises ConfigurationError for a record of something else."""
    kind = item.get(of.get("kind", ""))
    asked, tools = _messages(_first(item, of["input"]), "user")
    said = _answer(_first(item, of.get("output", ())))
    begin, _ = _messages(item.get("gen_ai.system_instructions"), "system")
    reasons = {
        f"{of.get('kind')} {kind!s:.40} is no call of a model": kind not in of.get("calls", [kind]),
        "it ended in an error": item.get("error"),
        "it has no messages: they were not recorded, or it is no call of a model": not asked,
        "the model gave no answer": "output" in of and not said,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ConfigurationError(reason)
    row = {name: item[key] for key, name in of["keeps"].items() if item.get(key) not in (None, "", [], {})}
    return row | {"messages": [*begin, *asked, *said], "tools": _first(item, of.get("tools", ())) or tools}


def _first(item: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((item[name] for name in names if item.get(name) is not None), None)


def _answer(value: Any) -> list[dict[str, Any]]:
    """The messages of a model's answer. What is no message and wraps none is its words: they may be JSON."""
    if _is_speech(read := read_json(value)):
        return _messages(read, "assistant")[0]
    if isinstance(value, Mapping) and value.keys() == {"output"}:  # LangSmith's, of what is no object
        value = value["output"]
    value = "" if value in (None, [], {}) else value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return [{"role": "assistant", "content": text}] if text.strip() else []


def _is_speech(value: Any) -> bool:
    """True for messages, blocks of one, and what wraps mappings as calls of models do."""
    if not isinstance(value, Mapping):
        return isinstance(value, list) and any(map(_is_speech, value))
    of = tables()
    speakers = [*of["sharegpt_roles"], *of["langchain_roles"], *of["blocks"]]
    inside = [value[key] for key in of["inside"] if isinstance(value.get(key), Mapping | list)]
    return (
        any(value.get(key) in speakers for key in ("role", "from", "type"))
        or bool(value.keys() & {"parts", "tool_calls", "function_call", "kwargs"})
        or ("content" in value and value.keys() <= set(of["read_keys"]))
        or any(
            isinstance(inner, Mapping) or not any(isinstance(part, str | int) for part in inner)
            for inner in inside
        )
    )


def _messages(value: Any, role: str) -> tuple[list[dict[str, Any]], Any]:
    """The messages in a call's input or output, and the tools that stand beside them.

    They are a list, one message, a text of `role`, or inside another thing: OpenAI's `choices`, LangChain's
    `generations`, a list of one batch.
    """
    value = read_json(value)
    if isinstance(value, str):
        return ([{"role": role, "content": value}] if value.strip() else []), None
    if isinstance(value, Mapping):
        inner = next((value[key] for key in tables()["inside"] if value.get(key) not in (None, "", [])), None)
        if inner is not None and not value.keys() & {"role", "from"}:
            nested, tools = _messages(inner, role)
            return nested, value.get("tools") or value.get("functions") or tools
        value = [value]
    if not isinstance(value, list) or not value:
        return [], None
    if isinstance(value[0], list):
        return _messages(value[0], role)
    items = [item if isinstance(item, Mapping) else {} for item in value]
    if "message" in items[0]:  # answers to choose from: the first
        return _messages(items[0]["message"], role)
    if role == "system":  # its parts
        items = [{"role": role, "parts": items}]
    if not all(item.keys() & set(tables()["speaks"]) for item in items):
        return [], None
    named, known = {"role", "type", "from", "kwargs"}, tables()["read_keys"]
    items = [item if item.keys() & named else {"role": role, **item} for item in items]
    messages = [message for item in items for message in as_openai(item)]
    return [{key: given for key, given in message.items() if key in known} for message in messages], None


def _merged(calls: Sequence[Located], begins: Sequence[Sequence[tuple[str, bytes]]]) -> list[Located]:
    """Only the calls whose messages no other call begins with. Thoughts, which a later call no longer has,
    come from the call that said them."""
    said = {begin[-1]: row["messages"][-1] for begin, (_, row) in zip(begins, calls, strict=True)}
    longest: dict[tuple[str, bytes], int] = {}
    for number in sorted(range(len(calls)), key=lambda number: len(begins[number])):
        longest |= dict.fromkeys((begin for begin in begins[number] if begin in said), number)
    rows = []
    for number, (where, row) in enumerate(calls):
        if longest[begins[number][-1]] == number:
            pairs = zip(begins[number], row["messages"], strict=True)
            whole = [{**said.get(begin, {}), **message} for begin, message in pairs]
            rows.append((where, {**row, "messages": whole}))
    return rows


def _begins(messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """A digest of the first message, of the first two, and so on, however they are written."""
    digest = b""
    for message in map(Message.from_record, messages):
        calls = [[call.name, call.arguments] for call in message.tool_calls]
        text = json.dumps([message.role, message.content, calls], sort_keys=True, default=str)
        digest = hashlib.blake2b(digest + text.encode()).digest()
        yield digest


# --- the records of a file


def _records(located: Iterable[Located], platform: str, left_out: list[tuple[str, str]]) -> Iterator[Located]:
    if platform == "OpenTelemetry":
        yield from _of_spans(located, left_out)
        return
    for where, item in located:
        with _counted(where, left_out):
            for record in _of_record(_snake(item) if isinstance(item, Mapping) else {}, platform):
                yield where, record


def _of_record(record: dict[str, Any], platform: str) -> Iterator[dict[str, Any]]:
    if platform == "Inspect":
        yield _sample(record)
    elif platform == "LangSmith":
        extra = record.get("extra") or {}
        tools = (extra.get("invocation_params") or {}).get("tools")
        # its `session_id` is the project; what others call a session, it calls a thread
        thread = _first(extra.get("metadata") or {}, ("session_id", "thread_id", "conversation_id"))
        yield {**record, "tools": tools, "session_id": thread}
    elif "trace_id" in record:
        yield record
    else:  # a trace of Langfuse's, with its observations or without
        trace = {"trace_id": record.get("id"), "type": "GENERATION", **record}
        inner = [_snake(each) for each in record.get("observations") or () if isinstance(each, Mapping)]
        yield from ({"scores": record.get("scores"), **each} for each in inner or [trace])


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of Inspect's; pictures stand in its attachments, its tools in the first call of the model."""
    text = json.dumps(sample.get("messages"))
    for name, content in (sample.get("attachments") or {}).items():
        text = text.replace(json.dumps(f"attachment://{name}"), json.dumps(content))
    events = (event.get("tools") for event in sample.get("events") or () if event.get("event") == "model")
    scores = {name: score.get("value") for name, score in (sample.get("scores") or {}).items()}
    verdicts = [{"C": True, "I": False}.get(str(value)) for value in scores.values()]
    success = verdicts[0] if len(verdicts) == 1 else None
    more = {"messages": json.loads(text), "scores": scores, "tools": next(events, None), "success": success}
    return {**sample, **more}


_OF_A_MESSAGE = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")


def _of_spans(located: Iterable[Located], left_out: list[tuple[str, str]]) -> Iterator[Located]:
    """Each span with its attributes, those of its events, and what logs say of it."""
    spans: dict[Any, tuple[str, dict[str, Any]]] = {}
    for where, item in located:
        for span in _spans(_snake(item) if isinstance(item, Mapping) else {}):
            with _counted(where, left_out):
                ids = (span["trace_id"], span["span_id"])
                first, known = spans.get(ids, (where, {"trace_id": span["trace_id"]}))
                merged = dict(known)
                for event in (span, *map(_snake, span.get("events") or ())):
                    name = event.get("event_name") or event.get("name") or ""
                    values = _attributes(event.get("attributes"))
                    body = _value(event.get("body")) or values
                    if role := _OF_A_MESSAGE.fullmatch(name):
                        merged["by message"] = [*merged.get("by message", ()), {"role": role[1], **body}]
                    elif name == "gen_ai.choice":
                        merged["choice"] = body.get("message") or {"role": "assistant", **body}
                    else:
                        merged |= values
                spans[ids] = first, merged
    yield from spans.values()


_LEVELS = ("resource_spans", "resource_logs", "scope_spans", "scope_logs", "spans", "log_records")


def _spans(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans and log records of a request of OTLP's, or the one that an exporter of the SDK wrote."""
    parts = [part for level in _LEVELS if isinstance(item.get(level), list) for part in item[level]]
    for part in (part for part in parts if isinstance(part, Mapping)):
        yield from _spans(_snake(part))
    ids = item["context"] if isinstance(item.get("context"), Mapping) else item
    if "attributes" in item and "trace_id" in ids and "span_id" in ids:
        yield {**item, "trace_id": ids["trace_id"], "span_id": ids["span_id"]}


def _attributes(values: Any) -> dict[str, Any]:
    """Attributes as a mapping; OTLP has a list of keys and values."""
    is_list = isinstance(values, list)
    return {item["key"]: _value(item.get("value")) for item in values} if is_list else dict(values or {})


def _value(value: Any) -> Any:
    """OTLP's {"stringValue": "x"} as "x"; others as they stand."""
    is_one = isinstance(value, Mapping) and len(value) == 1
    [(kind, inner)] = value.items() if is_one else [("", value)]
    read = _VALUES.get(kind.replace("_", "").lower())
    return (value or None) if read is None else read(inner)


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    **{"stringvalue": str, "boolvalue": bool, "intvalue": int, "doublevalue": float},
    "arrayvalue": lambda inner: list(map(_value, inner.get("values", ()))),
    "kvlistvalue": lambda inner: _attributes(inner.get("values")),
}
_CAMEL = re.compile(r"(?<=[a-z])([A-Z])")


def _snake(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item with its keys in snake case: APIs write traceId, exports of tables trace_id."""
    return {_CAMEL.sub(r"_\1", str(key)).lower(): value for key, value in item.items()}
