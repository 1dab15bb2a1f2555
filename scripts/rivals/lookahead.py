"""A rule that imagines outcomes to the budget's end: the yardstick of `scripts/acquisition_headroom.py`."""

from __future__ import annotations

import numpy as np

from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.acquisition.lookahead import after_each, for_all_actions, normal_pairs
from stateset_agents.numeric.acquisition.rules import Rule, Situation


def rollout_regrets(situation: Situation, base: Rule, *, samples: int, draws: int = 16) -> Array:
    """[B, A, samples] expected regret at the end, of an experiment and then `base` until the budget is spent.

    The regret at an end is the posterior's, from `draws` models: its variance is far below a single model's.
    """
    after, shape = after_each(situation, samples)
    random, (num_models, _, _) = situation.random, shape
    size = situation.exact.order.shape[2]
    rows = np.arange(len(after.left))
    regrets = np.empty(len(rows))
    end_normals = normal_pairs(random, num_models * samples, draws, (size, size + 1))
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
        normals = for_all_actions(normal_pairs(random, num_models, samples, (size,)), shape)[rows]
        uniforms = for_all_actions(random.random((num_models, samples)), shape)[rows]
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
