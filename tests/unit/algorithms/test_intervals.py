"""Wilson's interval against published numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.algorithms.intervals import (
    crossed_interval,
    interquartile_mean,
    mean_interval,
    share_interval,
    stratified_interval,
    t_quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_nothing_observed_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_share_lies_inside_and_the_mirror_image_is_the_mirror_interval(counts: tuple[int, int]) -> None:
    successes, n = counts
    low, high = wilson(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    other_low, other_high = wilson(n - successes, n)
    assert (1 - other_high, 1 - other_low) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3)])
def test_impossible_counts_are_refused(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="between 0 and n"):
        wilson(successes, n)


def test_an_interval_over_seeds_and_scenarios_knows_both_kinds_of_chance() -> None:
    same = [[1.0, 0.0, 0.0, 1.0] * 10] * 5  # seeds agree: what is left is chance of scenarios
    assert crossed_interval(same) == pytest.approx(mean_interval(same[0]))
    assert crossed_interval(same[:1]) == mean_interval(same[0])
    apart = [[0.0] * 40, [1.0] * 40, [0.0] * 40, [1.0] * 40]  # scenarios agree: chance of seeds
    assert crossed_interval(apart) == pytest.approx(mean_interval([0.0, 1.0, 0.0, 1.0]))
    assert crossed_interval([[0.5] * 3] * 2) is None
    # variances of the means: rows (1, 3) have 2 / 2 = 1, columns (1.5, 2.5) .5 / 2 = .25, each 1 degree of
    # freedom; together 1.25 ** 2 / (1 + .0625) = 1.47, taken as 1: 12.706 * sqrt(1.25) = 14.206 to each side
    assert crossed_interval([[0.5, 1.5], [2.5, 3.5]]) == pytest.approx((2 - 14.206, 2 + 14.206), abs=1e-3)
    for wrong in ([], [[]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="rows of one length"):
            crossed_interval(wrong)


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [  # Abramowitz and Stegun 1964, table 26.10
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 5, 2.571),
        (0.99, 11, 2.718),
        (0.995, 4, 4.604),
        (0.975, 30, 2.042),
        (0.975, 120, 1.980),
    ],
)
def test_student_s_t_has_the_tables_quantiles(probability: float, freedom: float, expected: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=5e-4)
    assert t_quantile(probability, freedom + 0.9) == t_quantile(probability, freedom)


def test_a_mean_of_skewed_values_may_lie_further_on_the_long_side() -> None:
    even = [-2.0, -1.0, 0.0, 1.0, 2.0]  # deviation sqrt(2.5), error sqrt(.5), t 2.776
    assert mean_interval(even) == pytest.approx((-2.776 * 0.5**0.5, 2.776 * 0.5**0.5), abs=1e-3)
    low, high = mean_interval([0.0, 0.0, 0.1, 0.1, 0.2, 5.0]) or (0, 0)
    assert high - 0.9 > 1.5 * (0.9 - low)
    mirrored = mean_interval([0.0, 0.0, -0.1, -0.1, -0.2, -5.0])
    assert mirrored == pytest.approx((-high, -low))


def test_values_without_spread_say_nothing_of_others() -> None:
    assert mean_interval([3.0]) is None
    assert mean_interval([0.1] * 7) is None
    with pytest.raises(ValueError, match="no value"):
        mean_interval([])


def test_shares_of_several_tries_are_wilson_s_with_a_design_effect() -> None:
    assert share_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)  # one try each
    assert share_interval([0.0] * 4) == wilson(0, 4)
    # no spread in four shares of one half: effect (0 * 4 + 2) / (4 + 2), so as 12 scenarios with one try
    assert share_interval([0.5] * 4) == pytest.approx(wilson(6, 12))
    # near 1 only one of twelve differs, by little: effect .25 is seen once, (.25 * 1 + 2) / 3 = .75
    low, high = share_interval([1.0] * 11 + [0.75])
    assert (low, high) == pytest.approx(wilson(11.75 / 0.756, 12 / 0.756), abs=5e-3)
    assert low < 0.8  # the bootstrap said .94


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert interquartile_mean([100, 3, 0, 2, 1]) == 2  # of five values one at each end
    assert interquartile_mean([5, 1, 3]) == 3  # of three none
    assert interquartile_mean([0, 1, 2, 3, 4, 5, 6, 70]) == 3.5
    with pytest.raises(ValueError, match="no value"):
        interquartile_mean([])


@pytest.mark.long
@pytest.mark.parametrize(("runs", "low", "high"), [(3, 0.70, 0.80), (5, 0.80, 0.92), (10, 0.90, 0.96)])
@pytest.mark.parametrize("families", [1, 6])
def test_the_bootstrap_of_few_runs_is_as_narrow_as_the_page_says(
    runs: int, low: float, high: float, families: int
) -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(500):
        # a run's scores are off by what its seed did, and each by something of its own
        of_seeds = [draw.gauss(0, 1) for _ in range(runs)]
        rows = [[shift + draw.gauss(0, 0.5 * (families > 1)) for _ in range(families)] for shift in of_seeds]
        interval = stratified_interval({"": rows}, resamples=400)[1]
        assert interval is not None
        held += interval[0] <= 0 <= interval[1]
    assert low <= held / 500 <= high
