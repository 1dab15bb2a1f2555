"""An environment's tools for a person who plays its user; the chat command calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.core.environment import Conversation
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

__all__ = ["ConversationTools"]


class ConversationTools:
    """Steps a conversation with the agent's tool calls alone: its simulated user hears nothing."""

    def __init__(self, conversation: Conversation) -> None:
        self.schemas: Sequence[Mapping[str, Any]] = conversation.tools
        self._conversation = conversation
        self._is_over = False

    async def call_all(self, calls: Sequence[ToolCall]) -> Sequence[Message]:
        """The environment's answers; ConfigurationError once it has ended the conversation."""
        if self._is_over:
            raise ConfigurationError(
                "the environment has ended this conversation: start a new one, or give it more max_turns"
            )
        reply = Message(role="assistant", content="", tool_calls=tuple(calls))
        observation = await self._conversation.step(reply)
        self._is_over = observation.terminated or observation.truncated
        return observation.messages
