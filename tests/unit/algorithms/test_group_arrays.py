"""The array forms give the lists' numbers, for numpy and torch, whatever stands in masked slots."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.algorithms.advantages import (
    branch_credit,
    group_advantages,
    per_turn_group_credit,
    turn_gae,
    zero_variance_fraction,
)
from stateset_agents.algorithms.group_arrays import (
    branch_credit_array,
    deviation_array,
    gae_array,
    group_advantages_array,
    returns_to_go_array,
    sibling_credit_array,
    tied_groups_array,
)
from stateset_agents.types.errors import ConfigurationError

REWARDS = st.integers(-40, 40).map(lambda eighths: eighths / 8)
"""Exact in binary, so that a group ties in the lists and in the arrays alike."""
GAMMAS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def close(array, expected):
    return np.allclose(np.asarray(array), np.asarray(expected), rtol=1e-12, atol=1e-12)


def filled(groups, size):
    """[groups][members or None] -> values and mask, NaN where masked."""
    values = np.array([[math.nan if value is None else value for value in group] for group in groups])
    return values.reshape(len(groups), size), ~np.isnan(values.reshape(len(groups), size))


@st.composite
def scored_groups(draw):
    size = draw(st.integers(1, 5))
    member = st.one_of(REWARDS, st.none())
    return draw(st.lists(st.lists(member, min_size=size, max_size=size), min_size=1, max_size=4)), size


@given(
    scored_groups(),
    st.sampled_from(["group_mean", "leave_one_out"]),
    st.sampled_from(["population", "sample", "batch", "none"]),
    st.sampled_from([None, 0.0, 0.5]),
)
def test_group_advantages_are_the_lists(groups_and_size, baseline, scaling, eps):
    groups, size = groups_and_size
    values, mask = filled(groups, size)
    expected = group_advantages(groups, baseline=baseline, scaling=scaling, eps=eps)
    expected = [[0.0 if value is None else value for value in group] for group in expected]
    got = group_advantages_array(values, mask, baseline=baseline, scaling=scaling, eps=eps)
    assert close(got, expected)
    tensors = torch.from_numpy(values), torch.from_numpy(mask)
    assert close(group_advantages_array(*tensors, baseline=baseline, scaling=scaling, eps=eps), expected)
    tied = tied_groups_array(values, mask)[mask.any(axis=1)]
    assert (tied.mean() if len(tied) else 0.0) == zero_variance_fraction(groups)


def test_worked_numbers():
    rewards = np.array([[1.0, 0.0, 0.5, 1.0], [2.0, 2.0, 2.0, 7.0]])
    mask = np.array([[True] * 4, [True, True, True, False]])
    got = group_advantages_array(rewards, mask)
    assert got[0] == pytest.approx([0.905, -1.508, -0.302, 0.905], abs=1e-3)
    assert got[1].tolist() == [0.0] * 4
    assert deviation_array(np.array([1.0, 3.0, 100.0]), np.array([True, True, False])) == 1.0
    assert returns_to_go_array(np.array([1.0, 0.0, 2.0]), gamma=0.5).tolist() == [1.5, 1.0, 2.0]
    credit = sibling_credit_array(
        np.array([[[1.0, 0.0]], [[2.0, math.nan]]]), np.array([[[True, True]], [[True, False]]])
    )
    assert credit[:, 0].tolist() == [[3.0, -3.0], [2.0, 0.0]]


@st.composite
def episodes(draw):
    """Groups of episodes of unequal lengths, [groups][members][steps], and the longest length."""
    size = draw(st.integers(1, 4))
    episode = st.lists(REWARDS, min_size=0, max_size=5)
    groups = draw(st.lists(st.lists(episode, min_size=size, max_size=size), min_size=1, max_size=3))
    return groups, size


def as_arrays(groups, size):
    """[T, groups, G] rewards with NaN beyond each end, and the mask."""
    longest = max((len(member) for group in groups for member in group), default=0) or 1
    rewards = np.full((longest, len(groups), size), math.nan)
    for g, group in enumerate(groups):
        for m, member in enumerate(group):
            rewards[: len(member), g, m] = member
    return rewards, ~np.isnan(rewards)


def from_lists(credit, shape):
    """[groups][members][steps or None] -> [T, groups, G]."""
    array = np.zeros(shape)
    for g, group in enumerate(credit):
        for m, member in enumerate(group):
            array[: len(member or ()), g, m] = member or ()
    return array


@given(episodes(), GAMMAS)
def test_sibling_credit_is_the_lists(groups_and_size, gamma):
    groups, size = groups_and_size
    rewards, mask = as_arrays(groups, size)
    lists = [[member or None for member in group] for group in groups]
    expected = from_lists([per_turn_group_credit(group, gamma=gamma) for group in lists], rewards.shape)
    assert close(sibling_credit_array(rewards, mask, gamma=gamma), expected)
    tensors = torch.from_numpy(rewards), torch.from_numpy(mask)
    assert close(sibling_credit_array(*tensors, gamma=gamma), expected)


@given(episodes(), GAMMAS, st.data())
def test_branch_credit_is_the_lists(groups_and_size, gamma, data):
    groups, size = groups_and_size
    rewards, mask = as_arrays(groups, size)
    returns = st.lists(REWARDS, max_size=3)
    branches = [[[data.draw(returns) for _ in member] for member in group] for group in groups]
    means, counts = np.full(rewards.shape, math.nan), np.zeros(rewards.shape)
    for g, group in enumerate(branches):
        for m, member in enumerate(group):
            for t, found in enumerate(member):
                counts[t, g, m] = len(found)
                means[t, g, m] = sum(found) / len(found) if found else math.nan
    lists = [[member or None for member in group] for group in groups]
    expected = [branch_credit(group, own, gamma=gamma) for group, own in zip(lists, branches, strict=True)]
    expected = from_lists(expected, rewards.shape)
    assert close(branch_credit_array(rewards, means, counts, mask, gamma=gamma), expected)
    tensors = map(torch.from_numpy, (rewards, means, counts, mask))
    assert close(branch_credit_array(*tensors, gamma=gamma), expected)


@given(episodes(), GAMMAS, st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.data())
def test_gae_is_the_lists(groups_and_size, gamma, lam, data):
    groups, size = groups_and_size
    rewards, mask = as_arrays(groups, size)
    shape = rewards.shape
    values = np.where(mask, np.array(data.draw(st.lists(REWARDS, min_size=8, max_size=8)))[0], math.nan)
    values *= np.arange(1, values.size + 1).reshape(shape)
    ended = np.array(data.draw(st.lists(st.booleans(), min_size=shape[1] * size, max_size=shape[1] * size)))
    ended = ended.reshape(shape[1:])
    final = np.where(ended, math.nan, 3.25)
    expected_advantages, expected_returns = np.zeros(shape), np.zeros(shape)
    for g, group in enumerate(groups):
        for m, member in enumerate(group):
            steps = slice(len(member)), g, m
            found = turn_gae(
                member,
                list(values[steps]),
                gamma=gamma,
                lam=lam,
                terminated=bool(ended[g, m]),
                final_value=3.25,
            )
            expected_advantages[steps], expected_returns[steps] = found.advantages, found.returns
    arrays = {"terminated": ended, "final_values": final}
    got = gae_array(rewards, values, mask, gamma=gamma, lam=lam, **arrays)
    assert close(got.advantages, expected_advantages)
    assert close(got.returns, expected_returns)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    arguments = map(torch.from_numpy, (rewards, values, mask))
    got = gae_array(*arguments, gamma=gamma, lam=lam, **tensors)
    assert close(got.advantages, expected_advantages)


def test_arguments_stay_as_they_are():
    rewards = np.ones((3, 1, 2))
    for compute in (returns_to_go_array, sibling_credit_array):
        compute(rewards, gamma=0.5)
    branch_credit_array(rewards, np.ones_like(rewards), np.ones_like(rewards))
    assert (rewards == 1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_advantages_array(np.ones((1, 2)), baseline="median"), "baseline must be one of"),
        (lambda: group_advantages_array(np.ones((1, 2)), scaling="std"), "scaling must be one of"),
        (lambda: sibling_credit_array(np.ones((1, 1, 2)), gamma=1.5), "gamma must lie between 0 and 1"),
    ],
)
def test_an_unknown_choice_is_refused(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()
