"""The document's reward, by hand; one number and many at once are the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stateset_agents.numeric.autoscaling.rewards import (
    InfrastructureRewardFunction,
    RewardShaper,
    RewardWeights,
)
from stateset_agents.types.errors import ConfigurationError

REWARD = InfrastructureRewardFunction()
STATE = {
    "cost_per_hour": 700.0,
    "latency_p99_ms": 160.0,
    "throughput_rps": 950.0,
    "error_rate_percent": 0.05,
    "availability_percent": 99.95,
    "cpu_percent": 60.0,
    "memory_percent": 80.0,
}


@pytest.mark.parametrize(
    ("cost", "before", "expected"),
    [
        (900, 1000, 0.1),
        (1000, 900, -0.1),
        (700, 900, 0.3),
        (800, 800, 0.0),
        (799, 799, 0.1),
        (0, 2000, 1.0),
        (3000, 0, -1.0),
    ],
)
def test_cost(cost: float, before: float, expected: float) -> None:
    assert REWARD.compute_cost_reward(cost, before) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p99", "throughput", "expected"),
    [
        (200, 900, 0.0),
        (160, 1000, (0.25 + 0.1) / 2),
        (100, 1500, 0.5),  # both at their upper ends
        (0, 0, (0.5 - 0.9) / 2),
        (1e9, 0, (-1 - 0.9) / 2),
    ],
)
def test_performance(p99: float, throughput: float, expected: float) -> None:
    assert REWARD.compute_performance_reward(p99, throughput, 1000) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("errors", "available", "expected"),
    [
        (0.1, 99.9, 0.5),
        (1.1, 99.9, (1 - math.e + 0.5) / 2),
        (0.0, 99.8, (0.5 - 1.0) / 2),
        (0.0, 99.0, -2.0),
        (100.0, 0.0, -2.0),
    ],
)
def test_reliability(errors: float, available: float, expected: float) -> None:
    assert REWARD.compute_reliability_reward(errors, available) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (70, 1.0),
        (50, math.exp(-0.5)),
        (90, math.exp(-0.5)),
        (30, math.exp(-2)),
        (20, math.exp(-3.125) - 0.3),
        (100, math.exp(-1.125) - 0.5),
    ],
)
def test_efficiency(used: float, expected: float) -> None:
    assert REWARD.compute_efficiency_reward(used, used) == pytest.approx(expected)


def test_the_total_is_the_weighted_sum() -> None:
    total, parts = REWARD.compute_reward(STATE, STATE | {"cost_per_hour": 900.0})
    assert parts == pytest.approx({"cost": 0.3, "performance": 0.15, "reliability": 0.5, "efficiency": 1.0})
    assert total == pytest.approx(0.3 * 0.3 + 0.3 * 0.15 + 0.25 * 0.5 + 0.15)
    weights = RewardWeights(cost=1, performance=0, reliability=0, efficiency=0)
    assert InfrastructureRewardFunction(weights=weights).compute_reward(STATE, STATE)[0] == pytest.approx(0.1)
    other, _ = REWARD.compute_reward(STATE | {"target_throughput": 2000.0}, STATE)
    assert other < REWARD.compute_reward(STATE, STATE)[0]


def test_many_rows_are_each_row_alone() -> None:
    drawn = np.random.default_rng(0)
    rows = [{key: value * drawn.uniform(0, 2) for key, value in STATE.items()} for _ in range(200)]
    before, after = rows[:100], rows[100:]
    stacked = [{key: np.array([row[key] for row in part]) for key in STATE} for part in (after, before)]
    totals, parts = REWARD.compute_reward(*stacked)
    for index, pair in enumerate(zip(after, before, strict=True)):
        total, alone = REWARD.compute_reward(*pair)
        assert isinstance(total, float)
        assert totals[index] == pytest.approx(total)
        assert {name: part[index] for name, part in parts.items()} == pytest.approx(alone)


def test_bad_states_and_weights_are_refused() -> None:
    state = {("error_rate" if key == "error_rate_percent" else key): value for key, value in STATE.items()}
    with pytest.raises(
        ConfigurationError, match=r"has no 'error_rate_percent' \(did you mean 'error_rate'\?\)"
    ):
        REWARD.compute_reward(state, state)
    with pytest.raises(ConfigurationError, match=r"cost must not be negative, got -1"):
        RewardWeights(cost=-1)
    with pytest.raises(ConfigurationError, match=r"cost_baseline must be positive, got 0"):
        InfrastructureRewardFunction(cost_baseline=0)
    with pytest.raises(
        ConfigurationError, match=r"a bound of sla must be one of latency_p99_ms, .* got 'p99'"
    ):
        InfrastructureRewardFunction(sla={"p99": 100})
    assert InfrastructureRewardFunction(sla={"latency_p99_ms": 100}).compute_performance_reward(
        100, 900, 1000
    ) == pytest.approx(0)


# ------------------------------------------------------------------------------------------ shaping


def test_what_shaping_adds_sums_to_minus_the_first_potential() -> None:
    drawn = np.random.default_rng(1)
    for length in (1, 2, 40):
        rewards, potentials = drawn.normal(size=length), drawn.normal(size=length + 1)
        shaper = RewardShaper(gamma=0.9)
        added = [
            shaper.shape(rewards[k], potentials[k], potentials[k + 1], terminal=k == length - 1) - rewards[k]
            for k in range(length)
        ]
        assert sum(0.9**k * value for k, value in enumerate(added)) == pytest.approx(-potentials[0])
        assert shaper.num_clipped == 0


def test_shaping_leaves_the_best_policy_of_a_small_problem() -> None:
    """Two states, two actions: staying earns .1 for three steps, leaving earns .25 and ends."""
    potential = {"in": 0.7, "out": 0.0}

    def earned(leave_at: int, **options: bool) -> float:
        shaper, total = RewardShaper(gamma=0.9, **options), 0.0
        for step in range(3):
            leaves = step == leave_at
            reward = 0.25 if leaves else 0.1
            ends = leaves or step == 2
            total += 0.9**step * shaper.shape(reward, potential["in"], potential["in"], terminal=ends)
            if ends:
                break
        return total

    plain = {0: 0.25, 1: 0.1 + 0.9 * 0.25, 2: 0.1 + 0.09 + 0.81 * 0.25, 3: 0.1 + 0.09 + 0.081}
    for leave_at, expected in plain.items():
        assert earned(leave_at) == pytest.approx(expected - 0.7)
    assert max(plain, key=earned) == max(plain, key=plain.__getitem__) == 2
    bent = {leave_at: earned(leave_at, normalize=True) for leave_at in plain}
    assert bent != pytest.approx({leave_at: value - 0.7 for leave_at, value in plain.items()})


def test_rewards_are_bounded_and_scores_are_of_the_last_thousand() -> None:
    shaper = RewardShaper()
    assert [shaper.shape(reward, 0, 0) for reward in (9, 11, -1000)] == [9, 10, -10]
    assert shaper.num_clipped == 2
    assert RewardShaper(clip_range=None).shape(11, 0, 0) == 11
    scored = RewardShaper(normalize=True)
    found = [scored.shape(reward, 0, 0) for reward in [1e6, *np.tile([1.0, 3.0], 600)]]
    assert found[-2:] == pytest.approx([-1, 1], abs=1e-3)  # the first one is forgotten


def test_the_potential_by_hand_and_what_is_refused() -> None:
    assert RewardShaper.compute_potential(STATE) == pytest.approx(-0.16 - 0.5 - 0.0)
    with pytest.raises(ConfigurationError, match="the state has no 'latency_p99_ms'"):
        RewardShaper.compute_potential({"cpu_percent": 1, "memory_percent": 1, "error_rate_percent": 0})
    with pytest.raises(ConfigurationError, match="potential_next must be finite, got nan"):
        RewardShaper().shape(0, 0, math.nan)
    with pytest.raises(ConfigurationError, match="gamma must be above 0"):
        RewardShaper(gamma=0)
    with pytest.raises(ConfigurationError, match="clip_range must rise"):
        RewardShaper(clip_range=(1, -1))
