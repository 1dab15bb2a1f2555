"""Rows as people publish them: their shapes, the lists of messages in them, and the schemas of tools.

Messages are in OpenAI's format, old and new, or ShareGPT's. Thoughts and calls may stand in a reply's words,
`<think>` and `<tool_call>`, as models write them; they are read as `core.chat.replies` reads what an agent
sampled. The tables stand in row_shapes.yaml.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from stateset_agents.core.chat.escaping import encodable
from stateset_agents.core.chat.replies.parsing import parse_reply
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import MAX_NESTING, Message, is_nested_deeper
from stateset_agents.types.scenario import OPENING_COLUMNS
from stateset_agents.types.schemas import parameters_of, without_members, without_nulls

_THOUGHTS = ("reasoning", "reasoning_content", "thinking")
_THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!</?think>).)*)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A list of messages, read."""

    messages: tuple[Message, ...] = ()
    weights: tuple[float, ...] = ()
    unread: tuple[str, ...] = ()


def read_messages(value: Any, column: str, tools: Sequence[Mapping[str, Any]] = ()) -> Chat:
    """A list of messages or its JSON text. Raises ConfigurationError, naming message and mend."""
    items = from_json_text(value, column)
    if isinstance(items, str | Mapping) or not isinstance(items, Sequence) or not items:
        raise ConfigurationError(
            f'{column} must be a list of messages, [{{"role": "user", "content": ...}}], got {items!r:.60}'
        )
    messages: list[Message] = []
    weights: list[float] = []
    unread: list[str] = []
    read_keys = tables()["read_keys"]
    entries = ((number, item, data) for number, item in enumerate(items, start=1) for data in as_openai(item))
    for number, item, data in entries:
        unread += [key for key, content in data.items() if key not in read_keys and content is not None]
        weight = _weight(data)
        for message in _read(data, messages, tools):
            if message.role == "user" and not message.content.strip():
                words = "value" if "from" in item else "content"
                raise ConfigurationError(
                    f"message {number} of {column} is the user's and has no words: give it `{words}`, or "
                    f"leave the row out (it has {', '.join(map(str, item))})"
                )
            messages.append(message)
            weights.append(weight)
    return Chat(messages=tuple(messages), weights=tuple(weights), unread=tuple(unread))


def read_reply(text: str) -> Message:
    """An assistant's words, with the thought and the calls that may stand in them.

    Words are read for them only where the tags are closed: `<think>` in a sentence stays a word. Raises
    ConfigurationError for a call that cannot be read.
    """
    thought = _THOUGHT.match(text)
    is_open = any(text.count(f"<{tag}>") > text.count(f"</{tag}>") for tag in ("think", "tool_call"))
    if is_open or (thought is None and not _CALL.search(text)):
        return Message(role="assistant", content=text)
    words = text[thought.end() :] if thought is not None else text
    if thought is not None and "<think>" not in thought[0]:  # templates open it in the prompt
        text = f"<think>{text}"
    reply = parse_reply(_CALL.sub(_as_json_call, text))
    broken = next((call.error for call in reply.tool_calls if call.error is not None), None)
    if broken is not None:
        raise ConfigurationError(f"{broken}: {text[:80]!r}; mend the call, or leave the row out")
    if not reply.thinks_first or any(map(str.strip, _CALL.split(words)[2::2])):
        raise ConfigurationError(
            "a reply has a second thought, or words behind a tool call, which templates write in another "
            f"order: {text[:80]!r}; write thought, words and calls in this order, or leave the row out"
        )
    return replace(reply, tool_calls=tuple(replace(call, id="") for call in reply.tool_calls))


def as_openai(item: Any) -> Iterator[Mapping[str, Any]]:
    """A message of ShareGPT, LangChain, Anthropic or OpenTelemetry as OpenAI writes it; others as they stand.
    Results in it are messages of their own.

    {"from": "human", "value": "Hi"}  ->  {"role": "user", "content": "Hi"}
    """
    if not isinstance(item, Mapping):
        raise ConfigurationError(f"a message must be a mapping, got {type(item).__name__} {item!r:.60}")
    inner = item.get("kwargs", item.get("data"))
    if isinstance(inner, Mapping) and item.get("role") is None:  # LangChain's, serialised
        names = [item.get("type"), *(item["id"] if isinstance(item.get("id"), list) else ())]
        item = {"type": names[-1], **inner}
    roles = tables()["langchain_roles"]
    if item.get("role") is None and isinstance(item.get("type"), str) and item["type"] in roles:
        item = {"role": roles[item["type"]], **{key: item[key] for key in item if key != "type"}}
    if item.get("from") is not None and item.get("role") is None:
        yield _of_sharegpt(item)
        return
    if item.get("role") == "tool" and item.get("tool_call_id") is None and isinstance(item.get("id"), str):
        item = {**item, "tool_call_id": item["id"]}
    blocks = item.get("parts", item.get("content"))
    yield from _of_blocks(item, blocks) if isinstance(blocks, list) else [item]


def _of_sharegpt(item: Mapping[str, Any]) -> Mapping[str, Any]:
    name, value = item["from"], item.get("value")
    data = {key: content for key, content in item.items() if key not in ("from", "value")}
    roles = tables()["sharegpt_roles"]
    if name not in list(roles):
        raise ConfigurationError(f"a message's `from` must be one of {', '.join(roles)}, got {name!r:.60}")
    data["role"] = roles[name]
    if name == "function_call":
        calls = from_json_text(value, "a function_call")
        data["tool_calls"] = calls if isinstance(calls, list) else [calls]
    else:
        data["content"] = value
    return data


def _of_blocks(item: Mapping[str, Any], blocks: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """A message whose thoughts, calls and results are parts of its content."""
    of: dict[str, list[Any]] = {"words": [], "thought": [], "call": []}
    for block in blocks:
        name = str(block.get("type")) if isinstance(block, Mapping) else ""
        kind, key = tables()["blocks"].get(name, ("other", ""))
        value = block.get(key, block.get("content")) if key else None
        if kind == "result":
            text = value if isinstance(value, str | list) else json.dumps(value, ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id", block.get("id")), "content": text}
        elif kind == "call":
            of[kind].append(
                {"id": block.get("id"), "function": {"name": block.get("name"), "arguments": value}}
            )
        elif kind == "thought":
            of[kind].append(str(value))
        else:
            of["words"].append({"type": "text", "text": value} if isinstance(value, str) else block)
    calls = item.get("tool_calls") or of["call"] or None
    if of["words"] or of["thought"] or calls or not blocks:
        more = {"reasoning": "\n".join(of["thought"])} if of["thought"] else {}
        yield {**item, "parts": None, "content": of["words"], "tool_calls": calls, **more}


def _read(
    data: Mapping[str, Any], before: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> Iterator[Message]:
    """The message; of results that stand in one, a message for each call before it."""
    if data.get("tool_calls") and isinstance(data["tool_calls"], Sequence):
        data = {**data, "tool_calls": [_clean_call(call, tools) for call in data["tool_calls"]]}
    message = Message.from_record(data)
    keys = [key for key in _THOUGHTS if data.get(key) is not None]
    if any(data[key] != message.reasoning for key in keys):
        raise ConfigurationError(f"a message has {' and '.join(keys)}, which differ: leave one")
    if data.get("tool_calls") and data.get("function_call") is not None:
        raise ConfigurationError("a message has tool_calls and function_call: leave one")
    if message.role == "assistant" and message.images:
        raise ConfigurationError("a reply has a picture, which no agent here can give: leave the row out")
    for call in message.tool_calls:
        as_json(dict(call.arguments), f"the arguments of tool call {call.name!r}")
    if message.tool_calls and message.role != "assistant":
        raise ConfigurationError(
            f"a message of the {message.role} calls {message.tool_calls[0].name!r}: only an assistant's "
            "calls can be played or trained; leave the row out"
        )
    if message.role == "assistant":
        reply = read_reply(message.content)
        if reply.content != message.content:
            if (message.tool_calls and reply.tool_calls) or (message.reasoning and reply.reasoning):
                raise ConfigurationError(
                    f"a reply has its calls or thought twice, in words and beside: {message.content[:60]!r}"
                )
            message = replace(
                message,
                content=reply.content,
                reasoning=message.reasoning or reply.reasoning,
                thinks_first=message.thinks_first and reply.thinks_first,
                tool_calls=message.tool_calls or reply.tool_calls,
            )
    results = _RESPONSE.findall(message.content) if message.role == "tool" else []
    if not results:
        yield message
        return
    calls = before[-1].tool_calls if before else ()
    texts = [text.strip() for text in results]
    if len(texts) != len(calls):
        texts = ["\n".join(texts)]
    for text in texts:
        yield replace(message, content=text)


def as_json(value: Any, of: str) -> str:
    """The JSON text. Raises ConfigurationError for what has none, NaN among it; `of` names the value."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{of} are no JSON ({error}): write them as JSON text") from error


def _clean_call(call: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """A call whose arguments are an object, without nulls that nobody asked for; others as they stand."""
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    schema = parameters_of(function.get("name"), tools)
    given = [key for key, value in function.items() if isinstance(value, Mapping) and key != "function"]
    clean = {**function, **{key: without_unasked_nulls(function[key], schema) for key in given}}
    return clean if function is call else {**call, "function": clean}


def _as_json_call(match: re.Match[str]) -> str:
    """A call as JSON. Hermes' rows have Python's spelling: single quotes, True, None."""
    try:
        json.loads(match[1])
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(match[1].strip())
            return f"<tool_call>{json.dumps(value)}</tool_call>"
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass  # the parser says what is wrong with it
    return match[0]


def _weight(message: Mapping[str, Any]) -> float:
    weight = message.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ConfigurationError(f"a message's weight must be a number of at least 0, got {weight!r}")
    return float(weight)


# --- schemas of tools, and the nulls that Arrow adds to calls ---

_LIST = re.compile(r"list\[(\w+)\]", re.IGNORECASE)


def read_json(value: Any) -> Any:
    """The value of the JSON text of an object or a list; anything else as it stands."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def from_json_text(value: Any, column: str) -> Any:
    """The value, read as JSON where it is a text. Raises ConfigurationError for another text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{column} is a text that is not JSON ({error}): {value[:60]!r}; write it with json.dumps"
        ) from error


def read_schemas(value: Any) -> tuple[dict[str, Any], ...]:
    """Schemas in OpenAI's format, without nulls, of a list or its JSON text.

    An entry may be `{"type": "function", "function": {...}}` or what stands in there, its parameters JSON
    Schema or as xLAM has them, `{"city": {"type": "str, optional", "description": ...}}`.

    Raises ConfigurationError for anything else.
    """
    items = from_json_text(value, "tools")
    if isinstance(items, Mapping):
        items = [items]
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ConfigurationError(f"tools must be a list of schemas, got {type(items).__name__} {items!r:.60}")
    named: dict[str, dict[str, Any]] = {}
    for schema in map(_schema, items):
        name = schema["function"]["name"]
        if named.setdefault(name, schema) != schema:
            raise ConfigurationError(f"tool {name!r} stands twice in tools, with two schemas: leave one")
    return tuple(named.values())


def _schema(item: Any) -> dict[str, Any]:
    item = from_json_text(item, "a tool") if isinstance(item, str) and item[:1] == "{" else item
    if is_nested_deeper(item, MAX_NESTING):
        raise ConfigurationError(f"a tool has more than {MAX_NESTING} levels of objects and lists")
    item = without_nulls(item)
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigurationError(
            f"a tool must be in OpenAI's shape, {{type: function, function: {{name: ...}}}}, got {item!r:.80}"
        )
    function = {key: value for key, value in function.items() if function is not item or key != "type"}
    parameters = function.pop("input_schema", None) or function.get("parameters")
    if isinstance(parameters, str):
        parameters = from_json_text(parameters, f"the parameters of tool {function['name']!r}")
    if not isinstance(parameters, Mapping | None):
        raise ConfigurationError(
            f"the parameters of tool {function['name']!r} must be a JSON schema, {{type: object, properties: "
            f"{{...}}}}, got {parameters!r:.60}"
        )
    if parameters is not None:
        function["parameters"] = _as_json_schema(parameters)
    return {"type": "function", "function": function}


def _as_json_schema(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """xLAM's parameters as JSON Schema, others as they stand."""
    is_bare = (
        parameters
        and "properties" not in parameters
        and all(
            isinstance(value, Mapping) and isinstance(value.get("type"), str) for value in parameters.values()
        )
    )
    if not is_bare:
        return {**parameters, "type": "object"} if parameters.get("type") == "dict" else parameters
    properties: dict[str, Any] = {}
    required = []
    for name, value in parameters.items():
        first, *others = (part.strip() for part in str(value["type"]).split(","))
        is_optional = "optional" in others or "default" in value
        properties[name] = {**_typed(first), **{key: item for key, item in value.items() if key != "type"}}
        if not is_optional:
            required.append(name)
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _typed(name: str) -> dict[str, Any]:
    """A type's schema; empty, which allows all, for one that JSON Schema does not have."""
    if items := _LIST.fullmatch(name):
        return {"type": "array", "items": _typed(items[1])}
    types = tables()["python_types"]
    type_name = types.get(name.lower(), name.lower())
    return {"type": type_name} if type_name in types.values() else {}


def without_unasked_nulls(arguments: Any, schema: Any) -> Any:
    """The arguments of a call without nulls, but those that the schema requires.

    Arrow gives the arguments of each call the names of all: {"city": "Oslo", "days": null}. Of an argument
    that is not required null says no more than its absence.
    """
    return without_members(
        arguments, schema, lambda members, name, value: value is None and name not in members.required
    )


# --- rows ---


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRow:
    """A row's question, and all that it shows of the answer.

    {"prompt": "2+2?", "completion": "4"}  ->  prompt (user: 2+2?), completion (assistant: 4)
    """

    shape: str
    """The name of its shape, one of `shapes()`."""
    columns: tuple[str, ...]
    """Names of the columns that hold the prompt and the completion, for the line that says so."""
    prompt: tuple[Message, ...]
    """System message, earlier turns, and the message that an agent answers first; never trained on."""
    completion: tuple[Message, ...] = ()
    """The messages after the prompt, the users' later words among them; empty where there are none."""
    weights: tuple[float, ...] = ()
    """[completion] of each message in a loss: OpenAI's `weight`, 1 where it has none."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """The schemas it offers, in OpenAI's format; None where it names none."""
    rest: Mapping[str, Any]
    """The other columns as they stand, and the texts among those that were read."""
    unread: tuple[str, ...] = ()
    """Keys of its messages that have a value and no place here, one for each time."""

    @property
    def is_failure(self) -> bool:
        """True if somebody called it one."""
        return is_failure(self.rest)


_NO = ("false", "0", "0.0")


def is_failure(columns: Mapping[str, Any]) -> bool:
    """True if somebody called a conversation with these columns one, in a cell of text, too."""
    return str(columns.get("success")).lower() in _NO


_GSM8K = re.compile(r"\n####\s*(.*\S)\s*$")
_TOOLS = ("tools", "functions")
_SYSTEM = ("system", "system_prompt")
_PICTURES = ("image", "images")
_NOT_SHOWN = ("choices", "options", "passage", "document", "history")
"""Columns that a question may be about; a model that is not shown them is asked something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A way to write a row: the column of its prompt tells it."""

    name: str
    prompt: str
    """The column that only this shape has, among those of the shapes behind it."""
    completions: Sequence[str] = ()
    """Columns of what was answered, the first that the row has; none where the prompt's column has all."""
    needs: Sequence[str] = ()
    """Further columns that the shape has."""
    detail: str | None = None
    """A column whose text stands below the prompt's, after a blank line."""

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(row.get(column) is not None for column in (self.prompt, *self.needs))


@cache
def tables() -> dict[str, Any]:
    """The tables of row_shapes.yaml."""
    data: dict[str, Any] = read_yaml(Path(__file__).with_name("row_shapes.yaml"))
    return data


@cache
def shapes() -> tuple[Shape, ...]:
    """The shapes that are known, the first that fits a row first."""
    all_shapes = tuple(Shape(**shape) for shape in tables()["shapes"])
    assert {shape.prompt for shape in all_shapes} == set(OPENING_COLUMNS)
    return all_shapes


def read_row(row: Any) -> DataRow | None:
    """Reads a row of a known shape; None for one that has an `opening` of its own, or nothing that could be
    one.

    Raises ConfigurationError, naming the column and the mend, for a row of a known shape that cannot be read
    without guessing.
    """
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"a row must be a mapping, got {type(row).__name__}: {row!r:.80}")
    shape = next((shape for shape in shapes() if shape.fits(row)), None)
    if row.get("opening") not in (None, ""):
        if shape is not None and not shape.completions:
            raise ConfigurationError(
                f"the row has an opening and {shape.prompt}: take one out, for both say what is asked"
            )
        return None
    if shape is None:
        return None
    picture = next((column for column in _PICTURES if row.get(column) not in (None, "", [])), None)
    if picture is not None:
        raise ConfigurationError(
            f"column {picture!r} has pictures, which are read in messages alone: write them there as "
            '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
        )
    tools_column = _only(row, _TOOLS)
    tools = None if tools_column is None else read_schemas(row[tools_column])
    before, after = _parts(row, shape, tools or ())
    _expect_calls((*before.messages, *after.messages))
    completion = next((column for column in shape.completions if row.get(column) is not None), None)
    detail = shape.detail if row.get(shape.detail or "") else None
    columns = tuple(column for column in (shape.prompt, detail, completion) if column is not None)
    return DataRow(
        shape=shape.name,
        columns=columns,
        prompt=(*_system_of(row, before), *before.messages),
        completion=after.messages,
        weights=after.weights,
        tools=tools,
        rest=_rest(row, shape, columns),
        unread=(*before.unread, *after.unread),
    )


def _rest(row: Mapping[str, Any], shape: Shape, columns: Sequence[str]) -> dict[str, Any]:
    """The columns that are not in the messages. Of GSM8K's answers, `... #### 72`, the value is `answer`,
    and all of it `solution`; a `reward` of 0 is tau-bench's word for a failure."""
    rest = {
        key: value
        for key, value in row.items()
        if value is not None
        and key not in (*_TOOLS, *_SYSTEM)
        and (key not in columns or (bool(shape.completions) and not _is_chat(value)))
    }
    if shape.name == "tau-bench" and str(rest.get("reward")).lower() in _NO:
        rest["success"] = False
    value = _GSM8K.search(str(rest.get("answer"))) if shape.name == "question" else None
    return rest if value is None else {"solution": rest["answer"], **rest, "answer": value[1]}


def expect_chat(row: Any) -> DataRow:
    """Reads a row that is a conversation. Raises ConfigurationError for any other."""
    read = read_row(row)
    if read is None:
        raise ConfigurationError(
            f"this row is no conversation: it has {', '.join(map(str, row)) or 'nothing'}; give it messages, "
            '[{"role": "user", "content": ...}, ...], or prompt and completion, or map what it has: '
            "{dataset: FILE, columns: {messages: COLUMN}}"
        )
    return read


def expect_reply(row: DataRow, columns: Iterable[str]) -> None:
    """Raises ConfigurationError for a row of which nothing can be imitated, or not as it stands."""
    if row.shape == "TRL" and str(row.rest.get("label")).lower() in _NO:
        raise ConfigurationError(
            "its label is false: it shows what not to say; leave it out, or name the column otherwise"
        )
    if not any(message.role == "assistant" for message in row.completion):
        raise ConfigurationError(
            "it shows no reply to imitate: give a completion, or messages that end with the assistant's; "
            f"there are {', '.join(map(str, columns))}"
        )
    number, before, left = 0, None, 0
    for message, weight in zip(row.completion, row.weights, strict=True):
        if message.role == before == "assistant":
            raise ConfigurationError("two replies stand behind one another: make them one")
        if message.role != "tool" and left > 0:
            raise ConfigurationError("a call has no result: add it, or leave the row out")
        before = message.role
        left = left - 1 if message.role == "tool" else len(message.readable_calls)
        number += message.role == "assistant"
        if message.role == "assistant" and weight:
            _expect_example(message, number)


def _expect_example(reply: Message, number: int) -> None:
    text = f"{reply.reasoning or ''}{reply.content}"
    if not text.strip() and not reply.tool_calls:
        raise ConfigurationError(f'reply {number} is empty: take it out, or give it "weight": 0')
    if not reply.is_example:
        raise ConfigurationError(
            f"reply {number} thinks behind its first words, or has a call that "
            'cannot be read: take it out, or give it "weight": 0'
        )
    if encodable(text) != text:
        raise ConfigurationError(
            f"reply {number} has half of a character (a lone surrogate), which no "
            'tokenizer has: mend it, or give it "weight": 0'
        )


def _parts(row: Mapping[str, Any], shape: Shape, tools: Sequence[Mapping[str, Any]]) -> tuple[Chat, Chat]:
    """The messages of the prompt, and those after it."""
    if not shape.completions:
        return _divided(read_messages(row[shape.prompt], shape.prompt, tools))
    prompt = _from_text(row[shape.prompt])
    if isinstance(prompt, list | tuple):
        before = read_messages(prompt, shape.prompt, tools)
        _expect_user(before, shape.prompt)
        if before.messages[-1].role == "assistant":
            raise ConfigurationError(
                f"{shape.prompt} ends with words of the assistant: end it with the message that is to be "
                "answered, or give the whole conversation as messages"
            )
    else:
        before = _one(Message(role="user", content=_prompt_text(row, shape)))
    column = next((column for column in shape.completions if row.get(column) is not None), "")
    answer = _from_text(row.get(column))
    if shape.name == "xLAM":
        calls = from_json_text(answer, column)
        answer = [{"role": "assistant", "tool_calls": calls}] if calls else ""
    if _is_chat(answer):
        after = read_messages(answer, column, tools)
        if after.messages[0].role != "assistant":
            raise ConfigurationError(f"{column} must begin with the assistant's words")
        return before, after
    # a number or a list of answers is there to check by: no reply
    return before, _one(read_reply(answer)) if isinstance(answer, str) and answer.strip() else Chat()


def _expect_calls(messages: Iterable[Message]) -> None:
    """Raises ConfigurationError for a result that answers no call of the reply before it."""
    ids, left = list[str](), 0
    for message in messages:
        if message.role != "tool":
            ids, left = [call.id for call in message.tool_calls], len(message.tool_calls)
            continue
        left -= 1
        if left < 0 or (message.tool_call_id and all(ids) and message.tool_call_id not in ids):
            raise ConfigurationError(
                f"the result {message.content[:40]!r} with tool_call_id {message.tool_call_id!r} answers no "
                f"call before it, whose ids are {', '.join(ids) or 'none'}: mend it, or leave the row out"
            )


def _one(message: Message) -> Chat:
    return Chat(messages=(message,), weights=(1.0,))


def _divided(chat: Chat) -> tuple[Chat, Chat]:
    """A whole conversation up to the first reply to the user, a greeting before it too, and the rest."""
    _expect_user(chat, "a conversation")
    roles = [message.role for message in chat.messages]
    first = roles.index("user")
    end = roles.index("assistant", first) if "assistant" in roles[first:] else len(roles)
    return (
        Chat(messages=chat.messages[:end], weights=chat.weights[:end], unread=chat.unread),
        Chat(messages=chat.messages[end:], weights=chat.weights[end:]),
    )


def _expect_user(chat: Chat, column: str) -> None:
    if not any(message.role == "user" for message in chat.messages):
        raise ConfigurationError(f"{column} needs a message of the user")


def _from_text(value: Any) -> Any:
    """A list of messages for its JSON text; anything else as it stands."""
    items = read_json(value)
    return items if _is_chat(items) and all("role" in item for item in items) else value


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _prompt_text(row: Mapping[str, Any], shape: Shape) -> str:
    for column in _NOT_SHOWN if isinstance(row.get("context"), Mapping | None) else ("context", *_NOT_SHOWN):
        if row.get(column):
            raise ConfigurationError(
                f"the row has {column!r} beside {shape.prompt!r}, and nothing says how the model is shown "
                "it: write both into one column, and map it: columns: {prompt: THAT_COLUMN}"
            )
    texts = [row[column] for column in (shape.prompt, shape.detail or "") if row.get(column)]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigurationError(
                f"column {shape.prompt!r} must be text, got {type(text).__name__} {text!r:.60}: map another "
                "one, columns: {prompt: COLUMN}, or write it as text"
            )
    words = "\n\n".join(texts)
    if not words.strip():
        raise ConfigurationError(f"column {shape.prompt!r} is empty: give it words, or leave the row out")
    return words


def _only(row: Mapping[str, Any], columns: Sequence[str]) -> str | None:
    """The column of these that the row has something in. Raises ConfigurationError where two differ."""
    filled = [column for column in columns if row.get(column) not in (None, "")]
    names = [column for column in filled if row[column] not in ([], "[]")] or filled
    if any(row[column] != row[names[0]] for column in names):
        raise ConfigurationError(f"the row has {' and '.join(map(repr, names))}, which differ: leave one")
    return next(iter(names), None)


def _system_of(row: Mapping[str, Any], prompt: Chat) -> tuple[Message, ...]:
    """The system message that stands in a column of its own."""
    column = _only(row, _SYSTEM)
    if column is None:
        return ()
    if not isinstance(row[column], str):
        raise ConfigurationError(f"column {column!r} must be text, got {row[column]!r:.60}")
    if any(message.role == "system" for message in prompt.messages):
        raise ConfigurationError(
            f"the row has a system message in its messages and another as {column!r}: join them"
        )
    return (Message(role="system", content=row[column]),)
