"""The honest reward: what replicas cost, by what the load needs, and what lateness beyond a promise costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stateset_agents.types.errors import ConfigurationError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoneyReward:
    """-(cost / ideal cost + late_weight * max(late share - allowed_late, 0)).

    The ideal cost is that of the episode's mean load at `ideal_utilization` in the configuration of the
    start: one number per episode, so that a dollar counts the same in every step.
    """

    late_weight: float = 20.0
    allowed_late: float = 0.01
    ideal_utilization: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.late_weight < math.inf:
            raise ConfigurationError(f"late_weight must not be negative, got {self.late_weight!r}")
        for name in ("allowed_late", "ideal_utilization"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} must lie between 0 and 1, got {getattr(self, name)!r}")
        if self.ideal_utilization == 0:
            raise ConfigurationError("ideal_utilization must be above 0, got 0")

    def parts(self, cost: Array, ideal_cost: Array, late_share: Array) -> tuple[Array, Array]:
        """What replicas and what lateness cost, [B] each and 0 or below; the reward is their sum."""
        return -cost / ideal_cost, -self.late_weight * np.maximum(late_share - self.allowed_late, 0.0)
