"""Advantages by part, weights of parts, GAE over a batch: numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stateset_agents.algorithms.group_arrays import gae_array
from stateset_agents.grouping.advantages import (
    GroupAdvantageNormalizer,
    absolute_shares,
    compute_group_advantages_vectorized,
    gae_batch,
    normalise_by_part,
    part_statistics,
    sign_flip_share,
)
from stateset_agents.grouping.partitioner import hierarchical_advantages
from stateset_agents.grouping.partitions import key_parts, quantile_parts
from stateset_agents.grouping.weights import (
    FLOOR,
    PART_WEIGHTS,
    GroupWeightCalculator,
    group_fairness,
    part_weights,
    step_weights,
)
from stateset_agents.types.errors import ConfigurationError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LABELS = np.array([0, 0, 1, 1])


def test_each_part_has_mean_0_and_deviation_1() -> None:
    found = normalise_by_part(np.array([1.0, 3, 100, 300]), LABELS)
    assert found == pytest.approx([-1, 1, -1, 1], abs=1e-7)
    sample = normalise_by_part(np.array([1.0, 3, 100, 300]), LABELS, ddof=1)
    assert sample == pytest.approx(found / np.sqrt(2), abs=1e-7)
    assert normalise_by_part(np.array([1.0, 3, 5, 5]), LABELS, centred=False)[:2].tolist() == [
        pytest.approx(1),
        pytest.approx(3),
    ]


def test_equal_advantages_single_steps_and_masked_ones_get_exactly_0() -> None:
    assert normalise_by_part(np.array([0.1, 0.1, 7.0, 0.3]), np.array([0, 0, 1, 2])).tolist() == [0, 0, 0, 0]
    mask = np.array([True, True, True, False])
    found = normalise_by_part(np.array([1.0, 3, 5, np.nan]), np.array([0, 0, 0, 0]), mask)
    assert found[3] == 0
    assert found[:3] == pytest.approx([-1.2247449, 0, 1.2247449], abs=1e-6)
    assert normalise_by_part(np.zeros(0), np.zeros(0, dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("scale", [1e-2, 1e2])
def test_one_tasks_scale_changes_nothing_by_task_and_everything_without(scale: float) -> None:
    draw = np.random.default_rng(0)
    raw, tasks = draw.normal(size=2000), draw.integers(0, 2, 2000)
    scaled = np.where(tasks == 1, raw * scale, raw)
    nobody = np.zeros(2000, dtype=np.int64)
    assert np.abs(normalise_by_part(scaled, tasks) - normalise_by_part(raw, tasks)).max() < 1e-5
    assert np.abs(normalise_by_part(scaled, nobody) - normalise_by_part(raw, nobody)).max() > 0.5
    shares = absolute_shares(normalise_by_part(scaled, nobody), tasks, 2)
    assert min(shares) < 0.03  # the small one is drowned
    assert min(absolute_shares(normalise_by_part(scaled, tasks), tasks, 2)) > 0.45


def test_quartiles_teach_the_two_armed_bandit_nothing() -> None:
    """Arms pay 0 and 1: each is a quartile of its own, and nobody in it did better than another."""
    rewards = np.tile([0.0, 1.0], 50)
    quartiles = quantile_parts(rewards).labels
    assert not normalise_by_part(rewards, quartiles).any()
    assert normalise_by_part(rewards, np.zeros(100, dtype=np.int64)) == pytest.approx(
        np.tile([-1, 1], 50), abs=1e-7
    )


def test_sign_flips_are_counted_against_the_steps_own_task() -> None:
    raw = np.array([1.0, 2.0, 3.0, 4.0])
    halves = np.array([0, 0, 1, 1])
    assert sign_flip_share(raw, normalise_by_part(raw, halves)) == 0.5  # 2 is pushed up and 3 down
    assert sign_flip_share(raw, normalise_by_part(raw, halves), halves) == 0
    assert sign_flip_share(raw, np.zeros(4)) == 0  # silenced, not flipped
    mask = np.array([True, False, False, True])
    assert sign_flip_share(raw, normalise_by_part(raw, halves), None, mask) == 0


def test_statistics_of_parts() -> None:
    first, empty, second = part_statistics(np.array([1.0, 3, -4]), np.array([0, 0, 2]), 3)
    assert (first.num_steps, first.mean, first.std, first.absolute_share) == (2, 2, 1, 0.5)
    assert empty == (0, 0, 0, 0)
    assert second.absolute_share == 0.5
    assert absolute_shares(np.zeros(2), np.array([0, 1]), 2).tolist() == [0, 0]


def test_the_normalizer_takes_parts_of_columns() -> None:
    advantages = np.array([[1.0, 10.0], [3.0, 30.0]])
    expected = pytest.approx(np.array([[-1, -1], [1, 1]]), abs=1e-7)
    assert GroupAdvantageNormalizer().normalize(advantages, key_parts(["a", "b"])) == expected
    assert GroupAdvantageNormalizer().normalize(advantages, np.array([0, 1])) == expected
    with pytest.raises(ConfigurationError, match="ddof"):
        GroupAdvantageNormalizer(ddof=2)
    with pytest.raises(ConfigurationError, match="one per advantage"):
        normalise_by_part(np.zeros(3), np.zeros(2, dtype=np.int64))


def test_two_scales_are_added_by_their_shares() -> None:
    raw = np.array([1.0, 3, 100, 300])
    whole = np.zeros(4, dtype=np.int64)
    found = hierarchical_advantages(raw, [whole, LABELS], [0.25, 0.75])
    assert found == pytest.approx(
        0.25 * normalise_by_part(raw, whole) + 0.75 * normalise_by_part(raw, LABELS), abs=1e-15
    )
    with pytest.raises(ConfigurationError, match="sum to 1"):
        hierarchical_advantages(raw, [whole, LABELS], [0.5, 0.6])


# ------------------------------------------------------------------------------------------ GAE


def loop_gae(
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    terminated: Bools,
    ended: Bools,
    gamma: float,
    lam: float,
) -> Floats:
    """One row at a time, forward sums of the discounted deltas."""
    number, rows = rewards.shape
    found = np.zeros((number, rows))
    for row in range(rows):
        for start in range(number):
            factor = 1.0
            for step in range(start, number):
                follows = 0.0 if terminated[step, row] else next_values[step, row]
                found[start, row] += factor * (rewards[step, row] + gamma * follows - values[step, row])
                factor *= gamma * lam
                if ended[step, row]:
                    break
    return found


def test_gae_of_a_batch_equals_the_loop() -> None:
    draw = np.random.default_rng(5)
    shape = (40, 7)
    rewards, values, next_values = (draw.normal(size=shape) for _ in range(3))
    ended = draw.random(shape) < 0.1
    terminated = ended & (draw.random(shape) < 0.5)
    found = gae_batch(rewards, values, next_values, terminated, ended, gamma=0.97, lam=0.9)
    expected = loop_gae(rewards, values, next_values, terminated, ended, 0.97, 0.9)
    assert np.abs(found.advantages - expected).max() < 1e-12
    assert np.array_equal(found.returns, found.advantages + values)


def test_gae_of_single_episodes_equals_that_of_groups() -> None:
    draw = np.random.default_rng(6)
    rewards, values, final = draw.normal(size=(9, 4)), draw.normal(size=(9, 4)), draw.normal(size=4)
    ended = np.zeros((9, 4), dtype=bool)
    ended[-1] = True
    is_terminated = np.array([True, False, True, False])
    terminated = ended & is_terminated
    next_values = np.concatenate([values[1:], final[None]])
    ours = gae_batch(rewards, values, next_values, terminated, ended, gamma=0.99, lam=0.95)
    theirs = gae_array(rewards, values, gamma=0.99, lam=0.95, terminated=is_terminated, final_values=final)
    assert np.abs(ours.advantages - theirs.advantages).max() < 1e-12


def test_a_cut_goes_on_by_its_value_and_integers_are_not_cut() -> None:
    one = np.ones((1, 1))
    true, false = np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=bool)
    assert gae_batch(one, 0 * one, 10 * one, false, true, gamma=0.5).advantages.item() == 6
    assert gae_batch(one, 0 * one, 10 * one, true, true, gamma=0.5).advantages.item() == 1
    whole = gae_batch(np.array([[1]]), one * 0.5, one * 0.25, false, true, gamma=1.0)
    assert whole.advantages.item() == 0.75


def test_gae_runs_before_the_parts_are_told_apart() -> None:
    """Masking rewards and values first counts the next state of the other part as worth nothing."""
    rewards = np.array([[0.0, 0.0], [1.0, 0.0]])
    values = np.array([[0.5, 0.5], [0.5, 0.5]])
    dones = np.array([[False, False], [True, True]])
    groups = np.array([[0, 0], [1, 1]])
    found = compute_group_advantages_vectorized(values, rewards, dones, groups, gamma=1.0, lam=1.0)
    assert found == pytest.approx(np.array([[1, -1], [1, -1]]), abs=1e-6)
    masked = [
        compute_group_advantages_vectorized(
            values * (groups == part), rewards * (groups == part), dones, groups, gamma=1.0, lam=1.0
        )
        for part in (0, 1)
    ]
    assert masked[0][0].tolist() == [0, 0]  # both first states look alike


def test_a_cut_without_a_value_to_go_on_by_is_refused() -> None:
    zeros, no = np.zeros((2, 1)), np.zeros((2, 1), dtype=bool)
    with pytest.raises(ConfigurationError, match="next_values is needed: 1 rows"):
        compute_group_advantages_vectorized(zeros, zeros, no, np.zeros(1, dtype=np.int64))
    with pytest.raises(ConfigurationError, match="one shape"):
        gae_batch(zeros, zeros, zeros[:1], no, no)


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("method", PART_WEIGHTS)
def test_weights_are_positive_and_sum_to_1(method: str) -> None:
    draw = np.random.default_rng(7)
    for number in range(1, 9):
        for _ in range(20):
            scores, progress = draw.uniform(-0.5, 1.5, number), draw.random(number)
            weights = part_weights(method, scores, progress)
            assert weights.sum() == pytest.approx(1, abs=1e-12)
            assert weights.min() >= min(FLOOR, 1 / number) - 1e-12


def test_weights_by_hand() -> None:
    assert part_weights("balanced", [0.0, 1.0]).tolist() == [0.5, 0.5]
    assert part_weights("performance", [0.9, 0.4]) == pytest.approx([0.05 + 0.9 / 7, 0.05 + 5.4 / 7])
    assert part_weights("adaptive", [0.5, 0.5], [0.3, 0.1]) == pytest.approx([0.725, 0.275])
    assert part_weights("performance", [1.0, 1.0]).tolist() == [0.5, 0.5]  # all are solved
    assert part_weights("performance", [np.nan, 0.5, 0.0]) == pytest.approx(
        [0.05 + 0.85 * share for share in (0.75 / 2.25, 0.5 / 2.25, 1 / 2.25)]
    )
    with pytest.raises(ConfigurationError, match="did you mean 'balanced'"):
        part_weights("balance", [0.0])


def test_what_moves_and_what_lags_weighs_more() -> None:
    adaptive = GroupWeightCalculator("adaptive", 2)
    assert adaptive.weights([0.0, 0.0]).tolist() == [0.5, 0.5]  # nothing moved yet
    for score in (0.1, 0.2, 0.3):
        weights = adaptive.weights([score, 0.0])
    assert weights.tolist() == pytest.approx([0.95, 0.05])
    again = GroupWeightCalculator("adaptive", 2)
    again.load(adaptive.state())
    assert again.weights([0.3, 0.5]).tolist() == adaptive.weights([0.3, 0.5]).tolist()
    performance = GroupWeightCalculator("performance", 2)
    performance.weights([0.2, 0.8])
    first, second = performance.weights([np.nan, 0.8])  # not met: it keeps its score
    assert first > second
    with pytest.raises(ConfigurationError, match="scores must be 2"):
        performance.weights([0.1])


def test_a_mean_over_steps_becomes_the_weighted_mean_of_the_parts() -> None:
    labels, weights = np.array([0, 0, 0, 1]), np.array([0.3, 0.7])
    factors = step_weights(labels, weights)
    losses = np.array([1.0, 2.0, 3.0, 10.0])
    assert (factors * losses).mean() == pytest.approx(0.3 * 2 + 0.7 * 10)
    assert step_weights(np.zeros(5, dtype=np.int64), np.ones(1)).tolist() == [1.0] * 5
    assert step_weights(np.zeros(5, dtype=np.int64), weights).tolist() == [1.0] * 5  # the other has no step
    assert step_weights(labels, weights, labels == 1).tolist() == [0, 0, 0, 1]


def test_fairness_is_the_worst_by_the_mean() -> None:
    assert group_fairness([0.5, 1.0]) == pytest.approx(2 / 3)
    assert group_fairness([0.0, 1.0]) == 0
    assert group_fairness([0.4, 0.4]) == 1
    assert group_fairness([-1.0, 0.0]) == 0
