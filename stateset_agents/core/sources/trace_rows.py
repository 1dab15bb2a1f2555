"""Conversations in what tracing platforms export: Langfuse, LangSmith, OpenTelemetry's spans, Inspect's logs.

    call 1: a -> b      call 2: a b c -> d      call 3: a b c d e -> f      ->      one row, a b c d e f

A platform keeps each call of a model with the messages that it read. A call whose messages and answer stand at
the beginning of a later call's is part of that one. The tables stand in row_shapes.yaml.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.core.sources.row_shapes import as_openai, tables
from stateset_agents.types.errors import ConfigurationError

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
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of records by the reason why they are in no row."""


def read_traces(located: Sequence[Located]) -> Traces | None:
    """The conversations of an export's records; None for rows that are none of a platform's."""
    firsts = [_snake(item) for _, item in located[:10] if isinstance(item, Mapping)]
    firsts = [next(_spans(item), item) for item in firsts]
    platform = next(
        (
            name
            for name, of in tables()["platforms"].items()
            if any(item.keys() >= set(columns) for item in firsts for columns in of["has"])
        ),
        None,
    )
    if platform is None:
        return None
    of = tables()["platforms"][platform]
    left_out: Counter[str] = Counter()
    calls = []
    for where, item in _records(located, platform):
        try:
            calls.append((where, _call(item, of)))
        except _LeftOut as reason:
            left_out[str(reason)] += 1
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from error
    rows = _merged(calls) if of.get("merges", True) else calls
    return Traces(platform=platform, rows=_named(rows), num_calls=len(calls), left_out=left_out)


class _LeftOut(Exception):
    """The reason why a record is in no conversation."""


def _call(item: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """A call as a row. Raises _LeftOut for a record of something else."""
    kind = item.get(of["kind"]) if "kind" in of else None
    if kind not in of.get("calls", [kind]):
        raise _LeftOut(f"{of['kind']} {kind!s:.40}: no call of a model")
    if item.get("error"):
        raise _LeftOut("it ended in an error")
    asked, tools = _messages(_first(item, of["input"]), "user")
    said, _ = _messages(_first(item, of.get("output", ())), "assistant")
    parts = _parsed(item.get("gen_ai.system_instructions"))
    system, _ = _messages(
        [{"role": "system", "parts": parts}] if isinstance(parts, list) else parts, "system"
    )
    if not asked:
        raise _LeftOut("it has no messages: its content was not recorded, or is something else")
    if "output" in of and not said:
        raise _LeftOut("the model gave no answer")
    row = {name: item[key] for key, name in of["keeps"].items() if item.get(key) not in (None, "", [], {})}
    tools = _first(item, of.get("tools", ())) or tools
    return {**row, "messages": [*system, *asked, *said], **({"tools": tools} if tools else {})}


def _first(item: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The first of these values that is there; `extra.invocation_params` is one inside another."""
    for name in names:
        value: Any = item.get(name)
        if value is None and "." in name:
            outer, _, inner = name.partition(".")
            value = _first(item[outer], [inner]) if isinstance(item.get(outer), Mapping) else None
        if value is not None:
            return value
    return None


def _messages(value: Any, role: str) -> tuple[list[dict[str, Any]], Any]:
    """The messages in a call's input or output, and the tools that stand beside them.

    They are a list, one message, a text of `role`, or inside another thing: OpenAI's `choices`, LangChain's
    `generations`, a list of one batch.
    """
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        value = _parsed(value)
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
    if any("message" in item for item in items):  # answers to choose from: the first
        return _messages(items[0].get("message"), role)
    if not all(item.keys() & set(tables()["speaks"]) for item in items):
        return [], None
    known = tables()["read_keys"]
    told = ("role", "type", "from", "kwargs")
    items = [item if item.keys() & set(told) else {"role": role, **item} for item in items]
    messages = [message for item in items for message in as_openai(item)]
    return [{key: given for key, given in message.items() if key in known} for message in messages], None


def _merged(calls: Sequence[Located]) -> list[Located]:
    """Only the calls whose messages no other call begins with. Thoughts, which a later call no longer has,
    come from the call that said them."""
    begins = [list(_begins(row["messages"])) for _, row in calls]
    said = {begin[-1]: row["messages"][-1] for begin, (_, row) in zip(begins, calls, strict=True)}
    longest: dict[bytes, int] = {}
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
    """A digest of the first message, of the first two, and so on."""
    digest = b""
    for message in messages:
        digest = hashlib.blake2b(digest + _key(message).encode(errors="surrogatepass")).digest()
        yield digest


def _key(message: Mapping[str, Any]) -> str:
    """What a message says, however it is written."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    texts = [[call.get("name"), _parsed(call.get("arguments", call.get("args")))] for call in calls]
    return json.dumps([message.get("role"), message.get("content") or "", texts], sort_keys=True, default=str)


def _parsed(text: Any) -> Any:
    """The value of a JSON text; anything else as it stands."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _named(rows: Sequence[Located]) -> list[Located]:
    """Each with an id of its own: a trace may have several conversations, of one sample several epochs."""
    seen: Counter[str] = Counter()
    named = []
    for where, row in rows:
        if (name := row.get("id")) is not None:
            seen[str(name)] += 1
            row = {**row, "id": str(name) if seen[str(name)] == 1 else f"{name}-{seen[str(name)]}"}
        named.append((where, row))
    return named


# --- the records of a file


def _records(located: Iterable[Located], platform: str) -> Iterator[Located]:
    if platform.startswith("OpenTelemetry"):
        yield from _of_spans(located)
        return
    for where, item in located:
        record = _snake(item) if isinstance(item, Mapping) else {}
        inner = record.get("observations")
        if isinstance(inner, list) and any(isinstance(each, Mapping) for each in inner):
            beside = {"session_id": record.get("session_id"), "scores": _scores(record)}
            inner = [each for each in inner if isinstance(each, Mapping)]
            yield from ((where, beside | _snake(each)) for each in inner)
        elif platform == "Langfuse" and "trace_id" not in record:  # a trace without its observations
            yield (
                where,
                {"type": "GENERATION", "trace_id": record.get("id"), **record, "scores": _scores(record)},
            )
        elif platform == "Inspect":
            yield where, _sample(record)
        else:
            yield where, record


def _scores(trace: Mapping[str, Any]) -> dict[str, Any]:
    scores = [score for score in trace.get("scores") or () if isinstance(score, Mapping)]
    return {str(score.get("name")): score.get("value") for score in scores}


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of Inspect's; pictures stand in its attachments, its tools in the first call of the model."""
    text = json.dumps(sample.get("messages"))
    for name, content in (sample.get("attachments") or {}).items():
        text = text.replace(json.dumps(f"attachment://{name}"), json.dumps(content))
    events = [event for event in sample.get("events") or () if event.get("event") == "model"]
    scores = {name: score.get("value") for name, score in (sample.get("scores") or {}).items()}
    verdicts = [{"C": True, "I": False}.get(value) for value in scores.values() if isinstance(value, str)]
    known = {"success": verdicts[0]} if len(scores) == len(verdicts) == 1 and verdicts[0] is not None else {}
    tools = next((event.get("tools") for event in events), None)
    return {**sample, "messages": json.loads(text), "scores": scores, "tools": tools, **known}


_OF_A_MESSAGE = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")


def _of_spans(located: Iterable[Located]) -> Iterator[Located]:
    """Each span with its attributes, those of its events, and what logs say of it."""
    spans: dict[Any, tuple[str, dict[str, Any]]] = {}
    for where, item in located:
        for span in _spans(_snake(item) if isinstance(item, Mapping) else {}):
            ids = (span["trace_id"], span["span_id"])
            _, merged = spans.setdefault(ids, (where, {"trace_id": span["trace_id"]}))
            for event in (span, *map(_snake, span.get("events") or ())):
                name = event.get("event_name") or event.get("name") or ""
                values = _attributes(event.get("attributes"))
                body = _value(event.get("body")) or values
                if role := _OF_A_MESSAGE.fullmatch(name):
                    merged.setdefault("by message", []).append({"role": role[1], **body})
                elif name == "gen_ai.choice":
                    merged["choice"] = body.get("message", body)
                else:
                    merged |= values
    yield from spans.values()


def _spans(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans and log records of a request of OTLP's, or the one that an exporter of the SDK wrote."""
    if "resource_spans" not in item and "resource_logs" not in item:
        context = item.get("context")
        ids = context if isinstance(context, Mapping) else item
        if "attributes" in item and "trace_id" in ids and "span_id" in ids:
            yield {**item, "trace_id": ids["trace_id"], "span_id": ids["span_id"]}
        return
    for resource in (*item.get("resource_spans", ()), *item.get("resource_logs", ())):
        resource = _snake(resource)
        for scope in map(_snake, (*resource.get("scope_spans", ()), *resource.get("scope_logs", ()))):
            yield from map(_snake, (*scope.get("spans", ()), *scope.get("log_records", ())))


def _attributes(values: Any) -> dict[str, Any]:
    """Attributes as a mapping; OTLP has a list of keys and values."""
    if isinstance(values, Mapping):
        return dict(values)
    return {item["key"]: _value(item.get("value")) for item in values or ()}


def _value(value: Any) -> Any:
    """OTLP's {"stringValue": "x"} as "x"; others as they stand."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return value or None
    [(kind, inner)] = value.items()
    kind = _CAMEL.sub(r"_\1", kind).lower()
    if kind == "array_value":
        return [_value(item) for item in inner.get("values", ())]
    if kind == "kvlist_value":
        return _attributes(inner.get("values"))
    if kind == "int_value":
        return int(inner)
    return inner if kind in ("string_value", "bool_value", "double_value") else value


_CAMEL = re.compile(r"(?<=[a-z])([A-Z])")


def _snake(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item with its keys in snake case: APIs write traceId, exports of tables trace_id."""
    return {_CAMEL.sub(r"_\1", str(key)).lower(): value for key, value in item.items()}
