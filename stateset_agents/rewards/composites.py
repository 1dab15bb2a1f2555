"""Rewards made of others, beyond the weighted mean (core.reward.CompositeReward): products and gates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from stateset_agents.core.reward import RewardOfRewards, Term, as_term, named_terms, parts_of
from stateset_agents.core.scoring.base import Result, RewardResult, score_trajectories
from stateset_agents.core.scoring.function_reward import Reward
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.settings import expect_that, is_number
from stateset_agents.types.trajectory import Trajectory


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
        return [self._multiplied(results) for results in await self.results_of_terms(trajectories)]

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
            expect_that(threshold <= 1, f"the threshold of reward {gate!r}", "be at most 1", threshold)
        self._then = as_term("gated reward", then)
        if any(gate == self._then.name for gate, _, _ in self._gates):
            raise ConfigurationError(
                f"reward {self._then.name!r} stands twice: name the gates, {{name: (reward, threshold)}}"
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


# Scores on another scale: bounded by a formula, or by running statistics that stand still within a step.

RewardScaling = Literal["tanh", "clip", "none"]


def apply_reward_scaling(
    rewards: Sequence[float], reward_scaling: RewardScaling = "tanh", reward_clip_value: float = 10.0
) -> list[float]:
    """Rewards within ±c: `tanh` is tanh(r / c) c, `clip` cuts, `none` leaves them as they are.

    Raises ConfigurationError (a ValueError) for another name, and for a c that is not positive.

    >>> apply_reward_scaling([-30.0, 2.0], "clip")
    [-10.0, 2.0]
    """
    bound = reward_clip_value
    expect_that(is_number(bound) and 0 < bound < math.inf, "reward_clip_value", "be positive", bound)
    match reward_scaling:
        case "tanh":
            return [math.tanh(reward / bound) * bound for reward in rewards]
        case "clip":
            return [max(-bound, min(bound, reward)) for reward in rewards]
        case "none":
            return list(rewards)
    raise ConfigurationError(
        f"reward_scaling must be one of {', '.join(get_args(RewardScaling))}, got {reward_scaling!r}"
    )


class ScaledReward(RewardOfRewards):
    """A reward by `apply_reward_scaling`; the breakdown keeps it as it was.

    tanh and clip bend, and a bent sum is not the sum of bent parts: all of the score is then the
    conversation's as a whole, not its turns'.
    """

    def __init__(
        self,
        reward: Reward,
        reward_scaling: RewardScaling = "tanh",
        reward_clip_value: float = 10.0,
        *,
        name: str = "scaled",
    ) -> None:
        apply_reward_scaling([], reward_scaling, reward_clip_value)
        self._reward = as_term("scaled reward", reward)
        self._scaling: RewardScaling = reward_scaling
        self._bound = reward_clip_value
        super().__init__(name, {self._reward.name: self._reward})

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        return [self._scaled(result) for result in await score_trajectories(self._reward, trajectories)]

    def _scaled(self, result: Result) -> Result:
        if isinstance(result, RewardFailure):
            return result
        breakdown = parts_of(self._reward.name, result)
        if result.score is None:
            return RewardResult(score=None, breakdown=breakdown)
        [score] = apply_reward_scaling([result.score], self._scaling, self._bound)
        turns = result.turn_rewards if self._scaling == "none" else ()
        return RewardResult(score=score, breakdown=breakdown, turn_rewards=turns)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and spread of all values so far, one pass (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared differences from the mean."""

    def with_value(self, value: float) -> RunningMoments:
        """The statistics with one more value."""
        count = self.count + 1
        mean = self.mean + (value - self.mean) / count
        return RunningMoments(count, mean, self.squares + (value - self.mean) * (value - mean))

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before there are two values that differ."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class NormalizedReward(RewardOfRewards):
    """A reward less its running mean, over its running standard deviation.

        CompositeReward([(NormalizedReward(tokens_saved), 1.0), (NormalizedReward(stars), 1.0)])

    It brings rewards of unlike scales to one, over the whole training; comparing a group's members is the
    advantage's work and stays apart from it. The statistics move once a step, by the trainer's `observe`,
    after all of the step's conversations are scored: within a step everyone is measured by the same
    ones, an evaluation moves none, and checkpoints keep them. Until scores that differ have been observed
    (in the first step, too) a score is passed on as it is. What a reward is worth drifts as the statistics
    do: for curves over time look at the breakdown, which keeps the score as it was.

    Turn rewards are divided by the same deviation; the mean is the whole conversation's.
    """

    def __init__(self, reward: Reward, *, name: str | None = None) -> None:
        self._reward = as_term("normalized reward", reward)
        self.running = RunningMoments()
        super().__init__(name or f"normalized {self._reward.name}", {self._reward.name: self._reward})

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        running = self.running
        results = await score_trajectories(self._reward, trajectories)
        return [self._normalized(result, running) for result in results]

    def _normalized(self, result: Result, running: RunningMoments) -> Result:
        if isinstance(result, RewardFailure):
            return result
        breakdown = parts_of(self._reward.name, result)
        if result.score is None or running.std == 0.0:
            return RewardResult(score=result.score, breakdown=breakdown, turn_rewards=result.turn_rewards)
        return RewardResult(
            score=(result.score - running.mean) / running.std,
            breakdown=breakdown,
            turn_rewards=tuple(reward / running.std for reward in result.turn_rewards),
        )

    def observe(self, results: Sequence[RewardResult]) -> None:
        super().observe(results)
        for result in results:
            score = result.breakdown.get(self._reward.name)
            if score is not None:
                self.running = self.running.with_value(score)

    def state(self) -> dict[str, Any]:
        inner = super().state()
        return {"running": asdict(self.running), **({"terms": inner} if inner else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.running = RunningMoments(**state.get("running", {}))
        super().restore(state.get("terms", {}))
