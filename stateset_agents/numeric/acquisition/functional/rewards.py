"""The reward of an experiment: one objective or a weighted sum of several, its scaling, and bonuses.

`AcquisitionState.worth` says what there is; a reward is by how much it rose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from stateset_agents.numeric.acquisition.functional.states import AcquisitionState
from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.rewards import composites
from stateset_agents.rewards.composites import RewardScaling
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that, nearest

OBJECTIVES = ("regret", "expected_regret", "structure", "precision", "cost")
"""See `AcquisitionState.worth`."""


class ExplorationStrategy(Protocol):
    """Bonuses for trying."""

    def compute_bonuses(self, states: AcquisitionState, actions: Ints) -> Array:
        """[B] what is added to the reward before members are compared. A strategy that takes `states` alone
        is accepted, too; its bonus is the same for all members of a group, and cancels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """Several objectives in one reward: sum of weight times rise."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"expected_regret": 1.0})
    """Weight of each objective, by its name in OBJECTIVES."""
    horizon: Literal["step", "campaign"] = "step"
    """Experiments that an action is paid for: its own, or also those that the policy makes after it until the
    budget is spent. The first is quick and as near-sighted as the knowledge gradient."""

    def __post_init__(self) -> None:
        if not self.weights or not any(self.weights.values()):
            raise ConfigurationError("weights must name at least one objective with a weight, got none")
        for name, weight in self.weights.items():
            if name not in OBJECTIVES:
                raise ConfigurationError(
                    f"weights must be of {alternatives(OBJECTIVES)}, got {name!r}{nearest(name, OBJECTIVES)}"
                )
            expect_that(0 <= weight < math.inf, f"weights: {name}", "be at least 0", weight)
        expect_that(self.horizon in ("step", "campaign"), "horizon", "be step or campaign", self.horizon)

    def total(self, rises: Mapping[str, Array]) -> Array:
        """[B] the weighted sum."""
        total: Array = np.sum([weight * rises[name] for name, weight in self.weights.items()], axis=0)
        return total


def dual_reward(*, optimisation: float = 0.5, discovery: float = 0.5) -> RewardConfig:
    """Two objectives: to find the best intervention, and to find the graph."""
    return RewardConfig(weights={"expected_regret": optimisation, "structure": discovery})


@dataclass(frozen=True, slots=True)
class CountBonus:
    """weight / sqrt(1 + how often the intervention has been made): what is new is worth trying (Strehl and
    Littman, J. Computer and System Sciences 74, 2008)."""

    weight: float

    def __post_init__(self) -> None:
        expect_that(0 <= self.weight < math.inf, "the weight of a bonus", "be at least 0", self.weight)

    def compute_bonuses(self, states: AcquisitionState, actions: Ints) -> Array:
        """[B]"""
        counts = states.environment.situation.counts[np.arange(len(states)), actions]
        bonuses: Array = self.weight / np.sqrt(1.0 + counts)
        return bonuses


def apply_reward_scaling(rewards: Any, method: RewardScaling = "tanh", clip_value: float = 10.0) -> Tensor:
    """Rewards within ±c: `tanh` is tanh(r / c) c, `clip` cuts, `none` leaves them as they are. `rewards`: a
    tensor, an array or numbers.

    Raises ConfigurationError (a ValueError) for another method, and for a c that is not positive.
    """
    values = torch.as_tensor(rewards)
    scaled = composites.apply_reward_scaling(values.flatten().tolist(), method, clip_value)
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    return torch.tensor(scaled, dtype=dtype).reshape(values.shape)
