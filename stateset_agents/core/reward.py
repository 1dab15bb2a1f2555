"""Rewards: what a finished conversation is worth.

A reward function alone sets `trajectory.reward`. A score of None means "not applicable"; a reward that
breaks leaves its member unscored (`RewardFailure`), never with a made-up number. The engine scores a
group by `score_trajectories`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from stateset_agents.core.scoring.base import RewardFunction as RewardFunction
from stateset_agents.core.scoring.base import RewardResult as RewardResult
from stateset_agents.core.scoring.base import Scope as Scope
from stateset_agents.core.scoring.base import score_trajectories as score_trajectories
from stateset_agents.core.scoring.base import score_trajectory as score_trajectory
from stateset_agents.core.scoring.base import turn_rewards
from stateset_agents.core.scoring.function_reward import FunctionReward as FunctionReward
from stateset_agents.core.scoring.function_reward import Reward as Reward
from stateset_agents.core.scoring.function_reward import as_reward as as_reward
from stateset_agents.core.scoring.function_reward import reward_function as reward_function
from stateset_agents.core.scoring.terms import RewardOfRewards, Term, named_terms, parts_of
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import RewardFailure
from stateset_agents.types.trajectory import Trajectory


def __getattr__(name: str) -> Any:
    """The ready rewards of `rewards.factories`, which stands above this room, under their documented path."""
    if name.startswith("create_"):
        return getattr(import_module("stateset_agents.rewards.factories"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class EnvironmentReward(RewardFunction):
    """The environment's own reward: its turn rewards plus its outcome's. None where it gives neither."""

    name = "environment"
    local = True

    async def score(self, trajectory: Trajectory) -> RewardResult:
        outcome = trajectory.outcome
        return RewardResult(
            score=trajectory.environment_reward,
            breakdown={} if outcome is None else outcome.breakdown,
            turn_rewards=tuple(turn.reward or 0.0 for turn in trajectory.turns)
            if any(turn.reward is not None for turn in trajectory.turns)
            else (),
        )


class CompositeReward(RewardOfRewards):
    """The weighted mean of several rewards, over those that apply.

        CompositeReward([(EnvironmentReward(), 0.7), (create_customer_service_reward(), 0.3)])

    Where a term is not applicable the others share its weight; where one fails, the member is
    unscored. The breakdown holds each term under its name and the term's own parts under `name/part`.
    Turn rewards are combined by the same weights. A plain function may stand for a reward.
    """

    def __init__(self, rewards: Mapping[str, Term] | Sequence[Term], *, name: str = "composite") -> None:
        """Weights must be positive (let a penalty return negative scores) and need not sum to 1."""
        self._terms = named_terms("composite reward", rewards)
        super().__init__(name, {term: reward for term, reward, _ in self._terms})

    @property
    def part_weights(self) -> Mapping[str, float]:
        total = sum(weight for _, _, weight in self._terms)
        return {name: weight / total for name, _, weight in self._terms}

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        by_term = await gather_or_cancel(
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
        any_turn_rewards = False
        for (name, _, weight), result in zip(self._terms, results, strict=True):
            if isinstance(result, RewardFailure):
                return result
            breakdown.update(parts_of(name, result))
            if result.score is not None:
                total += weight * result.score
                weights += weight
                any_turn_rewards = any_turn_rewards or bool(result.turn_rewards)
                try:
                    earned_by_turn = turn_rewards(result, num_turns)
                except RewardFailure as failure:  # this member's alone
                    return RewardFailure(f"reward {name}: {failure}")
                turns = [
                    sum_so_far + weight * reward
                    for sum_so_far, reward in zip(turns, earned_by_turn, strict=True)
                ]
        if not weights:
            return RewardResult(score=None, breakdown=breakdown)
        earned = tuple(reward / weights for reward in turns) if any_turn_rewards else ()
        return RewardResult(score=total / weights, breakdown=breakdown, turn_rewards=earned)
