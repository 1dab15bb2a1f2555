"""Wilson's interval against published numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.evaluation.intervals import crossed_interval, mean_interval


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
    low, high = crossed_interval(same)
    expected = mean_interval(same[0])
    assert (low, high) == (pytest.approx(expected[0], abs=0.05), pytest.approx(expected[1], abs=0.05))
    apart = [[0.0] * 40, [1.0] * 40, [0.0] * 40, [1.0] * 40]  # scenarios agree: chance of seeds
    assert crossed_interval(apart) == (0.0, 1.0)
    assert crossed_interval([[0.5] * 3] * 2) == (0.5, 0.5)
    assert crossed_interval(same) == (low, high)
    for wrong in ([], [[]], [[1.0], [1.0, 2.0]]):
        with pytest.raises(ValueError, match="rows of one length"):
            crossed_interval(wrong)
