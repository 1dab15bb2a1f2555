"""A rule that imagines the outcome of one experiment, the knowledge gradient, and how outcomes are drawn."""

from __future__ import annotations

import numpy as np

from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.acquisition.rules import Rule, Situation


def knowledge_values(situation: Situation, samples: int) -> Array:
    """[B, A] E[the highest mean after the experiment] - the highest mean now, by imagined outcomes.

    The same numbers drive the outcomes of all experiments, so that these differ by little else.
    """
    after, shape = after_each(situation, samples)
    best = after.belief.effect_means().max(axis=1).reshape(shape)
    gain: Array = best.mean(axis=2) - situation.belief.effect_means().max(axis=1)[:, None]
    return gain


def knowledge_gradient(*, samples: int = 32, per_cost: bool = True) -> Rule:
    """The experiment after which the best mean is expected to be highest, for its cost (Frazier, Powell and
    Dayanik, SIAM J. Control and Optimization 47, 2008)."""

    def rule(situation: Situation) -> Ints:
        values = np.maximum(knowledge_values(situation, samples), 0.0) + 1e-9
        values = values / situation.costs if per_cost else values
        return situation.best(values)

    return rule


def after_each(situation: Situation, samples: int) -> tuple[Situation, tuple[int, int, int]]:
    """[B * A * samples] rows, each after an experiment, and that shape."""
    num_models, num_actions = situation.costs.shape
    shape = (num_models, num_actions, samples)
    normals = normal_pairs(situation.random, num_models, samples, (situation.exact.order.shape[2],))
    uniforms = situation.random.random((num_models, samples))
    rows = np.repeat(np.arange(num_models), num_actions * samples)
    actions = np.tile(np.repeat(np.arange(num_actions), samples), num_models)
    normals, uniforms = for_all_actions(normals, shape), for_all_actions(uniforms, shape)
    return situation.take(rows).imagined(actions, normals, uniforms), shape


def for_all_actions(values: Array, shape: tuple[int, int, int]) -> Array:
    """[B, samples, ...] as [B * A * samples, ...], the same for all A."""
    rest = values.shape[2:]
    return np.broadcast_to(values[:, None], (*shape, *rest)).reshape(-1, *rest)


def normal_pairs(random: np.random.Generator, rows: int, number: int, rest: tuple[int, ...]) -> Array:
    """[rows, number, ...] standard normal, each with its negative: less error of nearly linear means."""
    half = random.standard_normal((rows, (number + 1) // 2, *rest))
    return np.concatenate([half, -half], axis=1)[:, :number]
