"""Rewards made of others, beyond the weighted mean (core.reward.CompositeReward): products and gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stateset_agents.core.reward import Reward, RewardResult, score_trajectories
from stateset_agents.core.scoring.terms import RewardOfRewards, Term, as_term, named_terms, parts_of
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.trajectory import Trajectory

Result = RewardResult | RewardFailure


class ProductReward(RewardOfRewards):
    """Each score to the power of its weight, multiplied: one zero makes the whole zero.

        ProductReward([(create_task_reward(), 1.0), (create_safety_reward(), 2.0)])

    Scores must lie between 0 and 1, so that no two negative ones make a good one; another leaves the member
    unscored. A term that is not applicable is left out (its factor is 1); where none applies the score is
    None. The breakdown is a composite's. A product cannot be split by turns, so all of it is the
    conversation's as a whole.
    """

    def __init__(self, rewards: Mapping[str, Term] | Sequence[Term], *, name: str = "product") -> None:
        """(reward, weight) pairs; weights must be positive, 1 takes a score as it is."""
        self._terms = named_terms("product reward", rewards)
        super().__init__(name, {term: reward for term, reward, _ in self._terms})

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        by_term = await gather_or_cancel(
            score_trajectories(reward, trajectories) for _, reward, _ in self._terms
        )
        return [self._multiplied(results) for results in zip(*by_term, strict=True)]

    def _multiplied(self, results: Sequence[Result]) -> Result:
        breakdown: dict[str, float] = {}
        factors = []
        for (name, _, weight), result in zip(self._terms, results, strict=True):
            score = _part(self.name, name, result, breakdown)
            if isinstance(score, RewardFailure):
                return score
            if score is not None:
                factors.append(score**weight)
        return RewardResult(score=math.prod(factors) if factors else None, breakdown=breakdown)


class GatedReward(RewardOfRewards):
    """Rewards in order of importance: a later one counts only when the earlier ones reach their thresholds.

        GatedReward([(create_correctness_reward(), 1.0)], then=create_conciseness_reward())

    With n rewards in all, a conversation that has passed m gates gets (m + s) / n, where s is the score of
    the gate it stands at, or of `then` behind the last. So passing one more gate is always worth more
    than anything that later rewards can pay: short and wrong never overtakes long and right. What a gate
    scored above its threshold no longer counts.

    Scores must lie between 0 and 1; another leaves the member unscored. Where a gate is not applicable,
    nothing can be said of what lies behind it and the score is None; where `then` is not applicable it adds
    nothing. Later rewards are asked only about the conversations that reached them, so put cheap gates before
    an expensive judge. All of the score is the conversation's as a whole, not its turns'.
    """

    def __init__(
        self, gates: Mapping[str, Term] | Sequence[Term], *, then: Reward, name: str = "gated"
    ) -> None:
        """`gates`: (reward, threshold) pairs, the most important first; thresholds above 0, at most 1."""
        self._gates = named_terms("gated reward", gates, "threshold")
        for gate, _, threshold in self._gates:
            if threshold > 1:
                raise ConfigurationError(
                    f"the threshold of reward {gate!r} must be at most 1, got {threshold!r}"
                )
        self._then = as_term("gated reward", then)
        if any(gate == self._then.name for gate, _, _ in self._gates):
            raise ConfigurationError(
                f"reward {self._then.name!r} stands twice: name the gates by a mapping, "
                "{name: (reward, threshold)}"
            )
        super().__init__(
            name, {gate: reward for gate, reward, _ in self._gates} | {self._then.name: self._then}
        )

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        num_stages = len(self._gates) + 1
        breakdowns: list[dict[str, float]] = [{} for _ in trajectories]
        ended: dict[int, Result] = {}
        stages = [*self._gates, (self._then.name, self._then, math.inf)]
        for passed, (name, reward, threshold) in enumerate(stages):
            there = [member for member in range(len(trajectories)) if member not in ended]
            results = await score_trajectories(reward, [trajectories[member] for member in there])
            for member, result in zip(there, results, strict=True):
                breakdown = breakdowns[member]
                score = _part(self.name, name, result, breakdown)
                if isinstance(score, RewardFailure):
                    ended[member] = score
                elif score is None and reward is not self._then:
                    ended[member] = RewardResult(score=None, breakdown=breakdown)
                elif score is None or score < threshold - _ROUNDING:
                    ended[member] = RewardResult(
                        score=(passed + (score or 0.0)) / num_stages, breakdown=breakdown
                    )
        return [ended[member] for member in range(len(trajectories))]


_ROUNDING = 1e-9
"""A mean of ones may come out a little below 1."""


def _part(
    reward: str, term: str, result: Result, breakdown: dict[str, float]
) -> float | RewardFailure | None:
    """A term's score, its parts written into the whole's breakdown; a failure where it is not in [0, 1]."""
    if isinstance(result, RewardFailure):
        return result
    breakdown.update(parts_of(term, result))
    if result.score is not None and not 0 <= result.score <= 1 + _ROUNDING:
        return RewardFailure(
            f"reward {reward}: {term} gave {result.score!r}, which is not between 0 and 1: scale it first"
        )
    return result.score
