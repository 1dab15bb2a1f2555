"""Rules that choose the next experiment without learning, vectorised over models.

A rule is a function of a `Situation`; it gives [B] actions, each affordable wherever one is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from stateset_agents.numeric.acquisition.linear_models import Array, Belief, Bools, Ints, Menu, Rows
from stateset_agents.numeric.acquisition.surrogates import EffectBelief
from stateset_agents.types.errors import ConfigurationError

_SAMPLES = 64
"""Models drawn from the posterior for the probability of being best."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation(Rows):
    """Information that a rule may use before an experiment."""

    belief: EffectBelief
    costs: Array  # [B, A]
    left: Array  # [B]
    """Budget that is left."""
    counts: Ints  # [B, A]
    """Number of times that each intervention has been made."""
    random: np.random.Generator

    @classmethod
    def first(cls, belief: EffectBelief, menu: Menu, budget: Array, random: np.random.Generator) -> Self:
        """The situation before the first experiment."""
        counts = np.zeros(menu.costs.shape, dtype=np.int64)
        return cls(belief=belief, costs=menu.costs, left=budget, counts=counts, random=random)

    @property
    def affordable(self) -> Bools:
        """[B, A] can this experiment be paid?"""
        return self.costs <= self.left[:, None] + 1e-9

    @property
    def goes_on(self) -> Bools:
        """[B] can any experiment be paid?"""
        can_pay: Bools = np.logical_or.reduce(self.affordable, axis=1)
        return can_pay

    def best(self, scores: Array) -> Ints:
        """[B] the affordable experiment with the highest score [B, A]."""
        chosen: Ints = np.where(self.affordable, scores, -np.inf).argmax(axis=1)
        return chosen

    def after(self, actions: Ints, belief: EffectBelief, goes_on: Bools) -> Self:
        """The situation after these experiments, of which `belief` has learned; rows that do not go on stay,
        in `belief` too."""
        rows = np.arange(len(actions))
        counts = self.counts.copy()
        counts[rows, actions] += goes_on
        return replace(
            self,
            belief=belief,
            left=self.left - np.where(goes_on, self.costs[rows, actions], 0.0),
            counts=counts,
        )

    def imagined(self, actions: Ints, normals: Array, uniforms: Array) -> Self:
        """The situation after an experiment with a predicted outcome; a row that cannot pay it stays."""
        pays = self.affordable[np.arange(len(actions)), actions]
        belief = self.exact.imagined(actions, normals, uniforms)
        return self.after(actions, belief if pays.all() else belief.where(pays, self.exact), pays)

    @property
    def exact(self) -> Belief:
        """The exact posterior, from which outcomes can be imagined."""
        if isinstance(self.belief, Belief):
            return self.belief
        raise ConfigurationError(
            "looking ahead imagines outcomes by the exact posterior, and here a surrogate believes: take a "
            "rule of RULES, or leave the surrogate out"
        )


Rule = Callable[[Situation], Ints]


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
    return gap * above + spread * density


def random_choice(situation: Situation) -> Ints:
    """An intervention at random."""
    return situation.best(situation.random.random(situation.costs.shape))


def round_robin(situation: Situation) -> Ints:
    """The least often made; among these the first."""
    return situation.best(-situation.counts.astype(np.float64))


def ei_per_cost(situation: Situation) -> Ints:
    """The greatest expected improvement for its cost."""
    return situation.best(expected_improvement(*situation.belief.effect_moments()) / situation.costs)


def ei(situation: Situation) -> Ints:
    """The greatest expected improvement, whatever it costs."""
    return situation.best(expected_improvement(*situation.belief.effect_moments()))


def sd_per_cost(situation: Situation) -> Ints:
    """The most uncertain effect for its cost."""
    return situation.best(situation.belief.effect_moments()[1] / situation.costs)


def sd(situation: Situation) -> Ints:
    """The most uncertain effect, whatever it costs."""
    return situation.best(situation.belief.effect_moments()[1])


def _draws(situation: Situation, samples: int) -> Array:
    belief, random = situation.belief, situation.random
    shape = (len(belief), samples, *belief.draw_shape)
    return belief.sampled_effects(random.standard_normal(shape), random.random(shape[:2]))


def thompson(situation: Situation) -> Ints:
    """The best intervention of one model drawn from the posterior."""
    return situation.best(_draws(situation, 1)[:, 0])


def best_per_cost(situation: Situation) -> Ints:
    """The probability of being the best intervention, per cost."""
    drawn = _draws(situation, _SAMPLES)
    best = drawn.argmax(axis=2)
    share = (best[..., None] == np.arange(drawn.shape[2])).mean(axis=1)
    return situation.best((share + 1e-9) / situation.costs)


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
