"""Advantages of rewards made of parts, by numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from stateset_agents.algorithms.advantages import decoupled_advantages, group_advantages, summed_advantages

PLAIN = {"baseline": "group_mean", "scaling": "population"}
UNSCALED = {"baseline": "group_mean", "scaling": "none"}


def test_who_leads_in_two_parts_is_told_from_who_leads_in_one():
    """Two groups of two: in the first the second member has one part more, in the second it has both."""
    parts = {"format": [[0.0, 1.0], [0.0, 1.0]], "answer": [[0.0, 0.0], [0.0, 1.0]]}
    summed_first = group_advantages([[0.0, 1.0], [0.0, 2.0]])
    for group in summed_first:  # both alike
        assert group == pytest.approx([-1.0, 1.0])
    weights = {"format": 1.0, "answer": 1.0}
    summed = summed_advantages(parts, weights, **PLAIN)
    assert summed[0] == pytest.approx([-1.0, 1.0])
    assert summed[1] == pytest.approx([-2.0, 2.0])
    # the deviation over the batch is sqrt((1 + 1 + 4 + 4) / 4) = 1.5811
    scaled = decoupled_advantages(parts, weights, **PLAIN)
    assert scaled[0] == pytest.approx([-0.632456, 0.632456], abs=1e-6)
    assert scaled[1] == pytest.approx([-1.264911, 1.264911], abs=1e-6)


def test_each_part_is_divided_by_its_own_deviation_and_then_weighted():
    """format [1, 1, 0, 0]: mean .5, deviation .5 -> [1, 1, -1, -1]; length [0, 10, 0, 10]: mean 5 and
    deviation 5 -> [-1, 1, -1, 1], its scale is gone. Times 1 and .5: [.5, 1.5, -1.5, -.5], whose
    deviation is sqrt(1.25)."""
    parts = {"format": [[1.0, 1.0, 0.0, 0.0]], "length": [[0.0, 10.0, 0.0, 10.0]]}
    weights = {"format": 1.0, "length": 0.5}
    assert summed_advantages(parts, weights, **PLAIN)[0] == pytest.approx([0.5, 1.5, -1.5, -0.5])
    expected = [value / math.sqrt(1.25) for value in (0.5, 1.5, -1.5, -0.5)]
    assert decoupled_advantages(parts, weights, **PLAIN)[0] == pytest.approx(expected)


def test_a_part_that_does_not_apply_adds_nothing_and_moves_no_mean():
    parts = {"format": [[1.0, 0.0, None]], "answer": [[None, 1.0, None]]}
    summed = summed_advantages(parts, {"format": 1.0, "answer": 2.0}, **UNSCALED)
    assert summed == [[0.5, -0.5, None]]  # an answer alone has none to be compared with


def test_the_sample_deviation_is_the_groups_too():
    # [1, 0]: deviation with ddof 1 is .7071
    summed = summed_advantages({"format": [[1.0, 0.0]]}, {"format": 1.0}, **{**PLAIN, "scaling": "sample"})
    assert summed[0] == pytest.approx([0.707106, -0.707106], abs=1e-5)


def test_groups_that_tie_in_every_part_get_exactly_zero():
    parts = {"format": [[1.0, 1.0], [0.0, 0.0]], "answer": [[0.3, 0.3], [0.1, 0.1]]}
    assert decoupled_advantages(parts, {"format": 1.0, "answer": 1.0}, **PLAIN) == [[0.0, 0.0], [0.0, 0.0]]


def test_groups_of_unequal_size_have_their_own_mean():
    parts = {"answer": [[1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]}
    summed = summed_advantages(parts, {"answer": 1.0}, **UNSCALED)
    assert summed == [[0.5, -0.5], [0.75, -0.25, -0.25, -0.25]]
