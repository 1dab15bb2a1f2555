"""What an engine asks of others (environment, rewards): tried again after a wait, behind circuit breakers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar
from weakref import WeakSet

from stateset_agents.runtime.circuit_breakers import Breaker, State, admitted, watching
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError, StatesetError
from stateset_agents.types.seeds import derive

__all__ = ["Dependencies", "FaultPolicy", "wait_before"]

T = TypeVar("T")

_LONGEST_WAIT = 30.0
"""Seconds that the doubling of waits ends at."""
_LEVELS = {"closed": 0.0, "half-open": 0.5, "open": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """How failures of environments and rewards are met; the names are `TrainingConfig`'s."""

    turn_retries: int = 0
    """Times that an answer of the environment is asked for again."""
    reward_retries: int = 1
    """Times that a reward that broke is asked again."""
    retry_backoff: float = 0.5
    """Seconds of the first wait before another try; it doubles each time."""
    breaker_failures: int = 10
    """Failures in a row after which work waits; 0: never."""
    breaker_pause: float = 5.0
    """Seconds until the first probe of what has failed so often."""
    outage_patience: float = 300.0
    """Seconds for which it is waited for; then conversations fail at once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind: Any = int if isinstance(field.default, int) else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < math.inf:
                whole = "a whole number" if kind is int else "seconds"
                raise ConfigurationError(f"{field.name} must be {whole} from 0 on, got {value!r}")


def wait_before(attempt: int, *, first: float, stream: int, most: float = _LONGEST_WAIT) -> float:
    """Seconds before the try after `attempt` (from 1) failed ones: first, twice that, and so on up to `most`,
    drawn between half and all of it, so that those who failed together do not come again together.

    `stream` is the caller's own: the same one waits alike in every run.
    """
    longest = min(most, first * 2.0 ** min(attempt - 1, 60))
    return longest * (0.5 + 0.5 * derive(stream, "wait", attempt) / 2**63)


def _told(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, StatesetError) else f"{type(error).__name__}: {text}"


class Dependencies:
    """The breakers of one engine, its waits, and how often what was tried again."""

    def __init__(
        self,
        policy: FaultPolicy | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or FaultPolicy()
        self.on_event: Callable[..., None] | None = None
        """Called as `on_event("breaker", dependency=..., state=..., cause=...)` when a breaker changes."""
        self.num_retries: Counter[str] = Counter()
        """By what was tried again: an episode, a turn, a reward, the call of an endpoint."""
        self.num_timeouts = 0
        """Answers and scores that came too late."""
        self._sleep = sleep
        self._clock = clock
        self._breakers: dict[str, Breaker] = {}
        """The engine's own."""
        self._seen: WeakSet[Breaker] = WeakSet()
        """Those too of clients that were asked on its behalf, as long as these live; some have one name."""
        self._num_opened = 0
        self._waited = 0.0
        self._told: dict[str, float] = {}

    @property
    def repeatable(self) -> bool:
        """Has nothing happened that another run need not repeat?"""
        return not (self.num_retries.total() or self.num_timeouts or self._num_opened)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Breakers that are asked inside count here."""
        token = watching.set(self)
        try:
            yield
        finally:
            watching.reset(token)

    def breaker(self, name: str) -> Breaker:
        """The engine's own breaker of this name."""
        if name not in self._breakers:
            self._breakers[name] = Breaker(
                name,
                failures=self.policy.breaker_failures,
                pause=self.policy.breaker_pause,
                clock=self._clock,
            )
        return self._breakers[name]

    def is_given_up(self, name: str) -> bool:
        """Is it down, and not waited for any more?"""
        breaker = self.breaker(name)
        patience = self.policy.outage_patience if breaker.has_worked else 0.0
        return breaker.state != "closed" and breaker.seconds_down >= patience

    async def pause(self, what: str, attempt: int, stream: int) -> None:
        """Count another try of `what`, and wait before it; `attempt` of them have failed."""
        self.num_retries[what] += 1
        await self._sleep(wait_before(attempt, first=self.policy.retry_backoff, stream=stream))

    async def ask(
        self,
        name: str,
        call: Callable[[], Awaitable[T]],
        *,
        down: type[StatesetError],
        counts: Callable[[Exception], bool] = lambda error: True,
    ) -> T:
        """One call behind the breaker of `name`.

        Programming and configuration errors say nothing of it; what `counts` says no to is an answer, after
        which it works. Raises `down` where it is not waited for any more.
        """
        patience = self.policy.outage_patience
        with self.watched():
            passing = admitted(self.breaker(name), patience=patience, down=down, sleep=self._sleep)
            async with passing as one:
                try:
                    return await call()
                except (*PROGRAMMING_ERRORS, ConfigurationError):
                    raise
                except Exception as error:
                    if counts(error):
                        one.failed(_told(error))
                    else:
                        one.answered()
                    raise

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, and how the breakers stand: 0 closed, .5 half-open, 1 open.

        Of several of one name (clients of one model at two addresses) the worst.
        """
        now = {
            "faults/retries": float(self.num_retries.total()),
            "faults/timeouts": float(self.num_timeouts),
            "faults/outages": float(self._num_opened),
            "faults/waited": self._waited,
        }
        since = {name: value - self._told.get(name, 0.0) for name, value in now.items()}
        self._told = now
        levels: dict[str, float] = {}
        for breaker in [*self._breakers.values(), *self._seen]:
            name = f"breaker/{breaker.name.replace(' ', '_')}"
            levels[name] = max(levels.get(name, 0.0), _LEVELS[breaker.state])
        return since | dict(sorted(levels.items()))

    # ------------------------------------------------------------------------------ as a breaker's Watch

    def saw(self, breaker: Breaker) -> None:
        self._seen.add(breaker)

    def changed(self, breaker: Breaker, was: State) -> None:
        self._num_opened += was == "closed"
        if self.on_event is not None:
            self.on_event("breaker", dependency=breaker.name, state=breaker.state, cause=breaker.cause)

    def waited(self, breaker: Breaker, seconds: float) -> None:
        self._waited += seconds

    def retried(self, breaker: Breaker) -> None:
        self.num_retries[breaker.name] += 1
