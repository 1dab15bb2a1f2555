"""Retries and circuit breakers for services that may fail.

Behind a breaker, after several failures in a row, calls wait instead of failing one after the other.

    closed --`failures` in a row--> open --`pause` seconds--> half-open: one call, the probe, may pass
       ^                             ^                            |                 |
       +---- the probe succeeds -----|----------------------------+                 |
                                     +---- it fails: open for twice as long --------+

The engine has one breaker for the environment and one for each reward. A `ChatClient` has one for its
endpoint.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, Literal, TypeVar
from weakref import WeakSet

from stateset_agents.runtime.user_code import format_error
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError, StatesetError
from stateset_agents.types.seeds import derive

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
        """The breaker opens after `failures` in a row (0: never) and lets a probe through after `pause`
        seconds."""
        self.name = name
        self.state: State = "closed"
        self.cause = ""
        """Cause of the last failure."""
        self.has_worked = False
        """True once a call has succeeded. A service that never worked is likely misconfigured: nobody
        waits."""
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
        """Seconds since it opened; 0 while closed."""
        return 0.0 if self.state == "closed" else self._clock() - self._down_since

    @property
    def seconds_to_wait(self) -> float:
        """Seconds until `admit` is worth calling again."""
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


breaker_listener: ContextVar[FaultTolerance | None] = ContextVar("breaker_listener", default=None)
"""The listener of the current task. So breakers of clients deep inside an environment or a reward are counted
too."""
wait_listener: ContextVar[Callable[[float], None] | None] = ContextVar("wait_listener", default=None)
"""The current task's own, called with the seconds it is about to wait: its time limit can stand still."""


@dataclass(slots=True)
class BreakerCall:
    """A call that a breaker let through. It counts as a success unless it has the cause of a failure."""

    cause: str | None = None
    """Set by the caller where the service failed."""
    has_answered: bool = False
    """Set by the caller where the service works and its answer is an exception."""


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
    ever succeeded. An exception from the body counts as neither success nor failure, unless the body set
    `BreakerCall.cause` or `BreakerCall.has_answered` first.
    """
    listener = breaker_listener.get()
    if listener is not None:
        listener.asked_breakers.add(breaker)
    while (ticket := breaker.admit()) is None:
        left = patience - breaker.seconds_down if breaker.has_worked else 0.0
        if left <= 0:
            waited = f", and was waited for {patience:g} s" if breaker.has_worked else ""
            raise down(f"{breaker}{waited}")
        seconds = min(left, max(0.001, breaker.seconds_to_wait))
        if listener is not None:
            listener.seconds_waited += seconds
        if (on_wait := wait_listener.get()) is not None:
            on_wait(seconds)
        await sleep(seconds)
    call = BreakerCall()
    has_raised = True
    try:
        yield call
        has_raised = False
    finally:
        if call.cause is not None:
            breaker.failed(ticket, call.cause)
        elif has_raised and not call.has_answered:
            breaker.abandoned(ticket)
        else:
            breaker.succeeded(ticket)


# --- retries, and the breakers of one engine: its environment and its rewards

T = TypeVar("T")

_LONGEST_WAIT = 30.0
"""Seconds. The doubling of waits stops here."""
_LEVELS = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """Says how often a failed call is retried and when calls wait; the names are those of
    `TrainingConfig`."""

    turn_retries: int = 0
    """Retries of one answer of the environment."""
    reward_retries: int = 1
    """Retries of one reward that broke."""
    retry_backoff: float = 0.5
    """Seconds of the first wait before a retry; each further wait is twice as long."""
    breaker_failures: int = 10
    """Failures in a row that open a circuit breaker; 0: never."""
    breaker_pause: float = 5.0
    """Seconds from the opening of a breaker to its first probe."""
    outage_patience: float = 300.0
    """Seconds that work waits for an open breaker; after that conversations fail at once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind: Any = int if isinstance(field.default, int) else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < math.inf:
                unit = "a whole number" if kind is int else "seconds"
                raise ConfigurationError(f"{field.name} must be {unit} from 0 on, got {value!r}")


def wait_before(attempt: int, *, first: float, stream: int, most: float = _LONGEST_WAIT) -> float:
    """Seconds to wait after `attempt` failures: exponential backoff with jitter.

    The upper bound is `first`, then twice `first`, and so on up to `most`. The wait is drawn between half of
    the bound and the bound, so that callers that failed together do not retry together. `stream` seeds the
    draw: the same stream waits the same seconds in every run.
    """
    longest = min(most, first * 2.0 ** min(attempt - 1, 60))
    return longest * (0.5 + 0.5 * derive(stream, "wait", attempt) / 2**63)


async def retry(
    call: Callable[[int], Awaitable[T]],
    *,
    times: int,
    is_final: Callable[[Exception], bool],
    wait: Callable[[int, Exception], Awaitable[None]],
) -> T:
    """The result of `call(attempt)`, counted from 0 and repeated up to `times` times.

    `wait(failures, error)` comes before each repetition, after so many failures in all. Raises what the last
    attempt raised, and an error that `is_final` at once.
    """
    for attempt in count():
        try:
            return await call(attempt)
        except Exception as error:
            if attempt >= times or is_final(error):
                raise
            failure = error
        try:
            await wait(attempt + 1, failure)
        finally:
            del failure  # its traceback holds this frame, which would hold it
    raise AssertionError("counted without end")


class FaultTolerance:
    """Retries, waits and circuit breakers of one engine, and the counts of them."""

    def __init__(
        self,
        policy: FaultPolicy | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or FaultPolicy()
        self.on_event: Callable[..., None] | None = None
        """Called as `on_event("breaker", dependency=..., state=..., cause=...)` at each change."""
        self.num_retries: Counter[str] = Counter()
        """Number of retries by the name of what was retried: an episode, a turn, a reward, the call of an
        endpoint."""
        self.num_timeouts = 0
        """Answers and scores that came after their time limit."""
        self.seconds_waited = 0.0
        """Total time that calls waited for open breakers."""
        self._sleep = sleep
        self._clock = clock
        self._breakers: dict[str, Breaker] = {}
        """Breakers of the environment and the rewards, by name."""
        self.asked_breakers: WeakSet[Breaker] = WeakSet()
        """All breakers that were asked, also those of clients inside rewards; several may have one name."""
        self._num_opened = 0
        self._reported: dict[str, float] = {}
        """Totals at the last call of `metrics`."""

    @property
    def repeatable(self) -> bool:
        """False after a retry, a timeout or an outage: another run need not have the same."""
        return not (self.num_retries.total() or self.num_timeouts or self._num_opened)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the breakers that are asked inside."""
        token = breaker_listener.set(self)
        try:
            yield
        finally:
            breaker_listener.reset(token)

    def breaker(self, name: str) -> Breaker:
        """The engine's breaker of this name; made at the first call."""
        if name not in self._breakers:
            self._breakers[name] = Breaker(
                name,
                failures=self.policy.breaker_failures,
                pause=self.policy.breaker_pause,
                clock=self._clock,
            )
        return self._breakers[name]

    def is_given_up(self, name: str) -> bool:
        """True if this service has been down for longer than anybody waits for it."""
        breaker = self.breaker(name)
        patience = self.policy.outage_patience if breaker.has_worked else 0.0
        return breaker.state != "closed" and breaker.seconds_down >= patience

    async def retry(
        self,
        call: Callable[[int], Awaitable[T]],
        *,
        name: str,
        times: int,
        stream: int,
        service: str,
        counts: Callable[[Exception], bool] = lambda error: True,
    ) -> T:
        """The result of `call(attempt)`, which is repeated up to `times` times, each after a wait.

        Raises what the last attempt raised, and at once programming and configuration errors, an exception
        for which `counts` is False, and any while `service` is given up. `name`: what the retries are counted
        as; `stream` seeds the waits.
        """

        def is_final(error: Exception) -> bool:
            is_mistake = isinstance(error, (*PROGRAMMING_ERRORS, ConfigurationError))
            return is_mistake or self.is_given_up(service) or not counts(error)

        async def wait(attempt: int, error: Exception) -> None:
            self.num_retries[name] += 1
            await self._sleep(wait_before(attempt, first=self.policy.retry_backoff, stream=stream))

        return await retry(call, times=times, is_final=is_final, wait=wait)

    async def ask(
        self,
        name: str,
        call: Callable[[], Awaitable[T]],
        *,
        down: type[StatesetError],
        counts: Callable[[Exception], bool] = lambda error: True,
    ) -> T:
        """The result of one call behind the breaker of `name`.

        Programming and configuration errors do not count. An exception for which `counts` is False is an
        answer: the service works. Raises `down` if the outage has lasted too long to wait any more.
        """
        patience = self.policy.outage_patience
        with self.watched():
            passing = admitted(self.breaker(name), patience=patience, down=down, sleep=self._sleep)
            async with passing as attempt:
                try:
                    return await call()
                except (*PROGRAMMING_ERRORS, ConfigurationError):
                    raise
                except Exception as error:
                    if counts(error):
                        text = str(error) if isinstance(error, StatesetError) else format_error(error)
                        attempt.cause = " ".join(text.split())
                    else:
                        attempt.has_answered = True
                    raise

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, and the state of each breaker: 0 closed, .5 half-open, 1 open.

        Where several breakers have one name (clients of one model at two addresses), the highest value.
        """
        now = {
            "faults/retries": float(self.num_retries.total()),
            "faults/timeouts": float(self.num_timeouts),
            "faults/outages": float(self._num_opened),
            "faults/waited": self.seconds_waited,
        }
        since = {name: value - self._reported.get(name, 0.0) for name, value in now.items()}
        self._reported = now
        levels: dict[str, float] = {}
        for breaker in [*self._breakers.values(), *self.asked_breakers]:
            name = f"breaker/{breaker.name.replace(' ', '_')}"
            levels[name] = max(levels.get(name, 0.0), _LEVELS[breaker.state])
        return since | dict(sorted(levels.items()))

    def on_state_change(self, breaker: Breaker, before: State) -> None:
        """Count an outage and report the change; breakers call it."""
        self._num_opened += before == "closed"
        if self.on_event is not None:
            self.on_event("breaker", dependency=breaker.name, state=breaker.state, cause=breaker.cause)
