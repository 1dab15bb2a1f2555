"""Conversations as JSON lines in OpenAI's chat format, one `{"messages": [...]}` each.

An agent's message with a thought has it as `reasoning`, so that the agent goes on with what it knew; a call
that could not be read has its `error` and what was `written`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from stateset_agents.core.chat.escaping import encodable
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

__all__ = ["check_writable", "load_conversations", "save_conversation"]

_HINT = "give a file in a folder that exists and that you may write to"


def check_writable(path: str | Path) -> None:
    """Raises ConfigurationError if `save_conversation` could not write there; creates no file."""
    path = Path(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"cannot write conversations to {str(path)!r}: {_HINT}")


def save_conversation(path: str | Path, messages: Sequence[Message]) -> None:
    """Append one line to the file, which is created if it does not exist.

    Raises ConfigurationError if it cannot be written.
    """
    data = {"messages": [message.to_record() for message in messages]}
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
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigurationError(
            f"cannot read conversations from {str(path)!r} ({reason}): give a file of JSON lines, as --save "
            "writes it"
        ) from error
    conversations = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                conversations.append(_parse(line))
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not conversations:
        raise ConfigurationError(f"there is no conversation in {str(path)!r}")
    return conversations


def _parse(line: str) -> list[Message]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"not JSON: {error}") from error
    messages = data.get("messages") if isinstance(data, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigurationError('a conversation is {"messages": [...]} with at least one message')
    return list(map(Message.from_record, messages))
