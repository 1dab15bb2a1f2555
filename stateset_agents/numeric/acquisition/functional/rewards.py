"""The reward of an experiment: one objective or a weighted sum of several, scaled, and bonuses for trying.

`AcquisitionState.worth` says what there is; a reward is by how much it rose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from stateset_agents.numeric.acquisition.functional.states import AcquisitionState
from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.rewards.composites import RewardScaling, apply_reward_scaling
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that, nearest

OBJECTIVES = ("regret", "expected_regret", "structure", "precision", "cost")
"""See `AcquisitionState.worth`."""

Bonus = Callable[[AcquisitionState, Ints], Array]
"""(states, [B] actions) -> [B] what is added to the reward before members are compared. A bonus of the state
alone is the same for all members of a group, and cancels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Several objectives in one reward: sum of weight times rise."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"expected_regret": 1.0})
    """Weight of each objective, by its name in OBJECTIVES."""
    reward_scaling: RewardScaling = "tanh"
    reward_clip_value: float = 10.0
    """See `rewards.composites.apply_reward_scaling`."""
    horizon: Literal["step", "campaign"] = "step"
    """Experiments that an action is paid for: its own, or also those that the policy makes after it until the
    budget is spent. The first is quick and as near-sighted as the knowledge gradient."""

    def __post_init__(self) -> None:
        if not self.weights or not any(self.weights.values()):
            raise ConfigurationError("weights must name at least one objective with a weight, got none")
        for name, weight in self.weights.items():
            if name not in OBJECTIVES:
                raise ConfigurationError(
                    f"weights: the objective must be {alternatives(OBJECTIVES)}, got {name!r}"
                    f"{nearest(name, OBJECTIVES)}"
                )
            expect_that(0 <= weight < math.inf, f"weights: {name}", "be at least 0", weight)
        expect_that(self.horizon in ("step", "campaign"), "horizon", "be step or campaign", self.horizon)
        apply_reward_scaling([], self.reward_scaling, self.reward_clip_value)  # says what is wrong with it

    def total(self, rises: Mapping[str, Array]) -> Array:
        """[B] the weighted sum, scaled."""
        parts = [weight * rises[name] for name, weight in self.weights.items()]
        summed = np.sum(parts, axis=0).tolist()
        return np.array(apply_reward_scaling(summed, self.reward_scaling, self.reward_clip_value))


def dual_reward(*, optimisation: float = 0.5, discovery: float = 0.5) -> RewardConfig:
    """Two objectives: to find the best intervention, and to find the graph."""
    return RewardConfig(weights={"expected_regret": optimisation, "structure": discovery})


def count_bonus(weight: float) -> Bonus:
    """weight / sqrt(1 + how often the intervention has been made): what is new is worth trying (Strehl and
    Littman, J. Computer and System Sciences 74, 2008)."""
    expect_that(0 <= weight < math.inf, "the weight of a bonus", "be at least 0", weight)

    def bonus(states: AcquisitionState, actions: Ints) -> Array:
        counts = states.environment.situation.counts[np.arange(len(states)), actions]
        bonuses: Array = weight / np.sqrt(1.0 + counts)
        return bonuses

    return bonus
