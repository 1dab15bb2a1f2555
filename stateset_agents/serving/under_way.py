"""The requests that a server has taken and not answered yet, so that it can end without losing one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from stateset_agents.backends.openai.protocol import ApiError

__all__ = ["UnderWay"]

_LAST_SECONDS = 2.0
"""For answers that are broken off to be told so."""


class UnderWay:
    """Requests under way. `drain` refuses new ones, waits for those, and breaks off what takes too long."""

    def __init__(self) -> None:
        self.is_closing = False
        """Are new requests refused?"""
        self._requests: set[asyncio.Timeout] = set()
        """Each ends its request when it is moved to now."""
        self._none = asyncio.Event()
        self._none.set()
        self._patience: asyncio.Timeout | None = None

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """One request, from its headers to its answer.

        Raises ApiError of status 503 while the server closes, and where the drain did not wait for its end.
        """
        if self.is_closing:
            raise ApiError(
                "the server is shutting down: ask again at another one, or when it is back",
                code="shutting_down",
                status=503,
                retry_after=5,
            )
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests.add(limit)
                self._none.clear()
                try:
                    yield
                finally:
                    self._requests.discard(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ApiError(
                "the server was shut down before the answer was whole: ask again",
                code="shutting_down",
                status=503,
                retry_after=5,
            ) from error
        finally:
            if not self._requests:
                self._none.set()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, give those under way so many seconds; how many were broken off then."""
        self.is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds) as patience:
                self._patience = patience
                await self._none.wait()
        self._patience = None
        left = len(self._requests)
        for limit in self._requests:
            limit.reschedule(asyncio.get_running_loop().time())
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_SECONDS):
                await self._none.wait()
        return left

    def hurry(self) -> None:
        """Let a drain wait no longer."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())
