"""The requests that a server has accepted and not answered yet; it loses none of them when it shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from stateset_agents.backends.openai.protocol import ApiError

_CANCEL_SECONDS = 2.0
"""Time for cancelled requests to send their error."""


class ActiveRequests:
    """`drain` refuses new requests, waits for the active ones, and cancels those that take too long."""

    def __init__(self) -> None:
        self.is_closing = False
        """Are new requests refused?"""
        self._requests: set[asyncio.Timeout] = set()
        """One for each active request; to reschedule it to now cancels the request."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._drain_timeout: asyncio.Timeout | None = None

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Counts as an active request while inside.

        Raises ApiError, status 503, while the server shuts down, and if `drain` cancels the request.
        """
        if self.is_closing:
            raise shutting_down("the server is shutting down: ask again at another one, or when it is back")
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._requests.add(limit)
                self._idle.clear()
                try:
                    yield
                finally:
                    self._requests.discard(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise shutting_down("the server was shut down before the answer was whole: ask again") from error
        finally:
            if not self._requests:
                self._idle.set()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, wait for the active ones, and cancel those that take longer than `seconds`.

        Returns how many were cancelled.
        """
        self.is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds) as timeout:
                self._drain_timeout = timeout
                await self._idle.wait()
        self._drain_timeout = None
        num_cut = len(self._requests)
        for limit in self._requests:
            limit.reschedule(asyncio.get_running_loop().time())
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._idle.wait()
        return num_cut

    def stop_waiting(self) -> None:
        """Let a running `drain` cancel the active requests now."""
        if self._drain_timeout is not None:
            self._drain_timeout.reschedule(asyncio.get_running_loop().time())


def shutting_down(message: str) -> ApiError:
    """The error, status 503, of a request that the server cannot answer any more."""
    return ApiError(message, code="shutting_down", status=503, retry_after=5)
