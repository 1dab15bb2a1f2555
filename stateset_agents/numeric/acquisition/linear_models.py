"""Linear-Gaussian causal models, many at once, and their exact posterior.

X_j = b_j + sum over parents of w_ij X_i + noise, and do().

Arrays of a model stand in the topological order of its graph: position t of `order` holds a number.
Regressors have a leading 1 for the intercept, so the value at position t is regressor t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.types.errors import ConfigurationError

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A value of B rows: fields are arrays [B, ...] or `Rows`, the first one too; others are of all rows."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, rows: Ints) -> Self:
        """A value of these rows alone; rows may repeat."""
        return replace(self, **{part.name: taken(getattr(self, part.name), rows) for part in fields(self)})


def taken(value: Any, rows: Ints) -> Any:
    """Selects rows of an array or of `Rows`; anything else stays as it is."""
    if isinstance(value, np.ndarray):
        return value[rows]
    return value.take(rows) if isinstance(value, Rows) else value


def joined(parts: Sequence[Any]) -> Any:
    """The rows of arrays, or of `Rows`, one part after the other; anything else is the first part's."""
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if not isinstance(first, Rows):
        return first
    names = [field.name for field in fields(first)]
    return replace(first, **{name: joined([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Menu(Rows):
    """The interventions that can be paid for, by the variables' own numbers: A for each of B models."""

    is_set: Bools  # [B, A, d]
    """True where intervention a sets the variable."""
    values: Array  # [B, A, d]
    """Value that the variable is set to, in its unit; 0 where it is not set."""
    costs: Array  # [B, A]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderedMenu(Rows):
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


def planned(menu: Menu, order: Ints) -> OrderedMenu:
    """`menu` in the order of graphs. `order`: [B, d], or [B, K, d] for several graphs of a model."""
    is_set, values = menu.is_set, menu.values
    if order.ndim == 3:
        is_set, values = is_set[:, None], values[:, None]
    index = order[..., None, :]
    return OrderedMenu(
        is_set=np.take_along_axis(is_set, index, axis=-1), values=np.take_along_axis(values, index, axis=-1)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearModels(Rows):
    """B models of d variables, each with a graph of its own."""

    weights: Array  # [B, d, d + 1]
    """Row t: intercept and weights of the variable at position t; 0 unless a parent."""
    noise: Array  # [B, d]
    """Standard deviations."""
    order: Ints  # [B, d]
    target: int
    """Number of the variable whose mean is to be high."""

    def sample(self, is_set: Bools, values: Array, normals: Array) -> Array:
        """[B, n, d] values of the variables, by their numbers, under do().

        `is_set`, `values`: [B, d] by the variables' numbers; `normals`: [B, n, d] by position.
        """
        is_set = np.take_along_axis(is_set, self.order, axis=1)
        values = np.take_along_axis(values, self.order, axis=1)
        regressors = np.ones((*normals.shape[:2], normals.shape[2] + 1))
        for place in range(normals.shape[2]):
            mean = (regressors[..., : place + 1] @ self.weights[:, place, : place + 1, None])[..., 0]
            drawn = mean + self.noise[:, place, None] * normals[..., place]
            regressors[..., place + 1] = np.where(is_set[:, place, None], values[:, place, None], drawn)
        by_number = np.empty_like(normals)
        np.put_along_axis(by_number, self.order[:, None, :], regressors[..., 1:], axis=2)
        return by_number

    def effects(self, menu: Menu) -> Array:
        """[B, A] E[target | do(intervention)], exactly."""
        means = propagated(self.weights, planned(menu, self.order))
        return at_target(means, (self.order == self.target).argmax(axis=-1))


def propagated(weights: Array, plan: OrderedMenu) -> Array:
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


# ------------------------------------------------------------------------------------------ posterior
#
# With all variables observed each variable is a Bayesian linear regression on its parents (Geiger and
# Heckerman, Annals of Statistics 30, 2002), whose intercept and weights are Gaussian. A new row x updates
# them by
#
#     gain = S phi / (s^2 + phi' S phi)     m <- m + gain (x_j - phi' m)     S <- S - gain (S phi)'
#
# for every variable that the experiment did not set: what is set tells nothing of its own mechanism. A weight
# that the graph lacks has variance 0 and stays 0. The weight of a graph grows by the density that it gave x.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief(Rows):
    """The exact posterior of B models, each under K graphs, whose arrays are in topological order."""

    is_parent: Bools  # [B, K, d, d + 1]
    """True where the variable at one position is a parent of another; the intercept is in front."""
    means: Array  # [B, K, d, d + 1]
    covariances: Array  # [B, K, d, d + 1, d + 1]
    log_weights: Array  # [B, K]
    """Logarithms of the graphs' probabilities."""
    variances: Array  # [B, K, d]
    """Variances of the noise."""
    order: Ints  # [B, K, d]
    position: Ints  # [B, K]
    """The target's place in each order."""
    plan: OrderedMenu  # [B, K, A, d]

    @classmethod
    def prior(
        cls, *, is_parent: Bools, order: Ints, noise: Array, scale: Array, target: int, menu: Menu
    ) -> Belief:
        """Weights and intercepts are N(0, scale^2) before any data, all graphs equally likely.

        `is_parent`: [B, K, d, d + 1] by position, with the intercept in front; `order`: [B, K, d]; `noise`:
        [B, d] by the variables' numbers; `scale`: [B, K, d, d + 1] or what broadcasts to it.
        """
        num_models, num_graphs, num_variables = order.shape
        if not (noise > 0).all():
            raise ConfigurationError(
                f"noise must be above 0, got {noise.min():g}: without noise the posterior becomes singular"
            )
        spread = np.where(is_parent, scale, 0.0) ** 2
        noise = np.take_along_axis(np.repeat(noise[:, None], num_graphs, axis=1), order, axis=2)
        return cls(
            is_parent=is_parent,
            means=np.zeros(spread.shape),
            covariances=spread[..., None] * np.eye(num_variables + 1),
            log_weights=np.full((num_models, num_graphs), -np.log(num_graphs)),
            variances=noise**2,
            order=order,
            position=(order == target).argmax(axis=-1),
            plan=planned(menu, order),
        )

    def where(self, changes: Bools, other: Self) -> Self:
        """A belief that is this one in the rows where `changes` [B] is True, else the other."""
        return replace(
            self,
            means=np.where(changes[:, None, None, None], self.means, other.means),
            covariances=np.where(changes[:, None, None, None, None], self.covariances, other.covariances),
            log_weights=np.where(changes[:, None], self.log_weights, other.log_weights),
        )

    # ------------------------------------------------------------------------------------------ learning

    def updated(self, values: Array, is_set: Bools | None = None, rows: Bools | None = None) -> Self:
        """The posterior after one observation of every model. `values`: [B, d] by the variables' numbers;
        `is_set`: [B, d] what the experiment set, nothing when absent; `rows`: [B] which models are observed,
        all when absent."""
        by_position = np.take_along_axis(values[:, None, :], self.order, axis=2)
        if is_set is None:
            held = np.zeros(self.order.shape, dtype=np.bool_)
        else:
            held = np.take_along_axis(is_set[:, None, :], self.order, axis=2)
        learned = self._learned(by_position, held)
        return learned if rows is None or rows.all() else learned.where(rows, self)

    def _learned(self, found: Array, held: Bools) -> Self:
        """`found`, `held`: [B, K, d] by position."""
        regressors = _with_one(found)
        num_variables = found.shape[-1]
        flat = self.covariances.reshape(*self.means.shape[:2], -1, num_variables + 1)
        spread = (flat @ regressors[..., None]).reshape(self.means.shape)  # S phi
        within = (spread @ regressors[..., None])[..., 0] + self.variances  # the variance that was predicted
        missed = found - (self.means @ regressors[..., None])[..., 0]
        gain = np.where(held, 0.0, 1.0 / within)[..., None] * spread
        log_weights = self.log_weights
        if log_weights.shape[1] > 1:
            density = -0.5 * (missed**2 / within + np.log(within))
            log_weights = log_weights + np.where(held, 0.0, density).sum(axis=-1)
            log_weights = log_weights - np.logaddexp.reduce(log_weights, axis=1, keepdims=True)
        return replace(
            self,
            means=self.means + gain * missed[..., None],
            covariances=self.covariances - gain[..., :, None] * spread[..., None, :],
            log_weights=log_weights,
        )

    # ------------------------------------------------------------------------------------------ effects

    @property
    def draw_shape(self) -> tuple[int, ...]:
        """Shape of the normal numbers of one drawn model."""
        return self.means.shape[2:]

    @property
    def graph_weights(self) -> Array:
        """[B, K] probabilities of the graphs."""
        return np.exp(self.log_weights)

    def acts_directly(self) -> Array:
        """[B, A] probability that a variable which is set is a parent of the target."""
        target = self.position[..., None, None]
        of_target = np.take_along_axis(self.is_parent, target, axis=2)[:, :, 0, 1:]  # [B, K, d]
        direct = (self.plan.is_set & of_target[:, :, None, :]).any(axis=-1)
        probabilities: Array = (self.graph_weights[..., None] * direct).sum(axis=1)
        return probabilities

    def effect_means(self) -> Array:
        """[B, A] posterior mean of E[target | do(intervention)].

        Exact: no weight stands twice on a path, and the weights of different variables are independent, so
        that the mean of a path's product is the product of means.
        """
        means = at_target(propagated(self.means, self.plan), self.position)  # [B, K, A]
        mixed: Array = (self.graph_weights[..., None] * means).sum(axis=1)
        return mixed

    def effect_moments(self) -> tuple[Array, Array]:
        """[B, A] posterior mean and standard deviation of E[target | do(intervention)], exactly.

        Second moments of all regressors are carried through the order; over graphs they mix.
        """
        mean, square_mean = self._moments(0.0)
        return mean, np.sqrt(np.maximum(square_mean - mean**2, 0.0))

    def outcome_variances(self) -> Array:
        """[B, A] variance of one outcome of each intervention around its effect, in the posterior's mean."""
        _, of_outcome = self._moments(1.0)
        _, of_effect = self._moments(0.0)
        return of_outcome - of_effect

    def _moments(self, noise: float) -> tuple[Array, Array]:
        """[B, A] mean and mean square of the target under each intervention, with `noise` times the noise's
        variance in every variable that is not set: 0 for the effect, 1 for an outcome."""
        num_variables = self.means.shape[2]
        shape = (*self.plan.values.shape[:-1], num_variables + 1, num_variables + 1)
        second = np.zeros(shape)
        second[..., 0, 0] = 1.0
        for place in range(num_variables):
            size = place + 1
            weight = self.means[:, :, place, :size]
            square = self.covariances[:, :, place, :size, :size] + weight[..., :, None] * weight[..., None, :]
            squares = second[..., :size, :size]
            held, value = self.plan.is_set[..., place], self.plan.values[..., place]
            with_others = (squares @ weight[:, :, None, :, None])[..., 0]
            own_mean = (squares.reshape(*squares.shape[:-2], -1) @ square.reshape(*square.shape[:2], -1, 1))[
                ..., 0
            ]
            own_mean = own_mean + noise * self.variances[..., place, None]
            with_others = np.where(held[..., None], value[..., None] * squares[..., 0, :], with_others)
            second[..., size, :size] = second[..., :size, size] = with_others
            second[..., size, size] = np.where(held, value**2, own_mean)
        index = (self.position + 1)[..., None, None, None]
        of_target = np.take_along_axis(second, index, axis=-2)[..., 0, :]
        mean = of_target[..., 0]
        square_mean = np.take_along_axis(of_target, index[..., 0], axis=-1)[..., 0]
        weights = self.graph_weights[..., None]
        return (weights * mean).sum(axis=1), (weights * square_mean).sum(axis=1)

    def sampled_effects(self, normals: Array, uniforms: Array) -> Array:
        """[B, S, A] effects under models drawn from the posterior. `normals`: [B, S, d, d + 1]; `uniforms`:
        [B, S], which choose the graph."""
        chosen = (uniforms[..., None] >= self.graph_weights.cumsum(axis=1)[:, None, :-1]).sum(axis=-1)
        rows = np.arange(len(self))[:, None]
        size = self.means.shape[-1]
        roots = np.linalg.cholesky(self.covariances + 1e-12 * np.eye(size))
        weights = self.means[rows, chosen] + (roots[rows, chosen] @ normals[..., None])[..., 0]
        plan = OrderedMenu(is_set=self.plan.is_set[rows, chosen], values=self.plan.values[rows, chosen])
        return at_target(propagated(weights, plan), self.position[rows, chosen])

    def expected_regret(self, normals: Array, uniforms: Array) -> Array:
        """[B] E[best effect - effect of what is recommended] under the posterior, from S drawn models.

        What is recommended has the highest mean. For a prior that is true, its mean over tasks is that of the
        regret itself, at a fraction of the variance: most single regrets are 0 and a few are large.
        `normals` and `uniforms` as in `sampled_effects`.
        """
        drawn = self.sampled_effects(normals, uniforms)
        recommended = self.effect_means().argmax(axis=1)
        chosen = drawn[np.arange(len(self)), :, recommended]
        regret: Array = (drawn.max(axis=2) - chosen).mean(axis=1)
        return regret

    def imagined(self, actions: Ints, normals: Array, uniforms: Array) -> Self:
        """The belief after an experiment whose outcome is drawn from what is predicted.

        `actions`: [B]; `normals`: [B, d] by the variables' numbers; `uniforms`: [B], which choose the graph.
        """
        heights = self.graph_weights.cumsum(axis=1)
        chosen = (uniforms[:, None] >= heights[:, :-1]).sum(axis=-1)
        rows = np.arange(len(self))
        held, value = self.plan.of(actions)  # [B, K, d]
        is_set, set_to = held[rows, chosen], value[rows, chosen]
        order = self.order[rows, chosen]
        drawn = np.take_along_axis(normals, order, axis=1)
        means, covariances = self.means[rows, chosen], self.covariances[rows, chosen]
        variances = self.variances[rows, chosen]
        num_variables = order.shape[1]
        regressors = np.ones((len(self), num_variables + 1))
        for place in range(num_variables):
            earlier = regressors[:, : place + 1]
            mean = (means[:, place, : place + 1] * earlier).sum(axis=1)
            part = (covariances[:, place, : place + 1, : place + 1] @ earlier[..., None])[..., 0]
            deviation = np.sqrt((part * earlier).sum(axis=1) + variances[:, place])
            outcome = mean + deviation * drawn[:, place]
            regressors[:, place + 1] = np.where(is_set[:, place], set_to[:, place], outcome)
        if self.order.shape[1] == 1:
            return self._learned(regressors[:, None, 1:], held)
        by_number = np.empty_like(normals)
        np.put_along_axis(by_number, order, regressors[:, 1:], axis=1)
        return self._learned(np.take_along_axis(by_number[:, None, :], self.order, axis=2), held)


def _with_one(values: Array) -> Array:
    """[..., d + 1] with a 1 in front."""
    padded = np.empty((*values.shape[:-1], values.shape[-1] + 1), dtype=values.dtype)
    padded[..., 0] = 1.0
    padded[..., 1:] = values
    return padded
