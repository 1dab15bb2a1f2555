"""Sizes of groups: by a label, and by success at a fixed number of conversations."""

from __future__ import annotations

import random

import pytest

from stateset_agents.algorithms.group_sizes import (
    LARGEST,
    SMALLEST,
    adaptive_group_size,
    group_sizes,
    mixed_probability,
    success_group_size,
)
from stateset_agents.types.errors import ConfigurationError


def test_labels_have_the_sizes_of_the_table():
    labels = ("easy", "medium", "hard", "unknown", None, 3, ["easy"])
    assert [adaptive_group_size(label) for label in labels] == [6, 8, 12, 8, 8, 8, 8]
    assert [adaptive_group_size(label, base_size=4) for label in labels[:3]] == [3, 4, 6]
    assert adaptive_group_size("easy", base_size=1) == 1
    assert [adaptive_group_size(label, 6) for label in labels[:3]] == [4, 6, 9]  # 4.5 is cut off
    with pytest.raises(ConfigurationError, match="must be at least 1, got 0"):
        adaptive_group_size("easy", base_size=0)


@pytest.mark.parametrize(
    ("success", "size", "mixed"),
    [
        *((0.9, 6, 0.47), (0.9, 8, 0.57), (0.5, 6, 0.97), (0.1, 8, 0.57), (0.1, 12, 0.72)),
        *((0.05, 8, 0.34), (0.05, 12, 0.46), (0.02, 16, 0.28)),
    ],
)
def test_how_often_a_group_is_mixed(success, size, mixed):
    assert mixed_probability(success, size) == pytest.approx(mixed, abs=0.005)


def test_a_group_is_mixed_as_often_as_it_is_drawn_so():
    generator = random.Random(0)
    drawn = [sum(generator.random() < 0.8 for _ in range(6)) for _ in range(20_000)]
    share = sum(0 < successes < 6 for successes in drawn) / len(drawn)
    assert share == pytest.approx(mixed_probability(0.8, 6), abs=0.01)


@pytest.mark.parametrize(
    ("success", "size"), [(0.5, 4), (0.7, 5), (0.8, 8), (0.9, 16), (0.98, 16), (1.0, 16)]
)
def test_the_rule_is_the_same_for_success_and_failure(success, size):
    assert success_group_size(success) == success_group_size(1 - success) == size
    assert size == SMALLEST or mixed_probability(success, size - 1) < 0.8
    assert size == LARGEST or mixed_probability(success, size) >= 0.8


def test_a_rate_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match=r"lies between 0 and 1, got 1\.5"):
        success_group_size(1.5)


def expected(successes, sizes):
    """Groups that are mixed, on average."""
    return sum(map(mixed_probability, successes, sizes))


def test_sizes_keep_the_budget_and_mix_more_groups_than_eight_each():
    successes = [0.5, 0.6, 0.7, 0.9, 0.9, 0.95, 0.3, 0.2]
    sizes = group_sizes(successes, 64)
    assert sizes == [5, 6, 7, 11, 11, 8, 7, 9]
    assert sum(sizes) == 64
    assert expected(successes, [8] * 8) == pytest.approx(6.167, abs=0.001)
    assert expected(successes, sizes) == pytest.approx(6.296, abs=0.001)


def test_more_groups_are_mixed_when_they_are_drawn_too():
    generator = random.Random(0)
    successes = [0.5, 0.5, 0.5, 0.9, 0.9, 0.9, 0.1, 0.1]
    sizes = group_sizes(successes, 64)

    def mixed(size, success):
        return 0 < sum(generator.random() < success for _ in range(size)) < size

    steps = 2000
    by_size = sum(mixed(*each) for _ in range(steps) for each in zip(sizes, successes, strict=True))
    fixed = sum(mixed(8, success) for _ in range(steps) for success in successes)
    gain = expected(successes, sizes) - expected(successes, [8] * 8)
    assert gain == pytest.approx(0.206, abs=0.001)
    assert (by_size - fixed) / steps == pytest.approx(gain, abs=0.12)


def test_no_fixed_size_mixes_more_and_the_budget_is_kept():
    generator = random.Random(1)
    for _ in range(200):
        number = generator.randint(1, 12)
        base = generator.randint(SMALLEST, LARGEST)
        successes = [generator.random() for _ in range(number)]
        sizes = group_sizes(successes, number * base)
        assert sum(sizes) == number * base
        assert set(sizes) <= set(range(SMALLEST, LARGEST + 1))
        assert expected(successes, sizes) >= expected(successes, [base] * number) - 1e-12


def test_no_other_sizes_mix_more():
    successes, budget = [0.5, 0.8, 0.95], 24
    every = [
        (one, two, budget - one - two)
        for one in range(SMALLEST, LARGEST + 1)
        for two in range(SMALLEST, LARGEST + 1)
        if SMALLEST <= budget - one - two <= LARGEST
    ]
    best = max(expected(successes, sizes) for sizes in every)
    assert expected(successes, group_sizes(successes, budget)) == pytest.approx(best)


def test_equal_successes_share_alike():
    assert group_sizes([0.5] * 4, 32) == [8, 8, 8, 8]
    assert group_sizes([0.9, 0.9], 16) == [8, 8]


@pytest.mark.parametrize("budget", [7, 33])
def test_a_budget_that_no_sizes_make_is_refused(budget):
    with pytest.raises(ConfigurationError, match=f"2 groups of 4 to 16 members cannot make {budget}"):
        group_sizes([0.5, 0.5], budget)
