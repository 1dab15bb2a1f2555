"""pass@k and pass^k against counting every choice, and Wilson's interval at other levels."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from stateset_agents.algorithms.intervals import pass_at_k, pass_hat_k, wilson


def test_worked_values():
    assert [pass_at_k(1, 4, k) for k in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert [pass_hat_k(3, 4, k) for k in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    assert pass_at_k(0, 8, 8) == 0.0
    assert pass_hat_k(8, 8, 8) == 1.0


def test_both_are_shares_of_all_choices_of_k():
    for n in range(1, 7):
        for successes, k in product(range(n + 1), range(1, n + 1)):
            tries = [index < successes for index in range(n)]
            choices = list(combinations(tries, k))
            assert pass_at_k(successes, n, k) == pytest.approx(sum(map(any, choices)) / len(choices))
            assert pass_hat_k(successes, n, k) == pytest.approx(sum(map(all, choices)) / len(choices))


def test_both_are_unbiased():
    """The mean over every outcome of six tries at chance p is 1 - (1 - p)^k, and p^k."""
    chance, n, k = 0.3, 6, 3
    at_least_one = all_of_them = 0.0
    for tries in product([0, 1], repeat=n):
        weight = chance ** sum(tries) * (1 - chance) ** (n - sum(tries))
        at_least_one += weight * pass_at_k(sum(tries), n, k)
        all_of_them += weight * pass_hat_k(sum(tries), n, k)
    assert at_least_one == pytest.approx(1 - (1 - chance) ** k)
    assert all_of_them == pytest.approx(chance**k)


@pytest.mark.parametrize("estimate", [pass_at_k, pass_hat_k])
def test_counts_that_cannot_be_are_refused(estimate):
    with pytest.raises(ValueError, match="successes must be between 0 and n, got 5 of 4"):
        estimate(5, 4, 1)
    with pytest.raises(ValueError, match="k must be between 1 and n = 4, got 5"):
        estimate(1, 4, 5)
    with pytest.raises(ValueError, match="k must be between 1 and n = 4, got 0"):
        estimate(1, 4, 0)


def test_more_confidence_asks_for_a_wider_interval():
    low, high = wilson(50, 100)
    assert (low, high) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    assert wilson(50, 100, confidence=0.99) == pytest.approx((0.37528, 0.62472), abs=1e-5)
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 95"):
        wilson(50, 100, confidence=95)
