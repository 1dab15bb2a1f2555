"""Callers' input as messages: texts, dicts, persona, system prompt and context."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

ChatInput = str | Sequence[Message | Mapping[str, Any]]
"""A conversation as callers give it; a text is one user message."""
Context = str | Mapping[str, Any] | None
"""What the agent should know: a text as it stands, a mapping as `key: value` lines."""


def as_messages(messages: ChatInput) -> list[Message]:
    """Raises ConfigurationError for an empty conversation and for what is no message."""
    if isinstance(messages, str):
        messages = [Message(role="user", content=messages)]
    if isinstance(messages, Mapping | Message) or (messages and not hasattr(messages, "__len__")):
        raise ConfigurationError(
            f"messages must be a text or a list of messages, got one {type(messages).__name__}"
        )
    if not messages:
        raise ConfigurationError("messages is empty: give at least one user message")
    return [item if isinstance(item, Message) else Message.from_openai(item) for item in messages]


def add_context(messages: Sequence[Message], context: Context) -> Sequence[Message]:
    """The context stands at the end of the system message."""
    if not context:
        return messages
    if isinstance(context, Mapping):
        context = "\n".join(f"{key}: {_shown(value)}" for key, value in context.items())
    if not isinstance(context, str):
        raise ConfigurationError(f"context must be a text or a mapping, got {type(context).__name__}")
    return _with_system(messages, context, before=False)


def add_system_prompt(messages: Sequence[Message], config: AgentConfig) -> tuple[Message, ...]:
    """Persona and system prompt stand at the head of the system message."""
    persona = (config.persona or "").strip().rstrip(".")
    who = f"You are {persona}." if persona else ""
    present = "\n".join(line for line in (who, config.system_prompt) if line)
    return _with_system(messages, present, before=True) if present else tuple(messages)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _with_system(messages: Sequence[Message], text: str, *, before: bool) -> tuple[Message, ...]:
    """The conversation with `text` in its system message, before or after what that says already."""
    if not messages or messages[0].role != "system":
        return (Message(role="system", content=text), *messages)
    present = messages[0].content
    lines = [line for line in ((text, present) if before else (present, text)) if line]
    return (replace(messages[0], content="\n".join(lines)), *messages[1:])
