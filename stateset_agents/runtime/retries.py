"""Retries and circuit breakers for the services that an engine calls: its environment and its rewards."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, TypeVar
from weakref import WeakSet

from stateset_agents.runtime.circuit_breakers import Breaker, State, admitted, breaker_listener
from stateset_agents.runtime.user_code import format_error
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError, StatesetError
from stateset_agents.types.seeds import derive

T = TypeVar("T")

_LONGEST_WAIT = 30.0
"""Seconds. The doubling of waits stops here."""
_LEVELS = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """How often a failed call is retried and when calls wait; the names are those of `TrainingConfig`."""

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


def _cause(error: Exception) -> str:
    text = str(error) if isinstance(error, StatesetError) else format_error(error)
    return " ".join(text.split())


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
        """By the name of what was retried: an episode, a turn, a reward, the call of an endpoint."""
        self.num_timeouts = 0
        """Answers and scores that came after their time limit."""
        self._sleep = sleep
        self._clock = clock
        self._breakers: dict[str, Breaker] = {}
        """Of the environment and the rewards, by name."""
        self._seen: WeakSet[Breaker] = WeakSet()
        """All breakers that were asked, also those of clients inside rewards; several may have one name."""
        self._num_opened = 0
        self._seconds_waited = 0.0
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
        """Has this service been down for longer than anybody waits for it?"""
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
                        attempt.failed(_cause(error))
                    else:
                        attempt.answered()
                    raise

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, and the state of each breaker: 0 closed, .5 half-open, 1 open.

        Where several breakers have one name (clients of one model at two addresses), the highest value.
        """
        now = {
            "faults/retries": float(self.num_retries.total()),
            "faults/timeouts": float(self.num_timeouts),
            "faults/outages": float(self._num_opened),
            "faults/waited": self._seconds_waited,
        }
        since = {name: value - self._reported.get(name, 0.0) for name, value in now.items()}
        self._reported = now
        levels: dict[str, float] = {}
        for breaker in [*self._breakers.values(), *self._seen]:
            name = f"breaker/{breaker.name.replace(' ', '_')}"
            levels[name] = max(levels.get(name, 0.0), _LEVELS[breaker.state])
        return since | dict(sorted(levels.items()))

    # ------------------------------------------------------------------------------ as a BreakerListener

    def on_call(self, breaker: Breaker) -> None:
        self._seen.add(breaker)

    def on_state_change(self, breaker: Breaker, before: State) -> None:
        self._num_opened += before == "closed"
        if self.on_event is not None:
            self.on_event("breaker", dependency=breaker.name, state=breaker.state, cause=breaker.cause)

    def on_wait(self, breaker: Breaker, seconds: float) -> None:
        self._seconds_waited += seconds

    def on_retry(self, breaker: Breaker) -> None:
        self.num_retries[breaker.name] += 1
