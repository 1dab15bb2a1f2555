"""Verdicts on paired results: signs counted by hand, and what more data may do to them."""

from __future__ import annotations

import random

import pytest

from stateset_agents.algorithms import paired
from stateset_agents.algorithms.intervals import wilson
from stateset_agents.algorithms.paired import paired_rewards, paired_shares, shares_interval, sign_flip_p


def test_with_one_try_the_signs_are_mcnemar_s_exact_test() -> None:
    def won_and_lost(wins: int, losses: int) -> float:
        return sign_flip_p([1.0] * wins + [-1.0] * losses + [0.0] * 7)

    assert won_and_lost(9, 1) == won_and_lost(1, 9) == pytest.approx(2 * 11 / 1024)
    assert won_and_lost(5, 5) == won_and_lost(0, 0) == 1.0
    assert won_and_lost(6, 0) == 2 / 64
    assert won_and_lost(1500, 1200) == pytest.approx(8.3e-9, rel=0.05)


def test_signs_of_differences_of_several_sizes_are_counted_out() -> None:
    # of the 16 sums of +-1 +-1/2 +-1/4 +-1/4 those of 2, 3/2 (twice) and their negatives are as far as 3/2
    assert sign_flip_p([1.0, 0.5, -0.25, 0.25]) == 6 / 16
    thirds = [1 / 3, 2 / 3, -1 / 3]  # 3 of 3 tries, and one that failed: 2, 4, -2 of 6 steps
    assert sign_flip_p(thirds) == 6 / 8
    assert sign_flip_p([40 * value for value in thirds]) == 6 / 8  # rewards of any size


@pytest.mark.parametrize("n", [20, 60, 300])
def test_the_saddlepoint_agrees_with_the_count(n: int) -> None:
    draw = random.Random(n)
    for shift in (0.1, 0.3, 0.6):
        steps = [round(50 * draw.gauss(shift, 1)) for _ in range(n)]
        weights, observed = [abs(step) for step in steps if step], abs(sum(steps))
        counted = paired._chance_of_sum(weights, (sum(weights) - observed) // 2)
        assert paired._saddlepoint_tail(weights, observed) == pytest.approx(counted, rel=0.05, abs=1e-5)


@pytest.mark.parametrize("tries", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [6, 12, 20, 58, 600])
def test_perfect_separation_is_better_whatever_the_number_of_tries(n: int, tries: int) -> None:
    result = paired_shares([1.0] * n)
    assert (result.verdict, result.p_value) == ("better", 2 / 2**n)
    low, _ = wilson(n, n)
    assert result.interval == (pytest.approx(2 * low - 1), 1.0)
    assert paired_shares([*[1.0] * (n - 1), 1 - 1 / tries / 2]).verdict == "better"  # one 7/8 among 8/8


def test_five_scenarios_are_never_enough_and_the_line_says_how_many_are() -> None:
    result = paired_shares([1.0] * 5)
    assert (result.verdict, result.reason) == ("unclear", "5 of 5 scenarios differ, at least 6 must")
    assert result.interval == (0.0, 1.0)
    assert paired_shares([0.0] * 60).reason == "0 of 60 scenarios differ, at least 6 must"
    assert paired_shares([1.0, -1.0] * 6).reason == "random signs give as much in 100% of the cases"
    with pytest.raises(ValueError, match="between -1 and 1"):
        paired_shares([1.5])
    with pytest.raises(ValueError, match="at least one"):
        paired_shares([])


def test_more_data_never_weakens_a_verdict_where_no_scenario_disagrees() -> None:
    draw = random.Random(0)
    for _ in range(300):
        n, tries = draw.randint(6, 25), draw.choice([1, 2, 4, 8])
        wins = [draw.choice([0, 0, 1, tries]) for _ in range(n)]
        before = paired_shares([won / tries for won in wins])
        another_try = paired_shares([(won + draw.randint(0, 1)) / (tries + 1) for won in wins])
        another_scenario = paired_shares([*(won / tries for won in wins), draw.randint(0, tries) / tries])
        for after in (another_try, another_scenario):
            assert after.p_value <= before.p_value
            assert before.verdict == "unclear" or after.verdict == "better"


def test_an_interval_lies_beside_0_exactly_where_the_verdict_says_so() -> None:
    draw = random.Random(1)
    seen = set()
    for _ in range(500):
        n, tries = draw.randint(1, 30), draw.choice([1, 2, 4, 8])
        chance = draw.random()
        differences = [
            (sum(draw.random() < chance for _ in range(tries)) - draw.randint(0, tries)) / tries
            for _ in range(n)
        ]
        for result in (paired_shares(differences), paired_rewards([5 * d for d in differences])):
            seen.add(result.verdict)
            if result.interval is None:
                continue
            low, high = result.interval
            assert low <= result.mean + 1e-9
            assert result.mean <= high + 1e-9
            assert (low > 0) == (result.verdict == "better")
            assert (high < 0) == (result.verdict == "worse")
    assert seen == {"better", "worse", "unclear"}


def test_an_interval_of_shares_counts_what_no_scenario_has_shown() -> None:
    # none of n differs: a mean of t needs t n that do, so t n <= 1.96 sqrt(n t (1 - t)): Wilson's of 0 of n
    low, high = shares_interval([0.0] * 60)
    assert (low, high) == pytest.approx((-wilson(0, 60)[1], wilson(0, 60)[1]))
    # 1 of 8 tries more in every scenario: the mean is hardly known better than its size
    low, high = shares_interval([0.125] * 6)
    assert low < 0.06
    assert high > 0.3
    opposite = shares_interval([-0.125] * 6)
    assert opposite == pytest.approx((-high, -low))


def test_a_verdict_on_rewards_needs_twenty_scenarios_and_says_what_is_missing() -> None:
    apart = [0.4, 0.5, 0.6, 0.5]
    assert paired_rewards(apart * 5).verdict == "better"
    assert paired_rewards([-value for value in apart * 5]).verdict == "worse"
    assert paired_rewards(apart * 4 + [0.0] * 40).reason == "16 of 56 scenarios differ, at least 20 must"
    assert paired_rewards([1.0, -1.0] * 10).reason == "random signs give as much in 100% of the cases"
    # signs say 2 %, but skewed differences do so more often
    skewed = [0.2] * 40 + [-0.2] * 19 + [-2.0]
    assert paired_rewards(skewed).verdict == "unclear"
    assert paired_rewards([*[0.1] * 59, 40.0]).verdict == "better"  # no scenario disagrees


def test_the_same_reward_more_everywhere_is_better_without_an_interval() -> None:
    result = paired_rewards([0.25] * 20)
    assert (result.verdict, result.interval, result.mean) == ("better", None, 0.25)
    assert paired_rewards([0.0] * 20).verdict == "unclear"


@pytest.mark.parametrize("n", [300, 1000, 3000])
def test_a_sum_next_to_nothing_is_about_even(n: int) -> None:
    """Near 0 the saddlepoint's two terms cancel, and rounding made chances of less than none of them."""
    dice = random.Random(n)
    for step in (1, 2, 3):
        weights = [dice.randrange(1, 1680) for _ in range(n)]
        assert 0.49 < paired._saddlepoint_tail(weights, step) <= 0.5
