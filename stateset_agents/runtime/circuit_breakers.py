"""A circuit breaker: after several failures in a row, calls wait instead of failing one after the other.

    closed --`failures` in a row--> open --`pause` seconds--> half-open: one call, the probe, may pass
       ^                             ^                            |                 |
       +---- the probe succeeds -----|----------------------------+                 |
                                     +---- it fails: open for twice as long --------+

The engine has one breaker for the environment and one for each reward. A `ChatClient` has one for its
endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Literal, Protocol

State = Literal["closed", "half-open", "open"]

_LONGEST_PAUSE = 60.0
"""Seconds. Doubling stops here, unless the first pause is longer."""
_POLL_SECONDS = 0.25
"""Longest wait before a caller asks again whether another caller's probe succeeded."""


class Breaker:
    """Decides whether a service that may be down is called now. It never waits; time comes from `clock`.

    `admit` returns a ticket, or None. With that ticket the caller reports the result of its call by
    `succeeded`, `failed` or `abandoned`. A ticket is valid until the state changes: a call that was under way
    when the breaker opened neither closes it nor keeps it open for longer.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int,
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """It opens after `failures` in a row (0: never) and lets a probe through after `pause` seconds."""
        self.name = name
        self.state: State = "closed"
        self.cause = ""
        """Of the last failure."""
        self.has_worked = False
        """Did a call ever succeed? A service that never worked is likely misconfigured: nobody waits."""
        self._failures = failures
        self._first_pause = self._pause = pause
        self._clock = clock
        self._in_a_row = 0
        self._ticket = 0
        self._probe_at = 0.0
        self._down_since = 0.0

    def admit(self) -> int | None:
        """A ticket if a call may be made now, else None."""
        if self.state == "closed":
            return self._ticket
        if self.state == "open" and self._clock() >= self._probe_at:
            self._set_state("half-open")
            return self._ticket
        return None

    def succeeded(self, ticket: int) -> None:
        """The call returned a result."""
        self.has_worked = True
        if ticket != self._ticket:
            return
        self._in_a_row, self._pause = 0, self._first_pause
        if self.state == "half-open":
            self._set_state("closed")

    def failed(self, ticket: int, cause: str) -> None:
        """The call raised, or took too long."""
        if ticket != self._ticket:
            return
        self.cause = cause
        self._in_a_row += 1
        if self.state == "half-open":
            self._pause = max(self._first_pause, min(2 * self._pause, _LONGEST_PAUSE))
            self._open(self._pause)
        elif self._failures and self._in_a_row >= self._failures:
            self._down_since = self._clock()
            self._open(self._pause)

    def abandoned(self, ticket: int) -> None:
        """The call was cancelled and its result is unknown. After a probe, the next call is the probe."""
        if ticket == self._ticket and self.state == "half-open":
            self._open(0.0)

    @property
    def seconds_down(self) -> float:
        """Since it opened; 0 while closed."""
        return 0.0 if self.state == "closed" else self._clock() - self._down_since

    @property
    def seconds_to_wait(self) -> float:
        """Until `admit` is worth calling again."""
        if self.state == "open":
            return max(0.0, self._probe_at - self._clock())
        return 0.0 if self.state == "closed" else _POLL_SECONDS

    def _open(self, pause: float) -> None:
        self._probe_at = self._clock() + pause
        self._set_state("open")

    def _set_state(self, state: State) -> None:
        before, self.state = self.state, state
        self._ticket += 1
        if state == "closed":
            self._in_a_row = 0
        listener = breaker_listener.get()
        if listener is not None:
            listener.on_state_change(self, before)

    def __str__(self) -> str:
        return f"{self.name} failed {self._in_a_row} times in a row (last: {self.cause})"


class BreakerListener(Protocol):
    """Counts what happens to breakers (`runtime.retries.FaultTolerance` does)."""

    def on_call(self, breaker: Breaker) -> None:
        """A call is about to ask this breaker."""
        ...

    def on_state_change(self, breaker: Breaker, before: State) -> None:
        """The breaker opened, half-opened or closed."""
        ...

    def on_wait(self, breaker: Breaker, seconds: float) -> None:
        """A call waits for this breaker."""
        ...

    def on_retry(self, breaker: Breaker) -> None:
        """A client repeats a call that failed."""
        ...


breaker_listener: ContextVar[BreakerListener | None] = ContextVar("breaker_listener", default=None)
"""Of the current task. So breakers of clients deep inside an environment or a reward are counted too."""
wait_listener: ContextVar[Callable[[float], None] | None] = ContextVar("wait_listener", default=None)
"""Of the current task. Called with the seconds it is about to wait: its time limit can stand still."""


class BreakerCall:
    """One call that a breaker let through. It counts as a success unless `failed` is called."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self.is_abandoned = False
        self.has_answered = False

    def failed(self, cause: str) -> None:
        self.cause = cause

    def answered(self) -> None:
        """The service works, and its answer is an exception."""
        self.has_answered = True


@asynccontextmanager
async def admitted(
    breaker: Breaker,
    *,
    patience: float,
    down: Callable[[str], Exception],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[BreakerCall]:
    """Wait until a call may be made, run the body, and report its result to the breaker.

    Raises `down(message)` if the outage has lasted longer than `patience` seconds, and at once if no call
    ever succeeded. An exception from the body counts as neither success nor failure, unless the body called
    `BreakerCall.failed` or `BreakerCall.answered` first.
    """
    listener = breaker_listener.get()
    if listener is not None:
        listener.on_call(breaker)
    while (ticket := breaker.admit()) is None:
        left = patience - breaker.seconds_down if breaker.has_worked else 0.0
        if left <= 0:
            waited = f", and was waited for {patience:g} s" if breaker.has_worked else ""
            raise down(f"{breaker}{waited}")
        seconds = min(left, max(0.001, breaker.seconds_to_wait))
        if listener is not None:
            listener.on_wait(breaker, seconds)
        if (on_wait := wait_listener.get()) is not None:
            on_wait(seconds)
        await sleep(seconds)
    call = BreakerCall()
    try:
        yield call
    except BaseException:
        if call.cause is None and not call.has_answered:
            call.is_abandoned = True
        raise
    finally:
        if call.is_abandoned:
            breaker.abandoned(ticket)
        elif call.cause is None:
            breaker.succeeded(ticket)
        else:
            breaker.failed(ticket, call.cause)
