"""A teacher's word as advantages, by hand."""

from __future__ import annotations

import math

import pytest

from stateset_agents.algorithms.distillation import teacher_advantages, teacher_signal
from stateset_agents.types.errors import ConfigurationError


def test_a_token_that_the_teacher_likes_better_than_the_student_is_raised():
    assert teacher_signal([-1.0, -0.5], [-0.5, -2.0]) == [-0.5, 1.5]


def test_a_token_that_the_teacher_rules_out_counts_twenty_nats():
    assert teacher_signal([-math.inf, -50.0, -1.0], [-1.0, -1.0, -50.0]) == [-20.0, -20.0, 20.0]


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ("token", [1.0, 2.0, 4.0]),
        ("to_go", [7.0, 6.0, 4.0]),
        ("turn_sum", [3.0, 3.0, 4.0]),
        ("turn_mean", [1.5, 1.5, 4.0]),
    ],
)
def test_what_each_token_of_two_turns_gets(credit, expected):
    assert teacher_advantages([1.0, 2.0, 4.0], [2, 1], credit) == expected
    assert teacher_advantages([], [], credit) == []


def test_an_unknown_credit_is_refused():
    with pytest.raises(
        ConfigurationError, match="credit must be token, to_go, turn_sum, turn_mean, got 'turn'"
    ):
        teacher_advantages([1.0], [1], "turn")
