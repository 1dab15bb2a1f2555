"""Rules that choose the next experiment without learning, vectorised over models.

A rule is a function of a `Situation`; it gives [B] actions, each affordable wherever one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stateset_agents.numeric.acquisition.belief import Belief
from stateset_agents.numeric.acquisition.linear_models import Array, Bools, Ints

_SAMPLES = 64
"""Models drawn from the posterior for the probability of being best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """What a rule may know before an experiment."""

    belief: Belief
    costs: Array  # [B, A]
    left: Array  # [B]
    """Of the budget."""
    counts: Ints  # [B, A]
    """How often each intervention has been made."""
    random: np.random.Generator

    @property
    def affordable(self) -> Bools:
        """[B, A] can this experiment be paid?"""
        found: Bools = self.costs <= self.left[:, None] + 1e-9
        return found

    @property
    def goes_on(self) -> Bools:
        """[B] can any experiment be paid?"""
        found: Bools = np.logical_or.reduce(self.affordable, axis=1)
        return found

    def take(self, rows: Ints) -> Situation:
        """These rows; rows may repeat."""
        return Situation(
            belief=self.belief.take(rows),
            costs=self.costs[rows],
            left=self.left[rows],
            counts=self.counts[rows],
            random=self.random,
        )

    def imagined(self, actions: Ints, normals: Array, uniforms: Array) -> Situation:
        """After an experiment with a predicted outcome; a row that cannot pay any stays as it was."""
        rows = np.arange(len(actions))
        goes_on = self.affordable[rows, actions]
        new = self.belief.imagined(actions, normals, uniforms)
        counts = self.counts.copy()
        counts[rows, actions] += goes_on
        return Situation(
            belief=new if goes_on.all() else new.where(goes_on, self.belief),
            costs=self.costs,
            left=self.left - np.where(goes_on, self.costs[rows, actions], 0.0),
            counts=counts,
            random=self.random,
        )


Rule = Callable[[Situation], Ints]


def _best(scores: Array, situation: Situation) -> Ints:
    chosen: Ints = np.where(situation.affordable, scores, -np.inf).argmax(axis=1)
    return chosen


def expected_improvement(mean: Array, deviation: Array) -> Array:
    """[B, A] `improvement_over` the best mean of each row."""
    return improvement_over(mean, deviation, mean.max(axis=1, keepdims=True))


def improvement_over(mean: Array, deviation: Array, best: Array | float) -> Array:
    """E[max(effect - best, 0)] of a normal effect (Jones and others, J. Global Optimization 13, 1998)."""
    gap = mean - best
    spread = np.maximum(deviation, 1e-12)
    z = gap / spread
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    above: Array = torch.special.ndtr(torch.from_numpy(z)).numpy()
    found: Array = gap * above + spread * density
    return found


def random_choice(situation: Situation) -> Ints:
    """An intervention at random."""
    return _best(situation.random.random(situation.costs.shape), situation)


def round_robin(situation: Situation) -> Ints:
    """The least often made; among these the first."""
    return _best(-situation.counts.astype(np.float64), situation)


def ei_per_cost(situation: Situation) -> Ints:
    """The greatest expected improvement for its cost."""
    return _best(expected_improvement(*situation.belief.effect_moments()) / situation.costs, situation)


def ei(situation: Situation) -> Ints:
    """The greatest expected improvement, whatever it costs."""
    return _best(expected_improvement(*situation.belief.effect_moments()), situation)


def sd_per_cost(situation: Situation) -> Ints:
    """The most uncertain effect for its cost."""
    return _best(situation.belief.effect_moments()[1] / situation.costs, situation)


def sd(situation: Situation) -> Ints:
    """The most uncertain effect, whatever it costs."""
    return _best(situation.belief.effect_moments()[1], situation)


def _draws(situation: Situation, samples: int) -> Array:
    belief, random = situation.belief, situation.random
    shape = (len(belief), samples, *belief.means.shape[2:])
    return belief.sampled_effects(random.standard_normal(shape), random.random(shape[:2]))


def thompson(situation: Situation) -> Ints:
    """The best intervention of one model drawn from the posterior."""
    return _best(_draws(situation, 1)[:, 0], situation)


def best_per_cost(situation: Situation) -> Ints:
    """The probability of being the best intervention, per cost."""
    drawn = _draws(situation, _SAMPLES)
    best = drawn.argmax(axis=2)
    share = (best[..., None] == np.arange(drawn.shape[2])).mean(axis=1)
    return _best((share + 1e-9) / situation.costs, situation)


RULES: Mapping[str, Rule] = {
    "random": random_choice,
    "round robin": round_robin,
    "Thompson": thompson,
    "P(best) per cost": best_per_cost,
    "EI": ei,
    "EI per cost": ei_per_cost,
    "sd": sd,
    "sd per cost": sd_per_cost,
}
