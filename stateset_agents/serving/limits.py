"""Limits of a server, and the queue of answers that wait for their turn.

Answers that run share the model's batches, so each further one makes all of them a little slower. The number
of running answers is limited for each client and for the server; further ones wait. Waiting clients are
served in turn, one answer of each, so that hundreds of requests of one client do not delay another client's
only request.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial

from pydantic import Field

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.runtime.tasks import ActiveWork
from stateset_agents.types.settings import Settings


class Limits(Settings):
    """Limits of the work that one server takes on. `stateset-agents serve` has a flag for each field."""

    max_running: int = Field(default=64, ge=1)
    """answers that are sampled at once"""
    max_running_per_client: int = Field(default=8, ge=1)
    """answers of one client that are sampled at once"""
    max_waiting: int = Field(default=1024, ge=0)
    """answers that wait for their turn; further ones get 429"""
    max_waiting_per_client: int = Field(default=512, ge=0)
    """answers of one client that wait for their turn; further ones get 429"""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """tokens of one answer; unset: the model's context"""
    max_choices: int = Field(default=8, ge=1)
    """answers to one request (its n)"""
    max_held: int = Field(default=256 * 2**20, ge=1)
    """bytes of all bodies that are read or wait, of one client a quarter; more get 429"""
    max_remembered: int = Field(default=2**22, ge=1)
    """tokens of the turns that history keep and compact go on from, each with its prompt; of one client a
    quarter; the oldest are forgotten"""
    read_timeout: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """seconds in which a request has to arrive whole"""

    @property
    def effective_max_choices(self) -> int:
        """Most answers to one request: `max_choices`, or fewer if fewer may run and wait."""
        for_server = self.max_running + self.max_waiting
        for_client = self.max_running_per_client + self.max_waiting_per_client
        return min(self.max_choices, for_server, for_client)


class BodyMemory:
    """Limits the bytes of all request bodies in memory together.

    Several bodies of one client may take a quarter of them, so that no client shuts out the others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def body(self, client: str) -> Iterator[Callable[[int], None]]:
        """A function that reserves the bytes of each piece before it is kept; all are freed at the end.

        It raises ApiError, status 429, if they would be too many.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            total, client_bytes = self._bytes.total() + size, self._bytes[client] + size
            has_several = client_bytes > reserved + size
            if total > self._limit or (has_several and 4 * client_bytes > self._limit):
                raise ApiError(
                    f"the requests that are read or wait have {total - size} bytes, {client_bytes - size} of "
                    "them yours, and more do not fit: ask again later",
                    code="too_many_requests",
                    status=429,
                    retry_after=1,
                )
            reserved += size
            self._bytes[client] += size

        try:
            yield reserve
        finally:
            self._bytes[client] -= reserved
            if not self._bytes[client]:
                del self._bytes[client]


class QueueEntry:
    """An answer in the queue: it waits, then it runs, then it is released."""

    def __init__(self, queue: AnswerQueue, client: str) -> None:
        self._queue = queue
        self._client = client
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started_at = 0.0
        self._is_released = False

    async def wait(self) -> None:
        """Return when the answer may run."""
        await asyncio.shield(self._turn)  # a caller that is cancelled releases the entry

    def start(self) -> None:
        """Let the answer run."""
        self._started_at = asyncio.get_running_loop().time()
        self._turn.set_result(None)

    def release(self) -> None:
        """The answer is complete or was cancelled. A second call does nothing."""
        if self._is_released:
            return
        self._is_released = True
        if self._turn.done():
            self._queue.on_released(self._client, asyncio.get_running_loop().time() - self._started_at)
        else:
            self._queue.remove(self._client, self)


class AnswerQueue:
    """Decides which answers run: at once if the limits allow it, else in turn by client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[QueueEntry]] = OrderedDict()
        """Waiting entries by client, the next one first; no deque is empty."""
        self._mean_seconds = 0.0
        """Moving average of the time that an answer runs."""

    @property
    def num_running(self) -> int:
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        return sum(len(entries) for entries in self._waiting.values())

    @contextmanager
    def entries(self, client: str, count: int = 1) -> Iterator[list[QueueEntry]]:
        """Entries for so many answers of a client; they are released at the end.

        Raises ApiError, status 429, if more would wait than may.
        """
        limits, queued = self._limits, len(self._waiting.get(client, ()))
        free = min(
            limits.max_running - self.num_running, limits.max_running_per_client - self._running[client]
        )
        waits = count if queued else max(0, count - max(0, free))
        if waits and queued + waits > limits.max_waiting_per_client:
            raise self._busy(
                f"{queued} answers of yours wait, and more than {limits.max_waiting_per_client} may",
                rounds=queued / min(limits.max_running, limits.max_running_per_client),
            )
        if waits and self.num_waiting + waits > limits.max_waiting:
            raise self._busy(
                f"{self.num_waiting} answers wait here, and more than {limits.max_waiting} may",
                rounds=self.num_waiting / limits.max_running,
            )
        entries = [QueueEntry(self, client) for _ in range(count)]
        self._waiting.setdefault(client, deque()).extend(entries)
        self._start_next()
        try:
            yield entries
        finally:
            for entry in entries:
                entry.release()

    def remove(self, client: str, entry: QueueEntry) -> None:
        """Drop an entry that was released before it ran."""
        waiting = self._waiting[client]
        waiting.remove(entry)
        if not waiting:
            del self._waiting[client]

    def on_released(self, client: str, seconds: float) -> None:
        """An answer of this client ended after running for so many seconds."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._mean_seconds = seconds if not self._mean_seconds else 0.9 * self._mean_seconds + 0.1 * seconds
        self._start_next()

    def _start_next(self) -> None:
        """Start as many waiting answers as the limits allow, one client after another."""
        num_skipped = 0
        while num_skipped < len(self._waiting) and self.num_running < self._limits.max_running:
            client = next(iter(self._waiting))
            self._waiting.move_to_end(client)
            if self._running[client] >= self._limits.max_running_per_client:
                num_skipped += 1
                continue
            num_skipped = 0
            waiting = self._waiting[client]
            waiting.popleft().start()
            self._running[client] += 1
            if not waiting:
                del self._waiting[client]

    def _busy(self, reason: str, *, rounds: float) -> ApiError:
        """`rounds`: answers that run one after the other until those that wait now have run."""
        return ApiError(
            f"{reason}: ask again later",
            code="too_many_requests",
            status=429,
            retry_after=min(max(math.ceil(self._mean_seconds * (rounds + 1)), 1), 60),
        )


# --- requests that are accepted and not answered yet ---

_CANCEL_SECONDS = 2.0
"""Time for cancelled requests to send their error."""


class ActiveRequests:
    """`drain` refuses new requests, waits for the active ones, and cancels those that take too long."""

    def __init__(self) -> None:
        self.is_closing = False
        """True if new requests are refused."""
        self._active = ActiveWork()
        self._drain_timeout: asyncio.Timeout | None = None

    def request(self) -> AbstractAsyncContextManager[None]:
        """A context in which the caller counts as an active request.

        Raises ApiError, status 503, while the server shuts down, and if `drain` cancels the request.
        """
        if self.is_closing:
            raise shutting_down("the server is shutting down: ask again at another one, or when it is back")
        cut = partial(shutting_down, "the server was shut down before the answer was whole: ask again")
        return self._active.under_way(cut)

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, wait for the active ones, and cancel those that take longer than `seconds`.

        Returns how many were cancelled.
        """
        self.is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds) as timeout:
                self._drain_timeout = timeout
                await self._active.ended()
        self._drain_timeout = None
        num_cut = self._active.cut()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                await self._active.ended()
        return num_cut

    def stop_waiting(self) -> None:
        """Let a running `drain` cancel the active requests now."""
        if self._drain_timeout is not None:
            self._drain_timeout.reschedule(asyncio.get_running_loop().time())


def shutting_down(message: str) -> ApiError:
    """The error, status 503, of a request that the server cannot answer any more."""
    return ApiError(message, code="shutting_down", status=503, retry_after=5)
