"""Group baselines and per-turn credit against hand-worked numbers and exact enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.algorithms.advantages import (
    BASELINES,
    broadcast_turns,
    group_advantages,
    per_turn_group_credit,
    returns_to_go,
    standardized,
    zero_variance_fraction,
)
from stateset_agents.types.errors import ConfigurationError, RewardFailure

SCALINGS = ["population", "sample", "batch", "none"]
EVERY_CHOICE = [(baseline, scaling) for baseline in BASELINES for scaling in SCALINGS]

rewards_of_a_group = st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=6)


# ---------------------------------------------------------------------------------- whole groups


@pytest.mark.parametrize(
    ("baseline", "scaling", "expected", "tolerance"),
    [
        ("group_mean", "population", [0.90453403, -1.50755672, -0.30151134, 0.90453403], 1e-6),
        ("group_mean", "sample", [0.7833, -1.3056, -0.2611, 0.7833], 1e-4),
        ("leave_one_out", "none", [0.5, -0.83333333, -0.16666667, 0.5], 1e-6),
        ("group_mean", "none", [0.375, -0.625, -0.125, 0.375], 1e-12),
        ("group_median", "none", [0.25, -0.75, -0.25, 0.25], 1e-12),
    ],
)
def test_worked_group(baseline, scaling, expected, tolerance):
    (advantages,) = group_advantages([[1, 0, 0.5, 1]], baseline=baseline, scaling=scaling)
    assert advantages == pytest.approx(expected, abs=tolerance)


def test_global_mean_compares_with_every_reward_of_the_batch():
    # mean of [0, 1, 1, 2] is 1
    assert group_advantages([[0, 1], [1, 2]], baseline="global_mean", scaling="none") == [[-1, 0], [0, 1]]


def test_global_mean_divides_by_the_batch_spread_so_that_a_near_tie_cannot_explode():
    near_tie, spread_out = group_advantages([[1, 1 - 1e-6], [0, 0, 1, 0]], baseline="global_mean")
    assert max(abs(value) for value in (*near_tie, *spread_out)) < math.sqrt(6)


def test_batch_scaling_divides_by_the_spread_of_all_scored_rewards():
    # rewards 0, 2, 2, 4: population deviation sqrt(2)
    advantages = group_advantages([[0, 2, None], [2, 4]], scaling="batch", eps=0)
    half = 1 / math.sqrt(2)
    assert advantages[0][2] is None
    assert advantages[0][:2] + advantages[1] == pytest.approx([-half, half, -half, half])


def test_eps_stands_outside_the_root():
    assert group_advantages([[0, 2]], eps=1.0) == [[-0.5, 0.5]]
    assert group_advantages([[0, 2]], scaling="sample", eps=0)[0] == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.parametrize(("baseline", "scaling"), EVERY_CHOICE)
@pytest.mark.parametrize("tie", [[0.1, 0.1, 0.1], [0.7], [0.3, None, 0.3]])
def test_ties_and_singletons_get_exactly_zero(baseline, scaling, tie):
    untied_groups = [tie] if baseline == "global_mean" else [[0.0, 1.0]]
    advantages, *_ = group_advantages([tie, *untied_groups], baseline=baseline, scaling=scaling)
    assert advantages == [None if reward is None else 0.0 for reward in tie]


@pytest.mark.parametrize("scaling", ["population", "sample", "batch", "none"])
def test_a_tied_group_is_better_or_worse_than_the_rest_of_the_batch_under_global_mean(scaling):
    # mean of [1, 1, 0, 1, 0] is .6
    tied, untied = group_advantages(
        [[1.0, None, 1.0], [0.0, 1.0, 0.0]], baseline="global_mean", scaling=scaling
    )
    assert tied[1] is None
    assert tied[0] == tied[2] == untied[1]
    assert tied[0] == pytest.approx(-untied[0] * 2 / 3)
    if scaling == "none":
        assert tied[0] == pytest.approx(0.4)


@pytest.mark.parametrize(("baseline", "scaling"), EVERY_CHOICE)
def test_unscored_members_get_no_advantage_and_move_nobody(baseline, scaling):
    without = group_advantages([[1, 0, 0.5], [0, 2]], baseline=baseline, scaling=scaling)
    with_them = group_advantages(
        [[1, None, 0, 0.5], [None, 0, 2], [None]], baseline=baseline, scaling=scaling
    )
    assert with_them == [
        [without[0][0], None, *without[0][1:]],
        [None, *without[1]],
        [None],
    ]


def test_an_empty_batch_and_an_empty_group_are_no_problem():
    assert group_advantages([]) == []
    assert group_advantages([[], [0, 1]], scaling="none") == [[], [-0.5, 0.5]]


@settings(deadline=None)
@given(st.lists(rewards_of_a_group, min_size=1, max_size=4), st.sampled_from(EVERY_CHOICE))
def test_reversing_members_and_groups_reverses_the_advantages_bit_for_bit(rewards, choice):
    baseline, scaling = choice
    forward = group_advantages(rewards, baseline=baseline, scaling=scaling)
    backward = group_advantages([group[::-1] for group in rewards[::-1]], baseline=baseline, scaling=scaling)
    assert [group[::-1] for group in backward[::-1]] == forward


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=12))
def test_scaled_advantages_sum_to_zero_and_stay_below_the_root_of_group_size_less_one(rewards):
    (advantages,) = group_advantages([rewards])
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    assert max(map(abs, advantages)) <= math.sqrt(len(rewards) - 1) + 1e-9


def test_rewards_too_close_to_have_a_spread_count_as_a_tie():
    assert group_advantages([[0.0, 1e-200]], eps=0.0) == [[0.0, 0.0]]


def test_advantages_can_be_bounded():
    assert group_advantages([[0.0] * 15 + [1.0]], clip=3.0)[0][-1] == 3.0
    assert group_advantages([[0.0] * 15 + [1.0]])[0][-1] == pytest.approx(math.sqrt(15))


def test_zero_variance_fraction_counts_groups_that_teach_nothing():
    assert zero_variance_fraction([[1, 1], [0, 1], [0.5], [None, None]]) == pytest.approx(2 / 3)
    assert zero_variance_fraction([[None]]) == 0.0


@pytest.mark.parametrize(
    "options",
    [{"baseline": "mean"}, {"scaling": "std"}, {"eps": -1.0}, {"clip": 0.0}],
)
def test_unknown_choices_are_refused_by_name(options):
    with pytest.raises(ConfigurationError, match=str(next(iter(options.values())))):
        group_advantages([[0, 1]], **options)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad):
    with pytest.raises(RewardFailure, match="finite"):
        group_advantages([[0.0, bad]])


def test_standardized_values_have_mean_zero_and_deviation_one():
    assert standardized([1.0, 3.0], eps=0) == [-1.0, 1.0]
    assert standardized([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


# ------------------------------------------------------------------------------ credit per turn


def test_returns_to_go_discount_per_turn():
    assert returns_to_go([1, 0, 2]) == [3, 2, 2]
    assert returns_to_go([1, 0, 2], gamma=0.5) == [1.5, 1, 2]


def test_a_turn_is_compared_with_the_siblings_that_reached_it():
    credit = per_turn_group_credit([[1, 2], [0], None, [0, 1, 5]])
    # returns to go: [3, 2], [0], [6, 6, 5]; nobody else reached a third turn
    assert credit == [[3 - 3, 2 - 6], [0 - 4.5], None, [6 - 1.5, 6 - 2, 5 - 0]]


def test_a_lone_member_keeps_its_return():
    assert per_turn_group_credit([[1, 2], None]) == [[3, 2], None]


def test_per_turn_credit_of_one_turn_conversations_is_leave_one_out():
    rewards = [1, 0, 0.5, 1]
    credit = per_turn_group_credit([[reward] for reward in rewards])
    (expected,) = group_advantages([rewards], baseline="leave_one_out", scaling="none")
    assert [value for (value,) in credit] == pytest.approx(expected)


def test_turn_credit_is_spread_over_the_turns_tokens():
    assert broadcast_turns([0.5, -1], [2, 1]) == [0.5, 0.5, -1]


# A policy that may go on (reward 1) or stop (reward 0, the end) at each of up to six turns, both with
# probability 1/2. With the logit of "go on" as parameter, J = sum_k p^k and the exact gradient is
# p (1 - p) sum_k k p^(k-1) = .9375.
GO_ON, MOST_TURNS, EXACT = 0.5, 6, 0.9375

Estimator = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float]]]


def _groups(size: int) -> Iterator[tuple[float, list[int]]]:
    """Every multiset of `size` conversations (each the number of times it went on), with its probability."""
    chance = [GO_ON**n * (1 if n == MOST_TURNS else 1 - GO_ON) for n in range(MOST_TURNS + 1)]

    def fill(length: int, left: int) -> Iterator[list[int]]:
        if length == MOST_TURNS:
            yield [left]
            return
        for count in range(left + 1):
            yield from ([count, *tail] for tail in fill(length + 1, left - count))

    for counts in fill(0, size):
        probability = math.factorial(size) * math.prod(
            p**count / math.factorial(count) for p, count in zip(chance, counts, strict=True)
        )
        yield probability, [n for n, count in enumerate(counts) for _ in range(count)]


def _expected_gradient(size: int, estimator: Estimator) -> float:
    """Mean over all possible groups of 1/G sum over members and turns of credit times score."""
    total = 0.0
    for probability, lengths in _groups(size):
        stops = [n < MOST_TURNS for n in lengths]
        rewards = [[1.0] * n + [0.0] * stop for n, stop in zip(lengths, stops, strict=True)]
        scores = [[1 - GO_ON] * n + [-GO_ON] * stop for n, stop in zip(lengths, stops, strict=True)]
        gradient = sum(
            value * score
            for credits, row in zip(estimator(rewards), scores, strict=True)
            for value, score in zip(credits, row, strict=True)
        )
        total += probability * gradient / size
    return total


def _minus_mean_of_the_same_turn(turn_rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    returns = [returns_to_go(rewards) for rewards in turn_rewards]
    alive = [[values[k] for values in returns if k < len(values)] for k in range(MOST_TURNS)]
    return [[value - sum(alive[k]) / len(alive[k]) for k, value in enumerate(values)] for values in returns]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_per_turn_credit_is_unbiased_where_the_policy_chooses_the_length(size):
    assert _expected_gradient(size, per_turn_group_credit) == pytest.approx(EXACT, rel=1e-9)


@pytest.mark.parametrize("size", [2, 8])
def test_centring_each_turn_on_its_own_mean_is_biased(size):
    """What per_turn_group_credit exists to avoid; the probe must be able to see it."""
    assert _expected_gradient(size, _minus_mean_of_the_same_turn) < 0.8 * EXACT


def test_advantage_zero_without_siblings_would_be_biased():
    def zero_when_alone(turn_rewards):
        alive = [sum(k < len(rewards) for rewards in turn_rewards) for k in range(MOST_TURNS)]
        return [
            [value if alive[k] > 1 else 0.0 for k, value in enumerate(credit)]
            for credit in per_turn_group_credit(turn_rewards)
        ]

    assert _expected_gradient(2, zero_when_alone) < 0.8 * EXACT
    assert _expected_gradient(8, zero_when_alone) < 0.98 * EXACT


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-1, 1), st.floats(-5, 5)), min_size=1, max_size=4),
        min_size=2,
        max_size=4,
    ),
    st.floats(-5, 5),
)
def test_potential_shaping_telescopes_away_for_whole_trajectories(conversations, start):
    """r + phi(next) - phi, gamma 1, phi(terminal) 0, one start state: the same advantages as without."""
    plain, shaped = [], []
    for turns in conversations:
        potentials = [start, *(potential for _, potential in turns[1:]), 0.0]
        rewards = [reward for reward, _ in turns]
        plain.append(math.fsum(rewards))
        shaped.append(
            math.fsum(
                reward + after - before
                for reward, before, after in zip(rewards, potentials, potentials[1:], strict=False)
            )
        )
    expected = group_advantages([plain], scaling="none")[0]
    assert group_advantages([shaped], scaling="none")[0] == pytest.approx(expected, abs=1e-9)


def test_potential_shaping_does_change_per_turn_credit():
    assert per_turn_group_credit([[0.5, 0.5], [0, 0]]) != per_turn_group_credit([[0, 1], [0, 0]])
