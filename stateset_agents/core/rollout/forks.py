"""Forks of live conversations, held until somebody plays them on; the engine keeps them for one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Self

from stateset_agents.backends.base import Session
from stateset_agents.core.environment import Conversation
from stateset_agents.core.rollout.episode import BetweenTurns, Fork
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import ConfigurationError, EnvironmentTimeout
from stateset_agents.types.logs import get_logger
from stateset_agents.types.trajectory import Trajectory

_log = get_logger(__name__)
_GRACE_SECONDS = 1.0
"""How long somebody who no longer wants a fork waits for it, so that nothing is closed while it is copied."""


class Forks:
    """Takes `each` forks between any two turns of a conversation; on leaving, closes those nobody took.

    async with Forks(2, of="RetailDesk", limit=in_time.limit) as forks:
        await run_episode(..., between_turns=forks.taken(session))
        for fork in forks.held(session): ...
    """

    def __init__(
        self, each: int, *, of: str, limit: Callable[[str], AbstractAsyncContextManager[None]]
    ) -> None:
        """`of`: the environment's name, for what goes wrong; `limit` bounds how long one fork may take."""
        self._each = each
        self._of = of
        self._limit = limit
        self._held: dict[Session, list[Fork]] = {}
        self._too_late: set[asyncio.Task[None]] = set()

    def taken(self, session: Session) -> BetweenTurns | None:
        """What to call between the turns of this session's conversation; None where no fork is wanted."""
        if not self._each:
            return None

        async def between_turns(trajectory: Trajectory, conversation: Conversation) -> None:
            forks = self._held.setdefault(session, [])
            for _ in range(self._each):  # one after another: they copy the same conversation
                twin = await self._fork(conversation)
                forks.append(Fork(trajectory=trajectory, conversation=twin))

        return between_turns

    def held(self, session: Session) -> Sequence[Fork]:
        """The session's forks that nobody has taken, in the order of their turns."""
        return tuple(self._held.get(session, ()))

    def take(self, session: Session, fork: Fork) -> None:
        """Hand a fork over: who takes it closes it."""
        self._held[session].remove(fork)

    async def discard(self, session: Session) -> None:
        """Close what the session still holds; a fork that cannot be closed is only worth a warning."""
        closing = [_close(fork.conversation) for fork in self._held.pop(session, ())]
        await asyncio.gather(*closing)

    async def _fork(self, conversation: Conversation) -> Conversation:
        """A copy, made in a thread; one that comes when nobody waits for it any more is closed."""
        making = asyncio.ensure_future(in_thread(conversation.fork))
        try:
            async with self._limit("forking a conversation"):
                return await asyncio.shield(making)
        except NotImplementedError as error:
            raise ConfigurationError(
                f"a conversation of {self._of} cannot be forked, and branches need it: write its fork(), or "
                "train with another advantage_estimator"
            ) from error
        except (asyncio.CancelledError, EnvironmentTimeout):
            closing = asyncio.create_task(_close_when_made(making))
            self._too_late.add(closing)
            closing.add_done_callback(self._too_late.discard)
            await _done_at_last(closing)
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*map(self.discard, tuple(self._held)))
        hanging = tuple(self._too_late)
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


async def _done_at_last(task: asyncio.Task[None]) -> None:
    """Wait for it, `_GRACE_SECONDS` at most; a cancellation meanwhile waits with it, then goes on."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _GRACE_SECONDS
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _close(conversation: Conversation) -> None:
    try:
        await conversation.close()
    except Exception as error:  # nobody needs it any more
        _log.warning("a fork could not be closed", error=f"{type(error).__name__}: {error}")


async def _close_when_made(making: asyncio.Future[Conversation]) -> None:
    try:
        twin = await making
    except Exception:  # there is nothing to close, and why nobody waited has been told
        return
    await _close(twin)
