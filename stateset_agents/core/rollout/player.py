"""What a rollout needs of an agent: `MultiTurnAgent`, whose model runs here, and `EndpointAgent` are such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from stateset_agents.backends.base import Session
from stateset_agents.core.chat.history import Prompt
from stateset_agents.types.messages import Completion, Message


class Speaker(Protocol):
    """An agent in one conversation."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the conversation's trajectory should remember; it stands beside the environment's."""
        ...

    async def next_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """What the agent is shown before its next turn.

        Raises ContextLengthExceeded where that leaves no room to answer, ConversationRefused where it cannot
        be shown.
        """
        ...

    async def reply(
        self, prompt: Prompt, *, turn: int, max_new_tokens: int | None, stop: tuple[str, ...]
    ) -> Completion:
        """Turn number `turn`, from 0 on, within what the conversation asks of it.

        Raises BackendError, and ContextLengthExceeded where only the model can tell.
        """
        ...

    def add(self, prompt: Prompt, completion: Completion) -> None:
        """Go on from this turn."""
        ...


@runtime_checkable
class Player(Protocol):
    """An agent that plays conversations."""

    def new_episodes(self, number: int) -> range:
        """Numbers for so many episodes, never given out before."""
        ...

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The opening with the agent's own persona and system prompt in front."""
        ...

    def speaker(self, session: Session, *, stream: int, temperature: float | None) -> Speaker:
        """The agent's side of a new conversation; turn t samples from `derive(stream, t)`."""
        ...

    def participate(self) -> AbstractContextManager[None]:
        """As `Backend.participate`."""
        ...

    async def release(self, session: Session) -> None:
        """Forget a conversation; unknown sessions are ignored."""
        ...
