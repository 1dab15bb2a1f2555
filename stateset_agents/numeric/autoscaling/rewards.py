"""The document's reward of a cluster's state: cost, performance, reliability, efficiency, weighted.

Every value of a state is a number or an array [B]; components and total then have that shape. It
pays *changes* of cost, and holds 70 % utilisation for the best. `RewardShaper` adds potential-based shaping.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stateset_agents.numeric.autoscaling.queueing import Array
from stateset_agents.rewards.shaping import shaping_rewards
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_one_of, expect_that, nearest

_TARGET_THROUGHPUT = 1000.0
"""Of a state that names none."""
_REMEMBERED = 1000
"""Shaped rewards of which mean and deviation are taken."""


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weight of each component."""

    cost: float = 0.3
    performance: float = 0.3
    reliability: float = 0.25
    efficiency: float = 0.15

    def __post_init__(self) -> None:
        for part in fields(self):
            expect_that(getattr(self, part.name) >= 0, part.name, "not be negative", getattr(self, part.name))


SLA: Mapping[str, float] = {
    "latency_p99_ms": 200.0,
    "error_rate_percent": 0.1,
    "availability_percent": 99.9,
}
"""Bounds of `InfrastructureRewardFunction.sla`."""


class InfrastructureRewardFunction:
    """The weighted sum of four components, and each of them."""

    def __init__(
        self,
        weights: RewardWeights | None = None,
        *,
        sla: Mapping[str, float] = SLA,
        cost_baseline: float = 1000.0,
    ) -> None:
        """`sla`: bounds by the names of `SLA`, which holds for those left out; `cost_baseline`: $/h.

        Raises ConfigurationError for another bound, and for a p99 or a baseline that is not positive.
        """
        self.weights = weights or RewardWeights()
        for name in sla:
            expect_one_of("a bound of sla", name, SLA)
        self.sla = {**SLA, **sla}
        self.cost_baseline = cost_baseline
        expect_that(
            self.sla["latency_p99_ms"] > 0, "latency_p99_ms", "be positive", self.sla["latency_p99_ms"]
        )
        expect_that(cost_baseline > 0, "cost_baseline", "be positive", cost_baseline)

    def compute_cost_reward(self, current_cost: Any, previous_cost: Any) -> Any:
        """(previous - current) / baseline, .1 more below 80 % of the baseline; within ±1."""
        saved = (np.asarray(previous_cost) - current_cost) / self.cost_baseline
        return _plain(np.clip(saved + 0.1 * (np.asarray(current_cost) < 0.8 * self.cost_baseline), -1, 1))

    def compute_performance_reward(self, latency_p99: Any, throughput: Any, target_throughput: Any) -> Any:
        """The mean of SLA / p99 - 1 and throughput / target - .9, each from -1 to .5; latencies are in ms."""
        latency = np.clip(self.sla["latency_p99_ms"] / np.maximum(latency_p99, 1.0) - 1, -1, 0.5)
        served = np.clip(np.asarray(throughput) / np.maximum(target_throughput, 1.0) - 0.9, -1, 0.5)
        return _plain((latency + served) / 2)

    def compute_reliability_reward(self, error_rate: Any, availability: Any) -> Any:
        """The mean of two parts, .5 within the SLA, else 1 - exp(excess) and -10 gap; from -2 to 1. Both are
        in per cent."""
        excess = np.asarray(error_rate) - self.sla["error_rate_percent"]
        gap = self.sla["availability_percent"] - np.asarray(availability)
        errors = np.where(excess <= 0, 0.5, 1 - np.exp(np.clip(excess, 0, 100)))
        available = np.where(gap <= 0, 0.5, -10 * gap)
        return _plain(np.clip((errors + available) / 2, -2, 1))

    def compute_efficiency_reward(
        self, cpu_utilization: Any, memory_utilization: Any, target_utilization: float = 70
    ) -> Any:
        """A bell around the target of the mean utilisation in per cent, 20 wide; .3 less below 30 %, .5 less
        above 90 %; within ±1."""
        used = (np.asarray(cpu_utilization) + memory_utilization) / 2
        bell = np.exp(-((used - target_utilization) ** 2) / (2 * 20**2))
        return _plain(np.clip(bell - 0.3 * (used < 30) - 0.5 * (used > 90), -1, 1))

    def compute_reward(
        self, state: Mapping[str, Any], previous_state: Mapping[str, Any], action_taken: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Total and components of the step from `previous_state` to `state`; the action itself earns nothing.

        A state has cost_per_hour, latency_p99_ms, throughput_rps, error_rate_percent, availability_percent,
        cpu_percent and memory_percent, and may have target_throughput, which is 1000 else. Raises
        ConfigurationError where one is missing.
        """
        parts = {
            "cost": self.compute_cost_reward(
                _read(state, "cost_per_hour"), _read(previous_state, "cost_per_hour")
            ),
            "performance": self.compute_performance_reward(
                _read(state, "latency_p99_ms"),
                _read(state, "throughput_rps"),
                state.get("target_throughput", _TARGET_THROUGHPUT),
            ),
            "reliability": self.compute_reliability_reward(
                _read(state, "error_rate_percent"), _read(state, "availability_percent")
            ),
            "efficiency": self.compute_efficiency_reward(
                _read(state, "cpu_percent"), _read(state, "memory_percent")
            ),
        }
        total = sum(getattr(self.weights, name) * part for name, part in parts.items())
        return total, parts


class RewardShaper:
    """Potential-based shaping (Ng, Harada and Russell 1999) of a reward, one step at a time.

    r + gamma Phi(s') - Phi(s), within `clip_range`; Phi of a state that ends the episode is 0. Discounted
    over an episode what is added sums to -Phi(s_0), whatever was done, so the best policy stays the same as
    long as nothing is clipped.

    `normalize` divides by the running deviation of the last 1000 shaped rewards after taking off their mean,
    as the document does. It is off by default: one action then earns another reward at another time, and
    members of a group can no longer be compared.
    """

    def __init__(
        self,
        gamma: float = 0.99,
        clip_range: tuple[float, float] | None = (-10.0, 10.0),
        *,
        normalize: bool = False,
    ) -> None:
        """`gamma`: the training's; `clip_range`: of what is given back, None for no bound."""
        if isinstance(gamma, bool) or not 0 < gamma <= 1:
            raise ConfigurationError(f"gamma must be above 0 and at most 1, got {gamma!r}")
        if clip_range is not None and not clip_range[0] < clip_range[1]:
            raise ConfigurationError(f"clip_range must rise from its first to its second, got {clip_range!r}")
        self.gamma, self.clip_range, self.normalize = gamma, clip_range, normalize
        self.num_clipped = 0
        """Rewards that were cut at `clip_range`: the best policy may differ where there are many."""
        self.reward_history: deque[float] = deque(maxlen=_REMEMBERED)
        """The last shaped rewards, before they are normalised and clipped."""

    def shape(
        self, reward: float, potential_current: float, potential_next: float, *, terminal: bool = False
    ) -> float:
        """One step's reward. `terminal`: the step ended the episode, so the next potential counts as 0.

        Raises ConfigurationError for a number that is not finite.
        """
        expect_that(math.isfinite(reward), "reward", "be finite", reward)
        expect_that(math.isfinite(potential_current), "potential_current", "be finite", potential_current)
        expect_that(math.isfinite(potential_next), "potential_next", "be finite", potential_next)
        potentials = [potential_current, 0.0 if terminal else potential_next]
        shaped = reward + shaping_rewards(potentials, gamma=self.gamma)[0]
        self.reward_history.append(shaped)
        if self.normalize:
            shaped = (shaped - self.running_mean) / self.running_std
        if self.clip_range is None:
            return shaped
        clipped = min(max(shaped, self.clip_range[0]), self.clip_range[1])
        self.num_clipped += clipped != shaped
        return clipped

    @property
    def running_mean(self) -> float:
        """Mean of `reward_history`; 0 before the first reward."""
        return float(np.mean(self.reward_history)) if self.reward_history else 0.0

    @property
    def running_std(self) -> float:
        """Deviation of `reward_history`; 1 before the first reward."""
        return float(np.std(self.reward_history)) + 1e-8 if self.reward_history else 1.0

    @staticmethod
    def compute_potential(state: Mapping[str, Any]) -> float:
        """-p99 / 1000 - 10 error% - |u - 70| / 100, where u is the mean of CPU and memory in per cent.

        Raises ConfigurationError where the state lacks one of these.
        """
        used = (_read(state, "cpu_percent") + _read(state, "memory_percent")) / 2
        errors = _read(state, "error_rate_percent")
        potential = -_read(state, "latency_p99_ms") / 1000 - 10 * errors - abs(used - 70) / 100
        return float(potential)


def _read(state: Mapping[str, Any], key: str) -> Any:
    if key not in state:
        raise ConfigurationError(f"the state has no {key!r}{nearest(key, state)}: the reward reads it")
    return state[key]


def _plain(value: Any) -> Any:
    """A float for numbers, an array for arrays."""
    return float(value) if np.ndim(value) == 0 else value


# ------------------------------------------------------------------------------------------ money


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
        expect_that(0 <= self.late_weight < math.inf, "late_weight", "not be negative", self.late_weight)
        for name in ("allowed_late", "ideal_utilization"):
            expect_that(0 <= getattr(self, name) <= 1, name, "lie between 0 and 1", getattr(self, name))
        if self.ideal_utilization == 0:
            raise ConfigurationError("ideal_utilization must be above 0, got 0")

    def parts(self, cost: Array, ideal_cost: Array, late_share: Array) -> tuple[Array, Array]:
        """Costs of replicas and of lateness, [B] each, 0 or below; the reward is their sum."""
        return -cost / ideal_cost, -self.late_weight * np.maximum(late_share - self.allowed_late, 0.0)
