"""Rewards: what a finished conversation is worth.

A reward function alone sets `trajectory.reward`. A score of None means "not applicable"; a reward that
breaks leaves its member unscored (`RewardFailure`), never with a made-up number. The engine scores a
group by `score_trajectories`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, overload

from stateset_agents.core.reward_factories import (
    create_customer_service_reward,
    create_domain_reward,
    create_helpful_reward,
    create_task_reward,
    create_tutoring_reward,
)
from stateset_agents.core.scoring import (
    RewardFunction,
    RewardResult,
    Scope,
    as_member_result,
    as_result,
    score_trajectories,
    score_trajectory,
    turn_rewards,
)
from stateset_agents.core.trajectory import Trajectory, Turn
from stateset_agents.core.waiting import all_or_cancel, in_thread
from stateset_agents.errors import ConfigurationError, RewardFailure

__all__ = [
    "CompositeReward",
    "EnvironmentReward",
    "FunctionReward",
    "RewardFunction",
    "RewardResult",
    "Scope",
    "create_customer_service_reward",
    "create_domain_reward",
    "create_helpful_reward",
    "create_task_reward",
    "create_tutoring_reward",
    "reward_function",
    "score_trajectories",
    "score_trajectory",
]


class EnvironmentReward(RewardFunction):
    """The environment's own reward: its turn rewards plus its outcome's. None where it gives neither."""

    name = "environment"
    local = True

    async def score(self, trajectory: Trajectory) -> RewardResult:
        outcome = trajectory.outcome
        return RewardResult(
            score=trajectory.environment_reward,
            breakdown={} if outcome is None else outcome.breakdown,
            turn_rewards=_environment_turns(trajectory),
        )


def _environment_turns(trajectory: Trajectory) -> tuple[float, ...]:
    """[num_turns] the turns' own rewards; empty where the environment gives none."""
    if all(turn.reward is None for turn in trajectory.turns):
        return ()
    return tuple(turn.reward or 0.0 for turn in trajectory.turns)


Weighted = tuple[RewardFunction, float]


class CompositeReward(RewardFunction):
    """The weighted mean of several rewards, over those that apply.

        CompositeReward([(EnvironmentReward(), 0.7), (create_customer_service_reward(), 0.3)])

    Where a term is not applicable the others share its weight; where one fails, the member is
    unscored. The breakdown holds each term under its name and the term's own parts under `name/part`.
    Turn rewards are combined by the same weights.
    """

    def __init__(
        self, rewards: Mapping[str, Weighted] | Sequence[Weighted], *, name: str = "composite"
    ) -> None:
        """Weights must be positive (let a penalty return negative scores) and need not sum to 1."""
        if isinstance(rewards, Mapping):
            terms = [(term_name, *pair) for term_name, pair in rewards.items()]
        else:
            terms = [(reward.name, reward, weight) for reward, weight in rewards]
        if not terms:
            raise ConfigurationError("a composite reward needs at least one (reward, weight)")
        for term_name, _, weight in terms:
            if isinstance(weight, bool) or not isinstance(weight, Real) or not 0 < weight < math.inf:
                raise ConfigurationError(
                    f"the weight of reward {term_name!r} must be positive, got {weight!r}"
                )
        names = [term_name for term_name, _, _ in terms]
        twice = next((term_name for term_name in names if names.count(term_name) > 1), None)
        if twice is not None:
            raise ConfigurationError(
                f"reward {twice!r} stands twice: name the terms by a mapping, {{name: (reward, weight)}}"
            )
        self._terms = terms
        self.name = name
        self.scope = "group" if any(reward.scope == "group" for _, reward, _ in terms) else "trajectory"
        self.local = all(reward.local for _, reward, _ in terms)

    async def score(self, trajectory: Trajectory) -> RewardResult:
        [result] = await self.score_group([trajectory])
        if isinstance(result, RewardFailure):
            raise result
        return result

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        by_term = await all_or_cancel(
            score_trajectories(reward, trajectories) for _, reward, _ in self._terms
        )
        return [
            self._combined(results, num_turns=len(trajectory.turns))
            for trajectory, results in zip(trajectories, zip(*by_term, strict=True), strict=True)
        ]

    def _combined(
        self, results: Sequence[RewardResult | RewardFailure], *, num_turns: int
    ) -> RewardResult | RewardFailure:
        total = weights = 0.0
        breakdown: dict[str, float] = {}
        turns = [0.0] * num_turns
        told = False
        for (name, _, weight), result in zip(self._terms, results, strict=True):
            if isinstance(result, RewardFailure):
                return result
            breakdown.update({f"{name}/{part}": value for part, value in result.breakdown.items()})
            if result.score is not None:
                breakdown[name] = result.score
                total += weight * result.score
                weights += weight
                told = told or bool(result.turn_rewards)
                for turn, reward in enumerate(turn_rewards(result, num_turns)):
                    turns[turn] += weight * reward
        if not weights:
            return RewardResult(score=None, breakdown=breakdown)
        earned = tuple(reward / weights for reward in turns) if told else ()
        return RewardResult(score=total / weights, breakdown=breakdown, turn_rewards=earned)


_TRAJECTORY_ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = {
    "trajectory": lambda trajectory: trajectory,
    "messages": lambda trajectory: trajectory.messages,
    "replies": lambda trajectory: trajectory.replies,
    "scenario": lambda trajectory: trajectory.scenario,
    "context": lambda trajectory: trajectory.scenario.context,
    "success": lambda trajectory: trajectory.success,
    "outcome": lambda trajectory: trajectory.outcome,
}
_TURN_ARGUMENTS: Mapping[str, Callable[[Turn], Any]] = {
    "turn": lambda turn: turn,
    "reply": lambda turn: turn.completion.message,
    "feedback": lambda turn: turn.feedback,
}
_ARGUMENTS: Mapping[Scope, tuple[str, ...]] = {
    "turn": (*_TURN_ARGUMENTS, *_TRAJECTORY_ARGUMENTS),
    "trajectory": tuple(_TRAJECTORY_ARGUMENTS),
    "group": ("trajectories",),
}


class FunctionReward(RewardFunction):
    """A plain function as a reward; made by `@reward_function`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        scope: Scope = "trajectory",
        local: bool | None = None,
    ) -> None:
        self.name = name or function.__name__
        if scope not in _ARGUMENTS:
            raise ConfigurationError(
                f"reward {self.name}: scope must be one of {', '.join(_ARGUMENTS)}, got {scope!r}"
            )
        self.scope = scope
        self.is_async = inspect.iscoroutinefunction(function)
        self.local = not self.is_async if local is None else local
        self._function = function
        self._wanted = _wanted(self.name, function, _ARGUMENTS[scope])

    async def score(self, trajectory: Trajectory) -> RewardResult:
        if self.scope == "group":
            [result] = await self.score_group([trajectory])
            if isinstance(result, RewardFailure):
                raise result
            return result
        if self.scope == "turn":
            return await self._score_turns(trajectory)
        return as_result(await self._call(self._given(trajectory)))

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        if self.scope != "group":
            return await super().score_group(trajectories)
        results = await self._call({"trajectories": tuple(trajectories)})
        return [as_member_result(self.name, result) for result in results]

    async def _score_turns(self, trajectory: Trajectory) -> RewardResult:
        """Each turn sees the conversation up to its own reply; the mean, so longer talk earns no more.

        A turn earns what it moves the mean by, so that no turn's reward depends on later ones.
        """
        scores: list[float | None] = []
        for index, turn in enumerate(trajectory.turns):
            so_far = replace(trajectory, turns=(*trajectory.turns[:index], replace(turn, feedback=())))
            given = self._given(so_far)
            given.update({key: _TURN_ARGUMENTS[key](turn) for key in self._wanted if key in _TURN_ARGUMENTS})
            scores.append(as_result(await self._call(given)).score)
        applicable = [score for score in scores if score is not None]
        if not applicable:
            return RewardResult(score=None)
        return RewardResult(score=math.fsum(applicable) / len(applicable), turn_rewards=_mean_moves(scores))

    def _given(self, trajectory: Trajectory) -> dict[str, Any]:
        return {
            key: _TRAJECTORY_ARGUMENTS[key](trajectory)
            for key in self._wanted
            if key in _TRAJECTORY_ARGUMENTS
        }

    async def _call(self, given: Mapping[str, Any]) -> Any:
        if self.is_async:
            return await self._function(**given)
        return await in_thread(self._function, **given)


def _mean_moves(scores: Sequence[float | None]) -> tuple[float, ...]:
    """By how much each score moves the mean of those so far: (0, 1, None) -> (0, .5, 0)."""
    moves, total, count, mean = [], 0.0, 0, 0.0
    for score in scores:
        if score is not None:
            total, count = total + score, count + 1
        moves.append((total / count if count else 0.0) - mean)
        mean += moves[-1]
    return tuple(moves)


def _wanted(name: str, function: Callable[..., Any], offered: Sequence[str]) -> tuple[str, ...]:
    wanted = []
    for parameter in inspect.signature(function).parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.name in offered:
            wanted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise ConfigurationError(
                f"reward {name}: cannot give parameter {str(parameter)!r}; there are: {', '.join(offered)}"
            )
    return tuple(wanted)


@overload
def reward_function(function: Callable[..., Any], /) -> FunctionReward: ...
@overload
def reward_function(
    *, name: str | None = None, scope: Scope = "trajectory", local: bool | None = None
) -> Callable[[Callable[..., Any]], FunctionReward]: ...
def reward_function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    scope: Scope = "trajectory",
    local: bool | None = None,
) -> FunctionReward | Callable[[Callable[..., Any]], FunctionReward]:
    """Make a reward of a function that names what it wants to see.

        @reward_function
        def brief(replies, success):
            return None if success is None else success / len(replies)

    It may ask for trajectory, messages, replies, scenario, context, success, outcome; with
    `scope="turn"` also for turn, reply and feedback, and is called once per turn; with `scope="group"` for
    trajectories, and returns one score for each. It returns a number, None, or a RewardResult. Sync
    functions run in a thread and count as local; async ones count as remote unless `local=True`.
    """
    if function is None:
        return lambda decorated: FunctionReward(decorated, name=name, scope=scope, local=local)
    return FunctionReward(function, name=name, scope=scope, local=local)
