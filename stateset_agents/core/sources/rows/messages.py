"""Lists of messages as people publish them: OpenAI's format, old and new, and ShareGPT's.

Thoughts and calls may stand in a reply's words, `<think>` and `<tool_call>`, as models write them; they are
read as `core.chat.replies` reads what an agent sampled.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.core.chat.replies.parsing import parse_reply
from stateset_agents.core.sources.rows.tools import from_json_text, without_unasked_nulls
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.schemas import parameters_of

_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Those that are not OpenAI's, LLaMA-Factory's among them."""
_THOUGHTS = ("reasoning", "reasoning_content", "thinking")
_READ = {
    "role",
    "content",
    "refusal",
    *_THOUGHTS,
    "thinks_first",
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    "weight",
}
_THOUGHT = re.compile(r"\s*(?:<think>)?((?:(?!</?think>).)*)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A list of messages, read."""

    messages: tuple[Message, ...]
    weights: tuple[float, ...]
    unread: tuple[str, ...]


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
    for number, item in enumerate(items, start=1):
        data = _as_openai(item)
        unread += [key for key, given in data.items() if key not in _READ and given is not None]
        weight = _weight(data)
        for message in _read(data, messages, tools):
            if message.role == "user" and not message.content.strip():
                raise ConfigurationError(
                    f"message {number} of {column} is the user's and has no words: give it `content`, or "
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


def _as_openai(item: Any) -> Mapping[str, Any]:
    """ShareGPT's {"from": "human", "value": ...} as OpenAI writes it; others as they stand."""
    if not isinstance(item, Mapping):
        raise ConfigurationError(f"a message must be a mapping, got {type(item).__name__} {item!r:.60}")
    if item.get("from") is None or item.get("role") is not None:
        return item
    name, value = item["from"], item.get("value")
    data = {key: given for key, given in item.items() if key not in ("from", "value")}
    data["role"] = _SHAREGPT_ROLES.get(name, name) if isinstance(name, str) else name
    if name == "function_call":
        calls = from_json_text(value, "a function_call")
        data["tool_calls"] = calls if isinstance(calls, list) else [calls]
    else:
        data["content"] = value
    return data


def _read(
    data: Mapping[str, Any], before: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> Iterator[Message]:
    """The message; of results that stand in one, a message for each call before it."""
    if data.get("tool_calls") and isinstance(data["tool_calls"], Sequence):
        data = {**data, "tool_calls": [_without_nulls(call, tools) for call in data["tool_calls"]]}
    message = Message.from_record(data)
    given = [key for key in _THOUGHTS if data.get(key) is not None]
    if any(data[key] != message.reasoning for key in given):
        raise ConfigurationError(f"a message has {' and '.join(given)}, which differ: leave one")
    if data.get("tool_calls") and data.get("function_call") is not None:
        raise ConfigurationError("a message has tool_calls and function_call: leave one")
    if message.role == "assistant" and message.images:
        raise ConfigurationError("a reply has a picture, which no agent here can give: leave the row out")
    for call in message.tool_calls:
        _expect_json(call)
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
                    f"a reply has its calls or its thought twice, in its words and beside them: "
                    f"{message.content[:60]!r}"
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


def _expect_json(call: ToolCall) -> None:
    try:
        json.dumps(dict(call.arguments), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the arguments of tool call {call.name!r} are no JSON ({error}): write them as JSON text"
        ) from error


def _without_nulls(call: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """A call whose arguments are an object, without nulls that nobody asked for; others as they stand."""
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    schema = parameters_of(function.get("name"), tools)
    clean = {
        key: without_unasked_nulls(value, schema)
        if isinstance(value, Mapping) and key != "function"
        else value
        for key, value in function.items()
    }
    return clean if function is call else {**call, "function": clean}


def _as_json_call(found: re.Match[str]) -> str:
    """A call as JSON. Hermes' rows have Python's spelling: single quotes, True, None."""
    try:
        json.loads(found[1])
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(found[1].strip())
            return f"<tool_call>{json.dumps(value)}</tool_call>"
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass  # the parser says what is wrong with it
    return found[0]


def _weight(message: Mapping[str, Any]) -> float:
    weight = message.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ConfigurationError(f"a message's weight must be a number of at least 0, got {weight!r}")
    return float(weight)
