"""Pairs of answers whose relation is known: no different one is accepted, few of the same are refused."""

from __future__ import annotations

import pytest
from math_answer_pairs import KINDS, pairs, score


def check(number: int, seed: int) -> None:
    scores, wrong = score(pairs(number, seed))
    assert [pair for pair in wrong if not pair.is_same] == []
    assert sum(row.false_refusals for row in scores.values()) <= 0.01 * sum(
        row.same for row in scores.values()
    )


def test_no_pair_of_different_answers_is_accepted_and_few_of_the_same_are_refused() -> None:
    check(20 * len(KINDS), seed=0)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_20_000_pairs_are_told_apart(seed: int) -> None:
    check(20_000, seed)
