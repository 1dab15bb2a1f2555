"""Scores on another scale: bounded by a formula, or by running statistics that stand still within a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from stateset_agents.core.scoring.base import RewardResult, score_trajectories
from stateset_agents.core.scoring.function_reward import Reward
from stateset_agents.core.scoring.terms import RewardOfRewards, as_term, parts_of
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.trajectory import Trajectory

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
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
        raise ConfigurationError(f"reward_clip_value must be positive, got {bound!r}")
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

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        return [self._scaled(result) for result in await score_trajectories(self._reward, trajectories)]

    def _scaled(self, result: RewardResult | RewardFailure) -> RewardResult | RewardFailure:
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

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        running = self.running
        results = await score_trajectories(self._reward, trajectories)
        return [self._normalized(result, running) for result in results]

    def _normalized(
        self, result: RewardResult | RewardFailure, running: RunningMoments
    ) -> RewardResult | RewardFailure:
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
