"""Linear-Gaussian causal models, many at once: X_j = b_j + sum over parents of w_ij X_i + noise, and do().

Arrays of a model stand in the topological order of its graph: position t of `order` holds a number.
Regressors have a leading 1 for the intercept, so the value at position t is regressor t + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Menu:
    """The interventions that can be paid for, by the variables' own numbers: A for each of B models."""

    is_set: Bools  # [B, A, d]
    """Does intervention a set this variable?"""
    values: Array  # [B, A, d]
    """What to, in the variable's unit; 0 where it is left alone."""
    costs: Array  # [B, A]

    def __len__(self) -> int:
        return len(self.costs)

    def take(self, rows: Ints) -> Menu:
        """These models' menus."""
        return Menu(is_set=self.is_set[rows], values=self.values[rows], costs=self.costs[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A menu in the topological order of a graph; any axes L before the last two."""

    is_set: Bools  # [..., A, d]
    values: Array  # [..., A, d]

    def of(self, actions: Ints) -> tuple[Bools, Array]:
        """The chosen intervention of each model, [..., d] each. `actions`: [B], B the first of the axes L."""
        index = actions.reshape(-1, *[1] * (self.values.ndim - 1))
        return (
            np.take_along_axis(self.is_set, index, axis=-2)[..., 0, :],
            np.take_along_axis(self.values, index, axis=-2)[..., 0, :],
        )


def planned(menu: Menu, order: Ints) -> Plan:
    """`menu` in the order of graphs. `order`: [B, d], or [B, K, d] for several graphs of a model."""
    is_set, values = menu.is_set, menu.values
    if order.ndim == 3:
        is_set, values = is_set[:, None], values[:, None]
    index = order[..., None, :]
    return Plan(
        is_set=np.take_along_axis(is_set, index, axis=-1), values=np.take_along_axis(values, index, axis=-1)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearModels:
    """B models of d variables, each with a graph of its own."""

    weights: Array  # [B, d, d + 1]
    """Row t: intercept and weights of the variable at position t; 0 unless a parent."""
    noise: Array  # [B, d]
    """Standard deviations."""
    order: Ints  # [B, d]
    target: int
    """Number of the variable whose mean is to be high."""

    def __len__(self) -> int:
        return len(self.weights)

    def take(self, rows: Ints) -> LinearModels:
        """These models."""
        return LinearModels(
            weights=self.weights[rows], noise=self.noise[rows], order=self.order[rows], target=self.target
        )

    def sample(self, is_set: Bools, values: Array, normals: Array) -> Array:
        """[B, n, d] values of the variables, by their numbers, under do().

        `is_set`, `values`: [B, d] by the variables' numbers; `normals`: [B, n, d] by position.
        """
        is_set = np.take_along_axis(is_set, self.order, axis=1)
        values = np.take_along_axis(values, self.order, axis=1)
        found = np.ones((*normals.shape[:2], normals.shape[2] + 1))
        for place in range(normals.shape[2]):
            mean = (found[..., : place + 1] @ self.weights[:, place, : place + 1, None])[..., 0]
            drawn = mean + self.noise[:, place, None] * normals[..., place]
            found[..., place + 1] = np.where(is_set[:, place, None], values[:, place, None], drawn)
        by_number = np.empty_like(normals)
        np.put_along_axis(by_number, self.order[:, None, :], found[..., 1:], axis=2)
        return by_number

    def effects(self, menu: Menu) -> Array:
        """[B, A] E[target | do(intervention)], exactly."""
        plan = planned(menu, self.order)
        means = propagated(self.weights, plan)
        return at_target(means, (self.order == self.target).argmax(axis=-1))


def propagated(weights: Array, plan: Plan) -> Array:
    """[..., A, d + 1] means of the regressors under each intervention. `weights`: [..., d, d + 1]."""
    num_variables = weights.shape[-2]
    means = np.ones((*plan.values.shape[:-1], num_variables + 1), dtype=weights.dtype)
    for place in range(num_variables):
        mean = (means[..., : place + 1] @ weights[..., place, : place + 1, None])[..., 0]
        means[..., place + 1] = np.where(plan.is_set[..., place], plan.values[..., place], mean)
    return means


def at_target(regressors: Array, position: Ints) -> Array:
    """[..., A] the target's entry of [..., A, d + 1]. `position`: [...] its place in the order."""
    return np.take_along_axis(regressors, (position + 1)[..., None, None], axis=-1)[..., 0]
