"""Guards, which say what no action may do, and brakes, which say when there is too much of it.

A *guard* looks at one action: `check` gives a `Violation` or None, and a guard that raises is a violation. A
*brake* counts actions with violations and says when to stop: `WindowGuard` quickly and often without cause,
`RateGuard` with a stated error rate (docs/evidence/deployment-decisions.md).
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, Protocol

from stateset_agents.deployment.sequential import EProcess
from stateset_agents.types.comparison import nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.schemas import call_key
from stateset_agents.types.settings import expect_that

Clock = Callable[[], float]
"""Seconds since 1970, as `time.time`."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violation of one guard by one action."""

    guard: str
    why: str


class Guard(Protocol):
    """Looks at one action in the state in which it was chosen."""

    @property
    def name(self) -> str: ...

    def check(self, action: Any, state: Any) -> Violation | None: ...


def violations_of(guards: Iterable[Guard], action: Any, state: Any) -> tuple[Violation, ...]:
    """All of them, in the order of the guards. A guard that raises could not say that the action is safe."""
    violations = []
    for guard in guards:
        try:
            violation = guard.check(action, state)
        except Exception as error:  # whatever it is, it must not let the action pass
            violation = Violation(guard.name, f"the guard raised {type(error).__name__}: {error}")
        if violation is not None:
            violations.append(violation)
    return tuple(violations)


# --- of answers ----------------------------------------------------------------


Agreement = Literal["reply", "calls", "none"]
"""reply: the same words and calls. calls: the same calls, or none by both, and other words. none: other
calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of an arm, as guards see it."""

    seconds: float | None = None
    """Seconds from the answer's turn in the queue to its end."""
    cost: float | None = None
    """Cost in the unit of the plan's limit."""
    error: str | None = None
    """Why there is none."""
    message: Message | None = None
    """The message, for guards of one's own; the journal does not keep it."""
    agreement: Agreement | None = None
    """Agreement with the baseline's answer to the same request, where there are both."""


def agreement_of(candidate: Message, baseline: Message) -> Agreement:
    """Do both say and do the same? Space around the words does not count, nor do the ids of calls.

    >>> agreement_of(Message(role="assistant", content="Hi."), Message(role="assistant", content="Hello."))
    'calls'
    """
    calls, others = (
        [call_key(call.name, call.arguments) for call in message.tool_calls]
        for message in (candidate, baseline)
    )
    if calls != others:
        return "none"
    return "reply" if nfc(candidate.content.strip()) == nfc(baseline.content.strip()) else "calls"


@dataclass(frozen=True, slots=True)
class FailureGuard:
    """There must be an answer."""

    name = "failure"

    def check(self, action: Answer, state: Any) -> Violation | None:
        """`state` is not read."""
        return Violation(self.name, action.error) if action.error is not None else None


@dataclass(frozen=True, slots=True)
class LimitGuard:
    """An answer that takes no more seconds, or costs no more, than this."""

    name: Literal["latency", "cost"]
    limit: float

    def check(self, action: Answer, state: Any) -> Violation | None:
        """An answer whose time or cost is not known may be above the limit."""
        value, unit = (action.seconds, " s") if self.name == "latency" else (action.cost, "")
        if value is None:
            return Violation(self.name, f"the {self.name} of the answer is not known")
        return None if value <= self.limit else Violation(self.name, f"{value:g}{unit}, limit {self.limit:g}")


# --- of scaling ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constraint:
    """A plain function that says True where the action is allowed, as a guard.

    It is `function(action, state)` or `function(state, action)`, told by the names of its parameters; one
    right name is enough. Raises ConfigurationError where they say neither, or both.
    """

    name: str
    function: Callable[[Any, Any], bool]
    state_first: bool = field(init=False)

    def __post_init__(self) -> None:
        try:
            first, second, *_ = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # no function, one of C, or of fewer parameters
            first = second = ""
        action_first = first == "action" or second == "state"
        state_first = first == "state" or second == "action"
        names = f"({first}, {second})" if second else repr(self.function)
        hint = "whether the action or the state comes first is told by them"
        rule = "have two parameters, action and state"
        expect_that(action_first != state_first, f"the constraint {self.name}", rule, names, hint)
        object.__setattr__(self, "state_first", state_first)

    def check(self, action: Any, state: Any) -> Violation | None:
        """Anything but True is a violation: a function that forgets to answer has not allowed the action."""
        answer = self.function(state, action) if self.state_first else self.function(action, state)
        if type(answer).__name__ in ("bool", "bool_") and answer:  # numpy's, too, without numpy
            return None
        why = "" if answer is False else f" (it must return True or False, got {answer!r:.60})"
        return Violation(self.name, f"not allowed{why}")


def max_scaling_constraint(action: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Allows scaling by at most half of the replicas, or by 2 where half is less, and by no more than all.

    1 replica may become 2, 2 may become 4, 10 may become 15.
    """
    replicas = _replicas(state)
    return bool(abs(int(action["scaling"])) <= min(max(0.5 * replicas, 2), max(replicas, 1)))


def min_replicas_constraint(action: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Allows what leaves at least 2 replicas."""
    return bool(_replicas(state) + int(action["scaling"]) >= 2)


def _replicas(state: Mapping[str, Any]) -> Any:
    """`replica_count` of the state, or `replicas`; of a state without, none is assumed."""
    for name in ("replica_count", "replicas"):
        if name in state:
            return state[name]
    raise ConfigurationError("the state has neither replica_count nor replicas: give one")


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Allows a scaling so many seconds after the last one. An action that keeps the replicas is always
    allowed."""

    seconds: float = 300.0
    clock: Clock = time.time

    def __call__(self, action: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
        """Reads `last_scale_time` of the state: seconds of the clock, a datetime, or None for never."""
        last = state.get("last_scale_time")
        if last is None or int(action["scaling"]) == 0:
            return True
        at = last.timestamp() if isinstance(last, datetime) else float(last)
        return self.clock() - at >= self.seconds


rate_limit_constraint = RateLimit()
"""Five minutes, by the machine's clock."""


# --- brakes --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowGuard:
    """Fires where more than a share of the last actions were unsafe, once there are that many.

    A fast brake, not a test: at half the allowed rate it fires for certain in the long run.
    """

    size: int = 100
    share: float = 0.1
    recent: tuple[bool, ...] = field(default=(), repr=False)
    """True for each of the last actions that was unsafe."""

    def __post_init__(self) -> None:
        expect_that(self.size >= 1, "size", "be at least 1", self.size)
        expect_that(0 <= self.share < 1, "share", "be from 0 to below 1", self.share)

    def step(self, *, is_unsafe: bool) -> WindowGuard:
        """After one more action."""
        return replace(self, recent=(*self.recent, is_unsafe)[-self.size :])

    @property
    def fires(self) -> bool:
        """100 actions of which 10 were unsafe: no. 11: yes."""
        return len(self.recent) == self.size and sum(self.recent) / self.size > self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class RateGuard:
    """Fires where the actions refute "at most `limit` of them are unsafe", whenever one looks.

    It fires without cause with probability `alpha` at most, over all actions together: bets on
    v = unsafe - limit, which is at most 0 in the mean as long as the rate keeps the limit.
    """

    limit: float = 0.1
    alpha: float = 0.05
    evidence: EProcess | None = None
    """Evidence against the limit; None before the first action."""

    def __post_init__(self) -> None:
        expect_that(0 < self.limit < 1, "limit", "be between 0 and 1", self.limit)
        expect_that(0 < self.alpha < 1, "alpha", "be between 0 and 1", self.alpha)

    def step(self, *, is_unsafe: bool) -> RateGuard:
        """After one more action."""
        evidence = EProcess(bets=rate_bets(self.limit)) if self.evidence is None else self.evidence
        return replace(self, evidence=evidence.step(float(is_unsafe) - self.limit))

    @property
    def fires(self) -> bool:
        """True once the wealth has reached 1 / alpha."""
        return self.evidence is not None and self.evidence.has_reached(self.alpha)


def rate_bets(limit: float) -> tuple[float, ...]:
    """Stakes with the largest growth at 1.2, 1.5 and 2 times the limit, less where a safe action would cost
    more than half.

    The growth's largest at a rate q is at (q - limit) / (limit (1 - limit)).
    """
    unit = min(1 / (1 - limit), 0.5 / limit)
    return tuple(factor * unit for factor in (0.2, 0.5, 1.0))
