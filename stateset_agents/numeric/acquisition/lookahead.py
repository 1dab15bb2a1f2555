"""Rules that imagine outcomes: knowledge gradient (one experiment) and rollouts (to the budget's end)."""

from __future__ import annotations

import numpy as np

from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.acquisition.rules import Rule, Situation


def knowledge_values(situation: Situation, samples: int) -> Array:
    """[B, A] E[the highest mean after the experiment] - the highest mean now, by imagined outcomes.

    The same numbers drive the outcomes of all experiments, so that these differ by little else.
    """
    after, shape = _after_each(situation, samples)
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


def rollout_regrets(situation: Situation, base: Rule, *, samples: int, draws: int = 16) -> Array:
    """[B, A, samples] expected regret at the end, of an experiment and then `base` until the budget is spent.

    The regret at an end is the posterior's, from `draws` models: its variance is far below a single model's.
    """
    after, shape = _after_each(situation, samples)
    random, (num_models, _, _) = situation.random, shape
    size = situation.exact.order.shape[2]
    rows = np.arange(len(after.left))
    regrets = np.empty(len(rows))
    end_normals = _pairs(random, num_models * samples, draws, (size, size + 1))
    end_uniforms = random.random((num_models * samples, draws))
    while len(rows):
        goes_on = after.goes_on
        ended = np.flatnonzero(~goes_on)
        if len(ended):
            of = rows[ended] // (shape[1] * samples) * samples + rows[ended] % samples  # equal for all A
            regrets[rows[ended]] = after.exact.take(ended).expected_regret(end_normals[of], end_uniforms[of])
            going = np.flatnonzero(goes_on)
            after, rows = after.take(going), rows[going]
            if not len(rows):
                break
        normals = _shared(_pairs(random, num_models, samples, (size,)), shape)[rows]
        uniforms = _shared(random.random((num_models, samples)), shape)[rows]
        after = after.imagined(base(after), normals, uniforms)
    return regrets.reshape(shape)


def rollout_lookahead(base: Rule, *, samples: int = 32, caution: float = 1.0) -> Rule:
    """The experiment with the least expected regret at the end where `base` goes on after it (Bertsekas and
    Castanon, J. Heuristics 5, 1999; for budgets: Lee and others, UAI 2021).

    `caution`: `base` keeps its choice unless another one's mean is better by so many standard errors of the
    paired difference, as the imagined outcomes are few.
    """

    def rule(situation: Situation) -> Ints:
        regrets = rollout_regrets(situation, base, samples=samples)
        kept = base(situation)
        saved = np.take_along_axis(regrets, kept[:, None, None], axis=1) - regrets  # [B, A, samples]
        error = saved.std(axis=2) / np.sqrt(samples)
        return situation.best(saved.mean(axis=2) - caution * error)

    return rule


def _after_each(situation: Situation, samples: int) -> tuple[Situation, tuple[int, int, int]]:
    """[B * A * samples] rows, each after an experiment, and that shape."""
    num_models, num_actions = situation.costs.shape
    shape = (num_models, num_actions, samples)
    normals = _pairs(situation.random, num_models, samples, (situation.exact.order.shape[2],))
    uniforms = situation.random.random((num_models, samples))
    rows = np.repeat(np.arange(num_models), num_actions * samples)
    actions = np.tile(np.repeat(np.arange(num_actions), samples), num_models)
    return situation.take(rows).imagined(actions, _shared(normals, shape), _shared(uniforms, shape)), shape


def _shared(values: Array, shape: tuple[int, int, int]) -> Array:
    """[B, samples, ...] as [B * A * samples, ...], the same for all A."""
    rest = values.shape[2:]
    return np.broadcast_to(values[:, None], (*shape, *rest)).reshape(-1, *rest)


def _pairs(random: np.random.Generator, rows: int, number: int, rest: tuple[int, ...]) -> Array:
    """[rows, number, ...] standard normal, each with its negative: less error of nearly linear means."""
    half = random.standard_normal((rows, (number + 1) // 2, *rest))
    return np.concatenate([half, -half], axis=1)[:, :number]
