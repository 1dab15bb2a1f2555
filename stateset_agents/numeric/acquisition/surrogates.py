"""A model of one's own of what interventions do, in place of the exact posterior of linear models.

Methods and shapes are BoTorch's (https://botorch.org/docs/models), so that a single-output model of BoTorch
is a surrogate as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from stateset_agents.numeric.acquisition.families import Tasks
from stateset_agents.numeric.acquisition.linear_models import Array, Belief, Bools, Ints, Rows
from stateset_agents.types.settings import expect_that


@dataclass(frozen=True, slots=True)
class Posterior:
    """Effects of A interventions, as BoTorch's GPyTorchPosterior has them."""

    distribution: torch.distributions.MultivariateNormal
    """`mean` [B, A] and `covariance_matrix` [B, A, A], for batch shape [B]."""


class Surrogate(Protocol):
    """What is believed before the first experiment; it does not change.

    An intervention is a point of 2 d float64 numbers, d being the number of variables: 1 where a variable is
    set and 0 elsewhere, then the values that are set and 0 elsewhere. All zeros: nothing is set.
    """

    num_outputs: int
    """Columns of Y: 1, the target, or d, all variables with the target last."""

    def condition_on_observations(self, X: Tensor, Y: Tensor) -> Any:
        """The surrogate after n experiments of each of B campaigns. `X`: [B, n, 2 d]; `Y`: [B, n, outputs].

        Equal rows give equal results, whatever rows stand beside them."""

    def posterior(self, X: Tensor) -> Any:
        """A `Posterior` of E[target | do(X)]. `X`: [B, A, 2 d]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SurrogateBelief(Rows):
    """What a surrogate believes of B campaigns, each by its own experiments; methods are those of `Belief`
    that choose and observe."""

    mean: Array  # [B, A]
    root: Array  # [B, A, A]
    """root @ root.T is the covariance."""
    menu: Array  # [B, A, 2 d]
    points: Array  # [B, T, 2 d]
    """Experiments so far, T being the most that there can be."""
    outcomes: Array  # [B, T, d]
    number: Ints  # [B]
    """Experiments and observations so far."""
    before: Belief
    """What was known of the graph, of which a surrogate says nothing."""
    model: Surrogate

    @classmethod
    def begun(cls, model: Surrogate, tasks: Tasks) -> Self:
        """The belief before the first experiment, from the tasks' observations alone."""
        size, num_observations, num_variables = tasks.observations.shape
        rule = f"be 1, the target, or {num_variables}, all variables"
        expect_that(model.num_outputs in (1, num_variables), "num_outputs", rule, model.num_outputs)
        capacity = num_observations + tasks.family.most_experiments
        outcomes = np.zeros((size, capacity, num_variables))
        outcomes[:, :num_observations] = tasks.observations
        num_actions = tasks.menu.costs.shape[1]
        belief = cls(
            mean=np.zeros((size, num_actions)),
            root=np.zeros((size, num_actions, num_actions)),
            menu=np.concatenate([tasks.menu.is_set, tasks.menu.values], axis=2),
            points=np.zeros((size, capacity, 2 * num_variables)),
            outcomes=outcomes,
            number=np.full(size, num_observations),
            before=tasks.belief,
            model=model,
        )
        return belief.by(model)

    def by(self, model: Surrogate, rows: Bools | None = None) -> Self:
        """The belief of this model after the same experiments; `rows` [B]: of these rows alone."""
        mean, root = self.mean.copy(), self.root.copy()
        chosen = np.ones(len(self), dtype=np.bool_) if rows is None else rows
        for number in np.unique(self.number[chosen]):
            part = np.flatnonzero(chosen & (self.number == number))
            conditioned = model
            if number:
                seen = (self.points[part, :number], self.outcomes[part, :number, -model.num_outputs :])
                conditioned = model.condition_on_observations(*map(torch.from_numpy, seen))
            with torch.no_grad():
                effects = conditioned.posterior(torch.from_numpy(self.menu[part])).distribution
                covariance = effects.covariance_matrix.numpy().astype(np.float64)
                mean[part] = effects.mean.numpy()
            is_finite = bool(np.isfinite(covariance).all() and np.isfinite(mean[part]).all())
            name, hint = f"the posterior after {number} experiments", "raise the surrogate's noise"
            expect_that(is_finite, name, "be finite", mean[part].tolist(), hint, length=80)
            values, vectors = np.linalg.eigh(covariance)  # a posterior is singular where it is sure
            root[part] = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
        return replace(self, mean=mean, root=root, model=model)

    def updated(self, values: Array, is_set: Bools | None = None, rows: Bools | None = None) -> Self:
        if is_set is None:
            is_set = np.zeros(values.shape, dtype=np.bool_)
        live = np.arange(len(self)) if rows is None else np.flatnonzero(rows)
        points, outcomes, number = self.points.copy(), self.outcomes.copy(), self.number.copy()
        points[live, number[live]] = np.concatenate([is_set, np.where(is_set, values, 0.0)], axis=1)[live]
        outcomes[live, number[live]] = values[live]
        number[live] += 1
        return replace(self, points=points, outcomes=outcomes, number=number).by(self.model, rows)

    @property
    def draw_shape(self) -> tuple[int, ...]:
        return (self.mean.shape[1],)

    @property
    def graph_weights(self) -> Array:
        return self.before.graph_weights

    def acts_directly(self) -> Array:
        return self.before.acts_directly()

    def effect_means(self) -> Array:
        return self.mean

    def effect_moments(self) -> tuple[Array, Array]:
        return self.mean, np.sqrt((self.root**2).sum(axis=2))

    def sampled_effects(self, normals: Array, uniforms: Array) -> Array:
        drawn: Array = self.mean[:, None] + normals @ self.root.transpose(0, 2, 1)
        return drawn


EffectBelief = Belief | SurrogateBelief
