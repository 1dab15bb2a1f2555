"""Forks of live conversations, held until somebody plays them on; the engine keeps them for one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from stateset_agents.backends.base import Session
from stateset_agents.core.environment import Conversation
from stateset_agents.core.episode import BetweenTurns, Fork
from stateset_agents.core.trajectory import Trajectory
from stateset_agents.errors import ConfigurationError
from stateset_agents.tracking.logging import get_logger

__all__ = ["Forks"]

_log = get_logger(__name__)


class Forks:
    """Takes `each` forks between any two turns of a conversation; on leaving, closes those nobody took.

    async with Forks(2, of="RetailDesk") as forks:
        await run_episode(..., between_turns=forks.taken(session))
        for fork in forks.held(session): ...
    """

    def __init__(self, each: int, *, of: str) -> None:
        """`of`: the environment's name, for what goes wrong."""
        self._each = each
        self._of = of
        self._held: dict[Session, list[Fork]] = {}

    def taken(self, session: Session) -> BetweenTurns | None:
        """What to call between the turns of this session's conversation; None where no fork is wanted."""
        if not self._each:
            return None

        def between_turns(trajectory: Trajectory, conversation: Conversation) -> None:
            forks = self._held.setdefault(session, [])
            for _ in range(self._each):
                forks.append(Fork(trajectory=trajectory, conversation=self._fork(conversation)))

        return between_turns

    def held(self, session: Session) -> Sequence[Fork]:
        """The session's forks that nobody has taken, in the order of their turns."""
        return tuple(self._held.get(session, ()))

    def take(self, session: Session, fork: Fork) -> None:
        """Hand a fork over: who takes it closes it."""
        self._held[session].remove(fork)

    async def discard(self, session: Session) -> None:
        """Close what the session still holds; a fork that cannot be closed is only worth a warning."""
        closing = [fork.conversation.close() for fork in self._held.pop(session, ())]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, Exception):
                _log.warning("a fork could not be closed", error=f"{type(error).__name__}: {error}")

    def _fork(self, conversation: Conversation) -> Conversation:
        try:
            return conversation.fork()
        except NotImplementedError as error:
            raise ConfigurationError(
                f"a conversation of {self._of} cannot be forked, and branches need it: write its fork(), or "
                "train with another advantage_estimator"
            ) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*map(self.discard, tuple(self._held)))
