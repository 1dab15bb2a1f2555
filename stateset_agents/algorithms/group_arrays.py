"""Advantages of many groups at once: the array forms of `advantages` and `branching`, with their numbers.

Control calls it once per update, where lists are a hundred times slower. Arrays are [T, groups, G]: step,
group, member. `mask` has the same shape and is True where the member took that step; a member that took none
is unscored, and its slots get 0. Whatever stands in a masked slot is never read, NaN included.

Every function takes numpy arrays or torch tensors, all of one kind, and gives back the same kind and dtype.
Importing it loads no torch.

    rewards [[1, 2], [0, -]], one group of two members  --sibling_credit_array-->  [[3, 2], [-3, -]]
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from stateset_agents.algorithms.advantages import EPS, Scaling, check_unit
from stateset_agents.types.errors import ConfigurationError

Array = Any
"""A numpy array or a torch tensor."""
ArrayBaseline = Literal["group_mean", "leave_one_out"]
"""See `baselines.BASELINES`."""


class ArrayCredit(NamedTuple):
    """The result of GAE."""

    advantages: Array
    returns: Array
    """Advantage + value: the targets of the value function; 0 in masked slots."""


def group_advantages_array(
    rewards: Array,
    mask: Array | None = None,
    *,
    baseline: ArrayBaseline = "group_mean",
    scaling: Scaling = "population",
    eps: float | None = None,
) -> Array:
    """One advantage per member: `advantages.group_advantages` over [groups, G], with 0 in masked slots.

    A group whose members tie gets exactly 0. Raises ConfigurationError on an unknown choice.
    """
    if baseline not in get_args(ArrayBaseline):
        names = ", ".join(get_args(ArrayBaseline))
        raise ConfigurationError(f"baseline must be one of {names}, got {baseline!r}")
    if scaling not in get_args(Scaling):
        raise ConfigurationError(f"scaling must be one of {', '.join(get_args(Scaling))}, got {scaling!r}")
    xp = _library(rewards)
    mask = _mask(rewards, mask)
    rewards = xp.where(mask, rewards, xp.zeros_like(rewards))
    count = xp.where(mask, xp.ones_like(rewards), xp.zeros_like(rewards)).sum(-1)[..., None]
    mean = rewards.sum(-1)[..., None] / _at_least_one(count)
    centred = xp.where(mask, rewards - mean, xp.zeros_like(rewards))
    margin = EPS[scaling] if eps is None else eps
    if scaling == "none":
        spread: Array = 1.0 + margin
    elif scaling == "batch":
        spread = deviation_array(rewards, mask) + margin
    else:
        ddof = 1 if scaling == "sample" else 0
        spread = ((centred**2).sum(-1)[..., None] / _at_least_one(count - ddof)) ** 0.5 + margin
    if baseline == "leave_one_out":  # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        centred = centred * (count / _at_least_one(count - 1))
    is_tied = tied_groups_array(rewards, mask)[..., None]
    divisor = xp.where(is_tied, xp.ones_like(mean), mean * 0 + spread)
    return xp.where(mask & ~is_tied, centred / divisor, xp.zeros_like(rewards))


def tied_groups_array(rewards: Array, mask: Array | None = None) -> Array:
    """[groups, G] -> [groups] bool: do all scored members tie? A group with one or none does."""
    xp = _library(rewards)
    mask = _mask(rewards, mask)
    infinity = xp.full_like(rewards, float("inf"))
    highest = xp.amax(xp.where(mask, rewards, -infinity), axis=-1)
    lowest = xp.amin(xp.where(mask, rewards, infinity), axis=-1)
    return highest <= lowest


def deviation_array(values: Array, mask: Array | None = None) -> Array:
    """The population deviation of all unmasked values, as a 0-d array; 0 where there is none."""
    xp = _library(values)
    mask = _mask(values, mask)
    values = xp.where(mask, values, xp.zeros_like(values))
    count = _at_least_one(mask.sum())
    centred = xp.where(mask, values - values.sum() / count, xp.zeros_like(values))
    return ((centred**2).sum() / count) ** 0.5


def returns_to_go_array(rewards: Array, mask: Array | None = None, *, gamma: float = 1.0) -> Array:
    """[T, ...] each step's reward plus the discounted rest (`advantages.returns_to_go`)."""
    check_unit("gamma", gamma)
    xp = _library(rewards)
    mask = _mask(rewards, mask)
    returns = xp.where(mask, rewards, xp.zeros_like(rewards))
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += gamma * returns[step + 1]
    return xp.where(mask, returns, xp.zeros_like(returns))


def sibling_credit_array(rewards: Array, mask: Array | None = None, *, gamma: float = 1.0) -> Array:
    """[T, groups, G] return-to-go minus the mean of that of the *other* members that took the same step.

    `advantages.per_turn_group_credit` over all groups; where no sibling is left the return itself is the
    credit.
    """
    xp = _library(rewards)
    mask = _mask(rewards, mask)
    returns = returns_to_go_array(rewards, mask, gamma=gamma)
    return xp.where(mask, returns - _siblings_mean(returns, mask), xp.zeros_like(returns))


def branch_credit_array(
    rewards: Array,
    branch_means: Array,
    branch_counts: Array,
    mask: Array | None = None,
    *,
    gamma: float = 1.0,
) -> Array:
    """[T, groups, G] credit by Monte Carlo values of the states between steps (`branching.branch_credit`).

    `branch_means` and `branch_counts`: mean return and number of the branches from the state before each
    step, discounted from there; the mean is not read where the number is 0.
    """
    xp = _library(rewards)
    mask = _mask(rewards, mask)
    zeros = xp.zeros_like(rewards)
    returns = returns_to_go_array(rewards, mask, gamma=gamma)
    has_branches = mask & (branch_counts > 0)
    branch_means = xp.where(has_branches, branch_means, zeros)
    values = xp.where(mask, (branch_means * branch_counts + returns) / (branch_counts + 1), zeros)
    q_values = xp.where(mask, rewards, zeros)
    q_values[:-1] += gamma * values[1:]
    q_values = xp.where(mask, q_values, zeros)
    baseline = xp.where(has_branches, branch_means, _siblings_mean(q_values, mask))
    return xp.where(mask, q_values - baseline, zeros)


def gae_array(
    rewards: Array,
    values: Array,
    mask: Array | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    terminated: Array,
    final_values: Array,
) -> ArrayCredit:
    """GAE over the steps of every member: `advantages.turn_gae` over [T, ...].

    `values`: V of the state before each step. `terminated` and `final_values` are [...]: did the episode end
    by itself, and V of the state after its last step, which is read only where it did not.
    """
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    xp = _library(rewards)
    mask = _mask(rewards, mask)
    advantages, returns = xp.zeros_like(rewards), xp.zeros_like(rewards)
    next_value = xp.where(terminated, xp.zeros_like(final_values), final_values)
    advantage = xp.zeros_like(next_value)
    for step in range(len(rewards) - 1, -1, -1):
        is_live, value = mask[step], values[step]
        delta = rewards[step] + gamma * next_value - value
        advantage = xp.where(is_live, delta + gamma * lam * advantage, advantage)
        next_value = xp.where(is_live, value, next_value)
        advantages[step] = xp.where(is_live, advantage, xp.zeros_like(advantage))
        returns[step] = xp.where(is_live, advantage + value, xp.zeros_like(advantage))
    return ArrayCredit(advantages, returns)


def _siblings_mean(values: Array, mask: Array) -> Array:
    """[..., G] the mean over the other unmasked members, 0 without any; masked values are 0."""
    num_others = mask.sum(-1)[..., None] - mask * 1
    others = values.sum(-1)[..., None] - values
    return others / _at_least_one(num_others) * (num_others > 0)


def _library(array: Array) -> ModuleType:
    """The functions for this kind of array; numpy's and torch's have the same names and arguments here."""
    if isinstance(array, np.ndarray):
        return np
    import torch

    return torch


def _mask(values: Array, mask: Array | None) -> Array:
    xp = _library(values)
    return xp.ones_like(values, dtype=xp.bool if xp is not np else bool) if mask is None else mask


def _at_least_one(counts: Array) -> Array:
    return counts.clip(1)
