"""Conversations as JSON lines in OpenAI's chat format, one `{"messages": [...]}` each.

An agent's message with a thought has it as `reasoning`, so that the agent goes on with what it knew; a call
that could not be read has its `error` and what was `written`.

A conversation that was served also has its id, `"conversation"`, by which a deployment's journal knows it,
and the `"tools"` that the client offered. It stands in the file again whenever it has grown: the last line
counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.core.chat.escaping import encodable
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

_HINT = "give a file in a folder that exists and that you may write to"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedConversation:
    """A conversation as a server saved it."""

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas, as the client sent them."""


def save_conversation(
    path: str | Path,
    messages: Sequence[Message],
    *,
    conversation: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Append one line to the file, which is created if it does not exist.

    `conversation`, `tools`: of one that was served, for `load_served`.

    Raises ConfigurationError if it cannot be written.
    """
    data: dict[str, Any] = {} if conversation is None else {"conversation": conversation}
    data["messages"] = [message.to_record() for message in messages]
    if tools:
        data["tools"] = [dict(tool) for tool in tools]
    line = encodable(json.dumps(data, ensure_ascii=False))
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write conversations to {str(path)!r} ({error.strerror}): {_HINT}"
        ) from error


def load_conversations(path: str | Path) -> list[list[Message]]:
    """The conversations of a file, the oldest first.

    Raises ConfigurationError, with the file and line, if it cannot be read.
    """
    return [_messages(data) for data in _lines(path)]


def load_served(path: str | Path) -> dict[str, ServedConversation]:
    """The served conversations of a file by their ids, each as its last line has it.

    Raises ConfigurationError as `load_conversations` does, and for a conversation without an id.
    """
    served: dict[str, ServedConversation] = {}
    for data in _lines(path):
        name, tools = data.get("conversation"), data.get("tools", [])
        if not isinstance(name, str) or not name:
            raise ConfigurationError(
                f'{path}: a line must be {{"conversation": "ID", "messages": [...]}}, got {str(data)!r:.60}'
            )
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ConfigurationError(
                f"{path}: tools of {name!r} must be a list of schemas, got {str(tools)!r:.60}"
            )
        served.pop(name, None)  # in the order of the last lines
        served[name] = ServedConversation(id=name, messages=tuple(_messages(data)), tools=tuple(tools))
    return served


def _lines(path: str | Path) -> list[dict[str, Any]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigurationError(
            f"cannot read conversations from {str(path)!r} ({reason}): give JSON lines, as --save writes"
        ) from error
    parsed = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                parsed.append(_parse(line))
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not parsed:
        raise ConfigurationError(f"there is no conversation in {str(path)!r}")
    return parsed


def _parse(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not JSON: {error}") from error
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigurationError('a conversation is {"messages": [...]} with at least one message')
    _messages(data)
    return dict(data)


def _messages(data: dict[str, Any]) -> list[Message]:
    return list(map(Message.from_record, data["messages"]))
