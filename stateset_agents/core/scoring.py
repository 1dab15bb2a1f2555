"""What a reward is, and the boundary at which it is asked: types for core/reward.py and its factories."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from stateset_agents.core.trajectory import Trajectory
from stateset_agents.core.user_code import call_user_code, time_limit, told
from stateset_agents.core.waiting import all_or_cancel
from stateset_agents.errors import PROGRAMMING_ERRORS, ConfigurationError, RewardFailure, RewardTimeout

__all__ = [
    "RewardFunction",
    "RewardResult",
    "Scope",
    "as_member_result",
    "as_result",
    "result_of",
    "score_trajectories",
    "score_trajectory",
    "turn_rewards",
]

Scope = Literal["turn", "trajectory", "group"]
"""What a reward looks at: each turn by itself, a conversation, or a group's conversations together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """One score and what it is made of.

    Construction raises RewardFailure on what is no number, and on turn rewards without a score.
    """

    score: float | None
    """None: this reward has nothing to say about this conversation."""
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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @abstractmethod
    async def score(self, trajectory: Trajectory) -> RewardResult:
        """The worth of one conversation; raises RewardFailure when it cannot be scored."""

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        """One result per member, in order; the failure of one leaves the others scored."""
        return await all_or_cancel(_attempt(self, trajectory) for trajectory in trajectories)

    def observe(self, results: Sequence[RewardResult]) -> None:  # noqa: B027  # most rewards keep nothing
        """Called by the trainer when a step is over, with what this reward gave each scored conversation.

        A reward that keeps statistics moves them here and nowhere else, so that all conversations of a step
        are compared under the same ones and an evaluation moves none. It runs in a thread. What it raises
        is one line, and training goes on; programming errors end the training with the step kept.
        """

    def state(self) -> dict[str, Any]:
        """What `observe` has moved, as plain JSON: a checkpoint keeps it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # most rewards keep nothing
        """Take up what `state` gave."""


@dataclass(frozen=True, slots=True)
class _Deadline:
    """When a group must have been scored."""

    time: float
    """On the event loop's clock."""
    seconds: float
    """How long that was to take."""

    @property
    def seconds_left(self) -> float:
        return self.time - asyncio.get_running_loop().time()

    def missed_by(self, reward: RewardFunction) -> RewardTimeout:
        return RewardTimeout(
            f"reward {reward.name} took longer than {self.seconds:g} s: mend what hangs, or raise "
            "reward_timeout"
        )


_deadline: ContextVar[_Deadline | None] = ContextVar("deadline", default=None)
"""Of the group that is being scored; the rewards inside a composite have it too."""
_GRACE = 1.0
"""Seconds by which a whole group's limit is later than its members': those in time keep their score."""


@contextmanager
def _within(seconds: float | None) -> Iterator[None]:
    """The time that scoring a group may take; None leaves it as it is."""
    if seconds is None:
        yield
        return
    token = _deadline.set(_Deadline(asyncio.get_running_loop().time() + seconds, seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


async def score_trajectory(reward: RewardFunction, trajectory: Trajectory) -> RewardResult:
    """Score one conversation at the boundary to user code; a `score` that is not async runs in a thread.

    Whatever breaks in the reward becomes a RewardFailure that names it; programming and configuration
    errors travel. Where the engine set a time limit, a reward that exceeds it is cancelled.
    """
    limit = _deadline.get()
    try:
        if limit is None:
            return as_result(await call_user_code(reward.score, trajectory))
        async with time_limit(limit.seconds_left, limit.missed_by(reward)):
            return as_result(await call_user_code(reward.score, trajectory))
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:
        raise _named(reward.name, error) from error


async def score_trajectories(
    reward: RewardFunction, trajectories: Sequence[Trajectory], *, seconds: float | None = None
) -> list[RewardResult | RewardFailure]:
    """Score the members of a group: one result or failure each, in order. The engine's one door.

    Members without a score after so many `seconds` get a RewardTimeout. A reward that breaks as a whole fails
    every member; a result list of the wrong length is a ConfigurationError.
    """
    if not trajectories:
        return []
    try:
        with _within(seconds):
            results = await _score_group(reward, trajectories)
    except (*PROGRAMMING_ERRORS, ConfigurationError):
        raise
    except Exception as error:
        return [_named(reward.name, error)] * len(trajectories)
    if len(results) != len(trajectories):
        raise ConfigurationError(
            f"reward {reward.name} gave {len(results)} results for {len(trajectories)} trajectories"
        )
    return [as_member_result(reward.name, result) for result in results]


async def _score_group(
    reward: RewardFunction, trajectories: Sequence[Trajectory]
) -> list[RewardResult | RewardFailure]:
    limit = _deadline.get()
    if limit is None:
        return await reward.score_group(trajectories)
    async with time_limit(limit.seconds_left + _GRACE, limit.missed_by(reward)):
        return await reward.score_group(trajectories)


async def _attempt(reward: RewardFunction, trajectory: Trajectory) -> RewardResult | RewardFailure:
    try:
        return await score_trajectory(reward, trajectory)
    except RewardFailure as failure:
        return failure


def as_member_result(name: str, value: object) -> RewardResult | RewardFailure:
    """What a group reward gave for one member, checked: a result or a failure that names the reward."""
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
    return RewardFailure(f"reward {name} failed: {told(error)}")
