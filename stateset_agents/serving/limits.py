"""How much a server takes on at once, and in which order those who wait are served.

Answers under way share the model's batches, so each one more makes all of them a little slower. A client may
have so many under way, the server so many in all; whoever comes later waits. Clients that wait are served in
turn, one request of each, so that hundreds of requests of one client do not stand before another's only one.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import Field

from stateset_agents.backends.openai.protocol import ApiError
from stateset_agents.types.settings import Settings

__all__ = ["Held", "Limits", "Place", "Queue"]


class Limits(Settings):
    """What one server takes on. `stateset-agents serve` has a flag for each field."""

    max_running: int = Field(default=64, ge=1, description="answers that are sampled at once")
    max_running_per_client: int = Field(
        default=8, ge=1, description="answers of one client that are sampled at once"
    )
    max_waiting: int = Field(
        default=1024, ge=0, description="answers that wait for their turn; further ones get 429"
    )
    max_waiting_per_client: int = Field(
        default=512, ge=0, description="answers of one client that wait for their turn; further ones get 429"
    )
    max_output_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one answer; unset: the model's context"
    )
    max_choices: int = Field(default=8, ge=1, description="answers to one request (its n)")
    max_held: int = Field(
        default=256 * 2**20,
        ge=1,
        description="bytes of all bodies that are read or wait, of one client a quarter; more get 429",
    )
    read_timeout: float = Field(
        default=30.0, gt=0, allow_inf_nan=False, description="seconds in which a request has to arrive whole"
    )

    @property
    def most_choices(self) -> int:
        """Answers to one request: `max_choices`, or fewer where no more may run and wait."""
        of_all = self.max_running + self.max_waiting
        of_one = self.max_running_per_client + self.max_waiting_per_client
        return min(self.max_choices, of_all, of_one)


class Held:
    """The bytes of bodies in memory: many that are small enough may be too much together.

    Several bodies of one client have a quarter of the room, so that it cannot shut out the others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    @contextmanager
    def body(self, client: str) -> Iterator[Callable[[int], None]]:
        """To be called with the size of each piece that is kept; all of it is let go at the end.

        The call raises ApiError of status 429 where it is too much.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            share = self._held[client] + size
            if self._held.total() + size > self._most or (share > taken + size and 4 * share > self._most):
                raise ApiError(
                    f"the requests that are read or wait have {self._held.total()} bytes, {share - size} of "
                    "them yours, and more do not fit: ask again later",
                    code="too_many_requests",
                    status=429,
                    retry_after=1,
                )
            taken += size
            self._held[client] += size

        try:
            yield take
        finally:
            self._held[client] -= taken
            if not self._held[client]:
                del self._held[client]


class Place:
    """One answer's: it waits, then it runs, then it is left; `leave` may be called more than once."""

    def __init__(self, queue: Queue, client: str) -> None:
        self._queue = queue
        self._client = client
        self._granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._since = 0.0
        self._is_left = False

    async def granted(self) -> None:
        """Wait for its turn."""
        await asyncio.shield(self._granted)  # whoever gives up waiting leaves

    def grant(self) -> None:
        """Its turn has come."""
        self._since = asyncio.get_running_loop().time()
        self._granted.set_result(None)

    def leave(self) -> None:
        """The answer is there, or nobody wants it any more."""
        if self._is_left:
            return
        self._is_left = True
        if self._granted.done():
            self._queue.freed(self._client, asyncio.get_running_loop().time() - self._since)
        else:
            self._queue.forget(self._client, self)


class Queue:
    """Places for answers: taken at once where there is one, else in turn by client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[Place]] = OrderedDict()
        """By client; the first is next in turn. Nobody's deque is empty."""
        self._seconds = 0.0
        """What an answer takes, lately."""

    @property
    def num_running(self) -> int:
        return self._running.total()

    @property
    def num_waiting(self) -> int:
        return sum(len(places) for places in self._waiting.values())

    @contextmanager
    def places(self, client: str, count: int = 1) -> Iterator[list[Place]]:
        """So many places for a client, which are left at the end.

        Raises ApiError of status 429 where more would wait than may.
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
        places = [Place(self, client) for _ in range(count)]
        self._waiting.setdefault(client, deque()).extend(places)
        self._serve()
        try:
            yield places
        finally:
            for place in places:
                place.leave()

    def forget(self, client: str, place: Place) -> None:
        """A place that nobody waits for any more."""
        waiting = self._waiting[client]
        waiting.remove(place)
        if not waiting:
            del self._waiting[client]

    def freed(self, client: str, seconds: float) -> None:
        """A place was left after so many seconds."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._seconds = seconds if not self._seconds else 0.9 * self._seconds + 0.1 * seconds
        self._serve()

    def _serve(self) -> None:
        """Give out what is free, to one waiting client after another."""
        passed = 0
        while passed < len(self._waiting) and self.num_running < self._limits.max_running:
            client = next(iter(self._waiting))
            self._waiting.move_to_end(client)
            if self._running[client] >= self._limits.max_running_per_client:
                passed += 1
                continue
            passed = 0
            waiting = self._waiting[client]
            waiting.popleft().grant()
            self._running[client] += 1
            if not waiting:
                del self._waiting[client]

    def _busy(self, why: str, *, rounds: float) -> ApiError:
        """`rounds`: answers that run one after the other until those that wait now have run."""
        return ApiError(
            f"{why}: ask again later",
            code="too_many_requests",
            status=429,
            retry_after=min(max(math.ceil(self._seconds * (rounds + 1)), 1), 60),
        )
