"""The base of all rewards, and the boundary at which they are asked; core/reward.py stands on it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from stateset_agents.runtime.circuit_breakers import FaultPolicy, FaultTolerance, wait_before
from stateset_agents.runtime.tasks import gather_or_cancel, with_timeout
from stateset_agents.runtime.user_code import call_user_code, format_error
from stateset_agents.types.errors import PROGRAMMING_ERRORS, ConfigurationError, RewardFailure, RewardTimeout
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

T = TypeVar("T")
Scope = Literal["turn", "trajectory", "group"]
"""The part that a reward looks at: each turn, a conversation, or a group's conversations together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """One score and what it is made of.

    Construction raises RewardFailure on what is no number, and on turn rewards without a score.
    """

    score: float | None
    """The score; None where this reward has nothing to say about this conversation."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    """[num_turns] what single turns earned of `score`; the rest of it is for the conversation as a whole.
    Empty: all of it is. Per-turn credit and GAE read it."""

    def __post_init__(self) -> None:
        _check("score", self.score)
        for key, value in self.breakdown.items():
            _check(f"breakdown[{key!r}]", value)
        for turn, reward in enumerate(self.turn_rewards):
            if reward is None:
                raise RewardFailure(f"turn_rewards[{turn}] is None: give 0.0 to a turn that earned nothing")
            _check(f"turn_rewards[{turn}]", reward)
        if self.turn_rewards and self.score is None:
            raise RewardFailure("turn_rewards are parts of the score, which is None: give both or neither")


Result = RewardResult | RewardFailure
"""The outcome of scoring a conversation: its score, or why it has none."""


def turn_rewards(result: RewardResult, num_turns: int) -> tuple[float, ...]:
    """[num_turns] what each turn earned by itself.

    Raises RewardFailure when the result has turn rewards for another number of turns.
    """
    if not result.turn_rewards:
        return (0.0,) * num_turns
    if len(result.turn_rewards) != num_turns:
        raise RewardFailure(
            f"turn_rewards has {len(result.turn_rewards)} numbers for a conversation of {num_turns} turns"
        )
    return result.turn_rewards


def with_score(trajectory: Trajectory, result: Result) -> tuple[Trajectory, RewardFailure | None]:
    """The conversation with its score; where it has none, with the reason as its error, and the failure."""
    try:
        if isinstance(result, RewardFailure):
            raise result
        rewards = () if result.score is None else turn_rewards(result, len(trajectory.turns))
    except RewardFailure as failure:
        return replace(trajectory, error=f"unscored: {failure}"), failure
    scored = replace(trajectory, reward=result.score, breakdown=result.breakdown, turn_rewards=rewards)
    return scored, None


def result_of(trajectory: Trajectory) -> RewardResult:
    """The result that scored a conversation."""
    return RewardResult(
        score=trajectory.reward, breakdown=trajectory.breakdown, turn_rewards=trajectory.turn_rewards
    )


def _check(what: str, value: object) -> None:
    if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
        raise RewardFailure(f"{what} must be a finite number or None, got {value!r:.60}")


class RewardFunction(ABC):
    """Base of every reward. A subclass writes `score`, and `score_group` if its scope is "group"."""

    name: str = "RewardFunction"
    """Stands in breakdowns and errors; the class's name unless set."""
    scope: Scope = "trajectory"
    local: bool = False
    """True when scoring waits on nothing remote; a reward of your own counts as remote unless it says so."""
    outermost: bool = False
    """True where no other reward may be put over this one, as over potential-based shaping."""
    made_of_others: bool = False
    """True where it only asks other rewards: those have time limits and further tries, it needs none."""
    answers_as_a_whole: bool = False
    """True where it scores a group in one go, so that it is timed and asked again as a whole: set for each
    subclass that writes `score_group`."""
    _has_warned = False

    @property
    def part_weights(self) -> Mapping[str, float]:
        """Names in its breakdown, of which the score is the weighted sum; empty where it is no sum."""
        return {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if "answers_as_a_whole" not in vars(cls):
            cls.answers_as_a_whole = cls.score_group is not RewardFunction.score_group

    @abstractmethod
    async def score(self, trajectory: Trajectory) -> RewardResult:
        """The worth of one conversation; raises RewardFailure when it cannot be scored."""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        """One result per member, in order; the failure of one leaves the others scored."""
        return await gather_or_cancel(_score_member(self, trajectory) for trajectory in trajectories)

    async def score_as_group(self, trajectory: Trajectory) -> RewardResult:
        """Score one conversation as a group of one, for rewards that write `score_group` alone."""
        [result] = await self.score_group([trajectory])
        if isinstance(result, RewardFailure):
            raise result
        return result

    def warn_once(self, log: BoundLogger, event: str, **fields: Any) -> None:
        """Log a warning that names this reward, the first time that it is called for it."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(event, reward=self.name, **fields)

    def check_scenario(self, scenario: Scenario) -> None:  # noqa: B027  # most rewards compare with nothing
        """Check a scenario: called for each before it is played, in a training for all before the first.

        Raises ConfigurationError, in a line that names the scenario, where what its context says is right
        cannot be scored by."""

    def observe(self, results: Sequence[RewardResult]) -> None:  # noqa: B027  # most rewards keep nothing
        """Take note of results: the trainer calls it after a step, with those of all scored conversations.

        A reward that keeps statistics moves them here and nowhere else, so that all conversations of a step
        are compared under the same ones and an evaluation moves none. It runs in a thread. What it raises
        is one line, and training goes on; programming errors end the training with the step kept.
        """

    def state(self) -> dict[str, Any]:
        """Return what `observe` has moved, as plain JSON: a checkpoint keeps it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # most rewards keep nothing
        """Take up what `state` gave."""


@dataclass(frozen=True, slots=True)
class _Terms:
    """The terms on which the rewards of a group are asked, those inside a composite too."""

    seconds: float | None
    """Seconds for one attempt."""
    fault_tolerance: FaultTolerance

    async def ask(self, reward: RewardFunction, call: Callable[[], Awaitable[T]], stream: int) -> T:
        """The result of `call()` in time and behind the reward's breaker, repeated where it broke; raises
        what the last attempt raised. `stream` seeds the waits."""
        name, faults = f"reward {reward.name}", self.fault_tolerance

        async def attempt(_: int) -> T:
            late = self.missed_by(reward)
            try:
                return await faults.ask(
                    name,
                    lambda: with_timeout(self.seconds, call(), late),
                    down=RewardFailure,
                    counts=_has_broken,
                )
            except RewardTimeout:
                faults.num_timeouts += 1
                raise

        times = faults.policy.reward_retries
        return await faults.retry(
            attempt, name=name, times=times, stream=stream, service=name, counts=_has_broken
        )

    def longest(self) -> float | None:
        """Seconds after which a group whose rewards take their own time is no longer waited for."""
        if self.seconds is None:
            return None
        policy = self.fault_tolerance.policy
        waits = (
            wait_before(n + 1, first=policy.retry_backoff, stream=0) for n in range(policy.reward_retries)
        )
        return (policy.reward_retries + 1) * self.seconds + 2 * sum(waits) + policy.outage_patience + _GRACE

    def missed_by(self, reward: RewardFunction) -> RewardTimeout:
        return RewardTimeout(
            f"reward {reward.name} took longer than {self.seconds or math.inf:g} s: mend what hangs, or "
            "raise reward_timeout"
        )


_terms: ContextVar[_Terms | None] = ContextVar("terms", default=None)
"""The terms of the group that is scored: set by the engine's call, read by the calls inside a composite."""
_GRACE = 1.0
"""Seconds by which a whole group's limit is later than its members': those in time keep their score."""
_ASKED_ONCE = FaultPolicy(reward_retries=0, breaker_failures=0, outage_patience=0.0)
"""The policy outside an engine."""


def _has_broken(error: Exception) -> bool:
    """True unless it said that a conversation cannot be scored, which it would say again."""
    return isinstance(error, RewardTimeout) or not isinstance(error, RewardFailure)


async def score_trajectories(
    reward: RewardFunction,
    trajectories: Sequence[Trajectory],
    *,
    seconds: float | None = None,
    fault_tolerance: FaultTolerance | None = None,
) -> list[Result]:
    """Score the members of a group: one result or failure each, in order. The engine's one door.

    Members without a score after so many `seconds` get a RewardTimeout. A reward that breaks as a whole fails
    every member; a result list of the wrong length is a ConfigurationError. With `fault_tolerance`,
    the engine's, what broke is asked again, each time for so many seconds.
    """
    if not trajectories:
        return []
    terms = _terms.get()
    if seconds is not None or fault_tolerance is not None:
        terms = _Terms(seconds, fault_tolerance or FaultTolerance(_ASKED_ONCE))
    token = _terms.set(terms)
    try:
        if terms is None or reward.made_of_others:
            results = await reward.score_group(trajectories)
        elif reward.answers_as_a_whole:
            first = trajectories[0]
            stream = derive(first.seed, "reward", reward.name, first.scenario.id)
            results = await terms.ask(reward, lambda: reward.score_group(trajectories), stream)
        else:  # its members have limits of their own
            members = reward.score_group(trajectories)
            results = await with_timeout(terms.longest(), members, terms.missed_by(reward))
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:
        return [_named(reward.name, error)] * len(trajectories)
    finally:
        _terms.reset(token)
    if len(results) != len(trajectories):
        raise ConfigurationError(
            f"reward {reward.name} gave {len(results)} results for {len(trajectories)} trajectories"
        )
    return [as_member_result(reward.name, result) for result in results]


async def score_trajectory(reward: RewardFunction, trajectory: Trajectory) -> RewardResult:
    """Score one conversation at the boundary to user code; a `score` that is not async runs in a thread.

    Whatever breaks in the reward becomes a RewardFailure that names it; programming and configuration
    errors travel. In an engine a reward that exceeds its time limit is cancelled, and one that broke is
    asked again, behind its circuit breaker. A RewardFailure of its own is its last word.
    """
    result = await _score_member(reward, trajectory)
    if isinstance(result, RewardFailure):
        raise result
    return result


async def _score_member(reward: RewardFunction, trajectory: Trajectory) -> Result:
    """`score_trajectory`, with a failure as its result."""

    async def score() -> RewardResult:
        return as_result(await call_user_code(reward.score, trajectory))

    terms = _terms.get()
    try:
        if terms is None or reward.made_of_others:
            return await score()
        scenario, member = trajectory.scenario.id, trajectory.member
        return await terms.ask(
            reward, score, derive(trajectory.seed, "reward", reward.name, scenario, member)
        )
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:
        failure = _named(reward.name, error)
        if failure is not error:
            failure.__cause__ = error
        return failure


def as_member_result(name: str, value: object) -> Result:
    """Check what a group reward gave for one member: a result, or a failure that names the reward."""
    if isinstance(value, RewardFailure):
        return value
    try:
        return as_result(value)
    except RewardFailure as failure:
        return _named(name, failure)


def as_result(value: object) -> RewardResult:
    """A number, None or a result, as a result; RewardFailure for anything else."""
    if isinstance(value, RewardResult):
        return value
    if isinstance(value, RewardFunction):
        raise ConfigurationError(
            f"a reward {value.name} came where its score should: call what makes it, f()"
        )
    _check("score", value)
    return RewardResult(score=None if value is None else float(value))  # type: ignore[arg-type]  # _check saw to it


def _named(name: str, error: Exception) -> RewardFailure:
    if isinstance(error, RewardFailure):
        text = str(error)
        return error if text.startswith("reward ") else RewardFailure(f"reward {name}: {text}")
    return RewardFailure(f"reward {name} failed: {format_error(error)}")
