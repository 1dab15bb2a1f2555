"""Rewards: what a finished conversation is worth.

A reward function alone sets `trajectory.reward`. A score of None means "not applicable"; a reward that
breaks leaves its member unscored (`RewardFailure`), never with a made-up number. The engine scores a
group by `score_trajectories`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real

from stateset_agents.core.function_reward import FunctionReward, Reward, as_reward, reward_function
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
    score_trajectories,
    score_trajectory,
    turn_rewards,
)
from stateset_agents.core.trajectory import Trajectory
from stateset_agents.core.waiting import all_or_cancel
from stateset_agents.errors import ConfigurationError, RewardFailure

__all__ = [
    "CompositeReward",
    "EnvironmentReward",
    "FunctionReward",
    "Reward",
    "RewardFunction",
    "RewardResult",
    "Scope",
    "Term",
    "as_reward",
    "create_customer_service_reward",
    "create_domain_reward",
    "create_helpful_reward",
    "create_task_reward",
    "create_tutoring_reward",
    "named_terms",
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


Term = tuple[Reward, float]
"""A reward, or a plain function, and its number: a weight here, a threshold in a gate."""


def named_terms(
    what: str, rewards: Mapping[str, Term] | Sequence[Term], number: str = "weight"
) -> list[tuple[str, RewardFunction, float]]:
    """Name, reward and number of each term; a sequence's terms are called as their rewards are.

    Raises ConfigurationError where a term is no pair, a name stands twice, or a number is not positive.
    """
    if not isinstance(rewards, Mapping | Sequence) or not rewards:
        raise ConfigurationError(f"a {what} needs at least one (reward, {number}), got {rewards!r:.60}")
    named = isinstance(rewards, Mapping)
    terms: list[tuple[str, RewardFunction, float]] = []
    for key, pair in rewards.items() if isinstance(rewards, Mapping) else enumerate(rewards):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigurationError(f"a {what} takes (reward, {number}) pairs, got {pair!r:.60}")
        reward, value = as_reward(pair[0]), pair[1]
        name = str(key) if named else reward.name
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
            raise ConfigurationError(f"the {number} of reward {name!r} must be positive, got {value!r}")
        terms.append((name, reward, float(value)))
    names = [name for name, _, _ in terms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"reward {twice!r} stands twice: name the terms by a mapping, {{name: (reward, {number})}}"
        )
    return terms


class CompositeReward(RewardFunction):
    """The weighted mean of several rewards, over those that apply.

        CompositeReward([(EnvironmentReward(), 0.7), (create_customer_service_reward(), 0.3)])

    Where a term is not applicable the others share its weight; where one fails, the member is
    unscored. The breakdown holds each term under its name and the term's own parts under `name/part`.
    Turn rewards are combined by the same weights. A plain function may stand for a reward.
    """

    def __init__(self, rewards: Mapping[str, Term] | Sequence[Term], *, name: str = "composite") -> None:
        """Weights must be positive (let a penalty return negative scores) and need not sum to 1."""
        self._terms = named_terms("composite reward", rewards)
        self.name = name
        self.scope = "group" if any(reward.scope == "group" for _, reward, _ in self._terms) else "trajectory"
        self.local = all(reward.local for _, reward, _ in self._terms)

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
