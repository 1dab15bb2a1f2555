"""The exact posterior of linear-Gaussian models under a known noise, over one graph or a few.

With all variables observed each variable is a Bayesian linear regression on its parents (Geiger and
Heckerman, Annals of Statistics 30, 2002), whose intercept and weights are Gaussian. A new row x updates
them by

    gain = S phi / (s^2 + phi' S phi)     m <- m + gain (x_j - phi' m)     S <- S - gain (S phi)'

for every variable that the experiment did not set: what is set tells nothing of its own mechanism. A weight
that the graph lacks has variance 0 and stays 0. The weight of a graph grows by the density that it gave x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stateset_agents.numeric.acquisition.linear_models import (
    Array,
    Bools,
    Ints,
    Menu,
    Plan,
    at_target,
    planned,
    propagated,
)
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """What is known of B models, each under K graphs; each graph's arrays are in its topological order."""

    is_parent: Bools  # [B, K, d, d + 1]
    """By position: does this variable follow from that one? The intercept is in front."""
    means: Array  # [B, K, d, d + 1]
    covariances: Array  # [B, K, d, d + 1, d + 1]
    log_weights: Array  # [B, K]
    """Logarithms of the graphs' probabilities."""
    variances: Array  # [B, K, d]
    """Of the noise."""
    order: Ints  # [B, K, d]
    position: Ints  # [B, K]
    """The target's place in each order."""
    plan: Plan  # [B, K, A, d]

    def __len__(self) -> int:
        return len(self.means)

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

    def take(self, rows: Ints) -> Belief:
        """The beliefs of these rows; rows may repeat."""
        return Belief(
            is_parent=self.is_parent[rows],
            means=self.means[rows],
            covariances=self.covariances[rows],
            log_weights=self.log_weights[rows],
            variances=self.variances[rows],
            order=self.order[rows],
            position=self.position[rows],
            plan=Plan(is_set=self.plan.is_set[rows], values=self.plan.values[rows]),
        )

    def where(self, changes: Bools, other: Belief) -> Belief:
        """These beliefs in the rows that `changes` [B] names, else the other's."""
        return replace(
            self,
            means=np.where(changes[:, None, None, None], self.means, other.means),
            covariances=np.where(changes[:, None, None, None, None], self.covariances, other.covariances),
            log_weights=np.where(changes[:, None], self.log_weights, other.log_weights),
        )

    # ------------------------------------------------------------------------------------------ learning

    def updated(self, values: Array, is_set: Bools | None = None) -> Belief:
        """After one observation of every model. `values`: [B, d] by the variables' numbers; `is_set`: [B, d]
        what the experiment set, nothing when absent."""
        found = np.take_along_axis(values[:, None, :], self.order, axis=2)
        if is_set is None:
            held = np.zeros(self.order.shape, dtype=np.bool_)
        else:
            held = np.take_along_axis(is_set[:, None, :], self.order, axis=2)
        return self._learned(found, held)

    def _learned(self, found: Array, held: Bools) -> Belief:
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
    def graph_weights(self) -> Array:
        """[B, K] probabilities of the graphs."""
        return np.exp(self.log_weights)

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
        found: Array = of_outcome - of_effect
        return found

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
            seen = second[..., :size, :size]
            held, value = self.plan.is_set[..., place], self.plan.values[..., place]
            with_others = (seen @ weight[:, :, None, :, None])[..., 0]
            own = (seen.reshape(*seen.shape[:-2], -1) @ square.reshape(*square.shape[:2], -1, 1))[..., 0]
            own = own + noise * self.variances[..., place, None]
            with_others = np.where(held[..., None], value[..., None] * seen[..., 0, :], with_others)
            second[..., size, :size] = second[..., :size, size] = with_others
            second[..., size, size] = np.where(held, value**2, own)
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
        plan = Plan(is_set=self.plan.is_set[rows, chosen], values=self.plan.values[rows, chosen])
        return at_target(propagated(weights, plan), self.position[rows, chosen])

    def expected_regret(self, normals: Array, uniforms: Array) -> Array:
        """[B] E[best effect - effect of what is recommended] under the posterior, from S drawn models.

        What is recommended has the highest mean. For a prior that is true, its mean over tasks is that of the
        regret itself, at a fraction of the variance: most single regrets are 0 and a few are large.
        `normals` and `uniforms` as in `sampled_effects`.
        """
        drawn = self.sampled_effects(normals, uniforms)
        recommended = self.effect_means().argmax(axis=1)[:, None, None]
        chosen = np.take_along_axis(drawn, np.broadcast_to(recommended, (*drawn.shape[:2], 1)), axis=2)[
            ..., 0
        ]
        regret: Array = (drawn.max(axis=2) - chosen).mean(axis=1)
        return regret

    def imagined(self, actions: Ints, normals: Array, uniforms: Array) -> Belief:
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
            seen = regressors[:, : place + 1]
            mean = (means[:, place, : place + 1] * seen).sum(axis=1)
            part = (covariances[:, place, : place + 1, : place + 1] @ seen[..., None])[..., 0]
            deviation = np.sqrt((part * seen).sum(axis=1) + variances[:, place])
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
