"""The shapes of rows that people publish, in the order in which they are tried."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.core.sources.rows.data_row import DataRow
from stateset_agents.core.sources.rows.messages import Chat, read_messages, read_reply
from stateset_agents.core.sources.rows.tools import from_json_text, read_schemas
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import OPENING_COLUMNS

_GSM8K = re.compile(r"\n####\s*(.*\S)\s*$")
_TOOLS = ("tools", "functions")
_SYSTEM = ("system", "system_prompt")
_PICTURES = ("image", "images")
_NOT_SHOWN = ("choices", "options", "passage", "document", "history")
"""What a question in text may be about; a model that is not shown it is asked something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A way to write a row: the column of its prompt tells it."""

    name: str
    prompt: str
    """The column that only this shape has, among those of the shapes behind it."""
    completions: tuple[str, ...] = ()
    """Columns of what was answered, the first that the row has; none where the prompt's column has all."""
    needs: tuple[str, ...] = ()
    """Further columns that the shape has."""
    detail: str | None = None
    """A column whose text stands below the prompt's, after a blank line."""

    def fits(self, row: Mapping[str, Any]) -> bool:
        return all(row.get(column) is not None for column in (self.prompt, *self.needs))


SHAPES: tuple[Shape, ...] = (
    Shape(name="OpenAI messages", prompt="messages"),
    Shape(name="ShareGPT", prompt="conversations"),
    Shape(name="tau-bench", prompt="traj"),
    Shape(name="xLAM", prompt="query", completions=("answers",), needs=("answers", "tools")),
    Shape(name="TRL", prompt="prompt", completions=("completion", "response")),
    Shape(name="Alpaca", prompt="instruction", completions=("output", "response"), detail="input"),
    Shape(name="question", prompt="question", completions=("answer", "response")),
    Shape(name="problem", prompt="problem", completions=("solution",)),
    Shape(name="query", prompt="query", completions=("answer", "response")),
    Shape(name="user message", prompt="user_message", completions=("response",)),
    Shape(name="input", prompt="input", completions=("output",)),
)
assert {shape.prompt for shape in SHAPES} == set(OPENING_COLUMNS)


def read_row(row: Any) -> DataRow | None:
    """What a row asks and shows; None for one that has an `opening` of its own, or nothing that could be one.

    Raises ConfigurationError, naming the column and the mend, for a row of a known shape that cannot be read
    without guessing.
    """
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"a row must be a mapping, got {type(row).__name__}: {row!r:.80}")
    shape = next((shape for shape in SHAPES if shape.fits(row)), None)
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
    listed = _only(row, _TOOLS)
    tools = None if listed is None else read_schemas(row[listed])
    before, after = _parts(row, shape, tools or ())
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
    """What is not in the messages. Of GSM8K's answers, `... #### 72`, the value is `answer`, and all of it
    `solution`."""
    rest = {
        key: value
        for key, value in row.items()
        if value is not None
        and key not in (*_TOOLS, *_SYSTEM)
        and (key not in columns or (bool(shape.completions) and not _is_chat(value)))
    }
    value = _GSM8K.search(str(rest.get("answer"))) if shape.name == "question" else None
    return rest if value is None else {"solution": rest["answer"], **rest, "answer": value[1]}


def expect_chat(row: Any) -> DataRow:
    """What a row asks and shows. Raises ConfigurationError for one that is no conversation."""
    read = read_row(row)
    if read is None:
        raise ConfigurationError(
            f"this row is no conversation: it has {', '.join(map(str, row)) or 'nothing'}; give it messages, "
            '[{"role": "user", "content": ...}, ...], or prompt and completion, or map what it has: '
            "{dataset: FILE, columns: {messages: COLUMN}}"
        )
    return read


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
    return before, _one(read_reply(answer)) if isinstance(answer, str) and answer.strip() else _NOTHING


_NOTHING = Chat(messages=(), weights=(), unread=())


def _one(message: Message) -> Chat:
    return Chat(messages=(message,), weights=(1.0,), unread=())


def _divided(chat: Chat) -> tuple[Chat, Chat]:
    """A whole conversation up to the first reply to the user, a greeting before it too, and the rest."""
    _expect_user(chat, "a conversation")
    roles = [message.role for message in chat.messages]
    first = roles.index("user")
    end = roles.index("assistant", first) if "assistant" in roles[first:] else len(roles)
    return (
        Chat(messages=chat.messages[:end], weights=chat.weights[:end], unread=chat.unread),
        Chat(messages=chat.messages[end:], weights=chat.weights[end:], unread=()),
    )


def _expect_user(chat: Chat, column: str) -> None:
    if not any(message.role == "user" for message in chat.messages):
        raise ConfigurationError(f"{column} needs a message of the user")


def _from_text(value: Any) -> Any:
    """A list of messages for its JSON text; anything else as it stands."""
    if isinstance(value, str) and value.lstrip()[:2] == "[{":
        try:
            items = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return items if _is_chat(items) and all("role" in item for item in items) else value
    return value


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
    given = [column for column in columns if row.get(column) not in (None, "")]
    full = [column for column in given if row[column] not in ([], "[]")] or given
    if any(row[column] != row[full[0]] for column in full):
        raise ConfigurationError(f"the row has {' and '.join(map(repr, full))}, which differ: leave one")
    return next(iter(full), None)


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
