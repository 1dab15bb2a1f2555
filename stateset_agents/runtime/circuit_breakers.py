"""A circuit breaker: when something fails again and again, work waits for it instead of failing in its turn.

    closed --`failures` in a row--> open --`pause` seconds--> half-open: one probe is let through
       ^                             ^                            |                 |
       +---- the probe succeeds -----|----------------------------+                 |
                                     +---- it fails: open for twice as long --------+

The engine has one for the environment and one for each reward, a `ChatClient` one for its endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Literal, Protocol

__all__ = ["Breaker", "Pass", "State", "Watch", "admitted", "watching", "when_waiting"]

State = Literal["closed", "half-open", "open"]

_LONGEST_PAUSE = 60.0
"""Seconds that the doubling of `pause` ends at, unless `pause` itself is longer."""
_LOOK_AGAIN = 0.25
"""Seconds after which who waits for another's probe looks again, at most."""


class Breaker:
    """Says whether something that may be down is to be asked now. Pure: time comes from `clock`.

    `admit` gives a ticket or None; what came of the call is told by `succeeded`, `failed` or `abandoned`
    with that ticket. Calls that began before the last change of state change nothing any more: those
    under way when it opened neither close it nor open it for longer.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int,
        pause: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failures`: in a row, after which it opens, 0 for never; `pause`: seconds until its first probe."""
        self.name = name
        self.state: State = "closed"
        self.cause = ""
        """Of the last failure."""
        self.has_worked = False
        """Did a call ever succeed? What never did is rather wrong than away, and nobody waits for it."""
        self._failures = failures
        self._first_pause = self._pause = pause
        self._clock = clock
        self._in_a_row = 0
        self._ticket = 0
        self._probe_at = 0.0
        self._down_since = 0.0

    def admit(self) -> int | None:
        """A ticket for a call that may be made now, else None."""
        if self.state == "closed":
            return self._ticket
        if self.state == "open" and self._clock() >= self._probe_at:
            self._turn("half-open")
            return self._ticket
        return None

    def succeeded(self, ticket: int) -> None:
        """The call gave what was asked for."""
        self.has_worked = True
        if ticket != self._ticket:
            return
        self._in_a_row, self._pause = 0, self._first_pause
        if self.state == "half-open":
            self._turn("closed")

    def failed(self, ticket: int, cause: str) -> None:
        """The call failed, or took too long."""
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
        """Nobody waits for the call any more, and it says nothing; after a probe the next call is one."""
        if ticket == self._ticket and self.state == "half-open":
            self._open(0.0)

    @property
    def seconds_down(self) -> float:
        """Since it opened; 0 while it is closed."""
        return 0.0 if self.state == "closed" else self._clock() - self._down_since

    @property
    def seconds_to_wait(self) -> float:
        """Until it is worth asking again whether a call may be made."""
        if self.state == "open":
            return max(0.0, self._probe_at - self._clock())
        return 0.0 if self.state == "closed" else _LOOK_AGAIN

    def _open(self, pause: float) -> None:
        self._probe_at = self._clock() + pause
        self._turn("open")

    def _turn(self, state: State) -> None:
        was, self.state = self.state, state
        self._ticket += 1
        if state == "closed":
            self._in_a_row = 0
        watch = watching.get()
        if watch is not None:
            watch.changed(self, was)

    def __str__(self) -> str:
        return f"{self.name} failed {self._in_a_row} times in a row (last: {self.cause})"


class Watch(Protocol):
    """Who keeps count of breakers."""

    def saw(self, breaker: Breaker) -> None:
        """It was asked."""
        ...

    def changed(self, breaker: Breaker, was: State) -> None:
        """It opened, half or whole, or closed."""
        ...

    def waited(self, breaker: Breaker, seconds: float) -> None:
        """A call waited for it."""
        ...

    def retried(self, breaker: Breaker) -> None:
        """A client's call that failed is made again."""
        ...


watching: ContextVar[Watch | None] = ContextVar("watching", default=None)
"""Of the work that goes on now: breakers of clients deep inside an environment or a reward tell it too."""
when_waiting: ContextVar[Callable[[float], None] | None] = ContextVar("when_waiting", default=None)
"""Called with the seconds that the work that goes on now is about to wait: its own time need not run on."""


class Pass:
    """One call that a breaker let through; say `failed` where it did, else it counts as a success."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self.is_abandoned = False
        self.has_answered = False

    def failed(self, cause: str) -> None:
        self.cause = cause

    def says_nothing(self) -> None:
        """The call tells neither that it works nor that it does not."""
        self.is_abandoned = True

    def answered(self) -> None:
        """It works, though what it says is raised."""
        self.has_answered = True


@asynccontextmanager
async def admitted(
    breaker: Breaker,
    *,
    patience: float,
    down: Callable[[str], Exception],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Pass]:
    """Wait until a call may be made, and tell the breaker what came of the body.

    Raises what `down` makes of one line where the outage has lasted longer than `patience` seconds, and at
    once where no call has ever succeeded. What the body raises counts as nothing: say `Pass.failed` or
    `Pass.answered` first.
    """
    watch = watching.get()
    if watch is not None:
        watch.saw(breaker)
    while (ticket := breaker.admit()) is None:
        left = patience - breaker.seconds_down if breaker.has_worked else 0.0
        if left <= 0:
            waited = f", and was waited for {patience:g} s" if breaker.has_worked else ""
            raise down(f"{breaker}{waited}")
        seconds = min(left, max(0.001, breaker.seconds_to_wait))
        if watch is not None:
            watch.waited(breaker, seconds)
        if (told := when_waiting.get()) is not None:
            told(seconds)
        await sleep(seconds)
    call = Pass()
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
