"""A campaign: experiments chosen by a rule until the budget pays no more, for many tasks at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stateset_agents.numeric.acquisition.families import Tasks
from stateset_agents.numeric.acquisition.linear_models import Array, Belief, Bools, Ints
from stateset_agents.numeric.acquisition.rules import Rule, Situation
from stateset_agents.types.seeds import derive

_ROWS = 128
"""Tasks for which a rule is asked at once: those that imagine outcomes have thousands of rows for each."""
_DRAWS = 256
"""Models drawn for the expected regret."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CampaignOutcome:
    """Results of campaigns."""

    regret: Array  # [B]
    """Best true effect minus that of the intervention with the highest posterior mean."""
    expected_regret: Array  # [B]
    """The same under the posterior at the end."""
    num_experiments: Ints  # [B]
    actions: Ints  # [T, B]
    """-1 where none was made."""


def measured(tasks: Tasks, actions: Ints, number: int | Ints) -> tuple[Array, Bools]:
    """[B, d] what experiment `number` (from 0; one, or [B]) of every task gives, and what it set."""
    rows = np.arange(len(actions))
    is_set = tasks.menu.is_set[rows, actions]
    values = tasks.models.sample(is_set, tasks.menu.values[rows, actions], tasks.noise(number)[:, None])
    return values[:, 0], is_set


def play(rule: Rule, tasks: Tasks, *, seed: int = 0) -> CampaignOutcome:
    """One campaign of each task.

    `seed`: of what the rule draws; the experiments' noise is the tasks' own, so that two rules on the same
    tasks are paired.
    """

    def choose(situation: Situation) -> Ints:
        live = np.flatnonzero(situation.goes_on)
        actions = np.zeros(len(tasks), dtype=np.int64)
        for part in np.array_split(live, -(-len(live) // _ROWS)):
            actions[part] = rule(situation.take(part))
        return actions

    return play_watching(choose, tasks, seed=seed)


def play_watching(
    choose: Rule, tasks: Tasks, *, told: Callable[[Ints, Array], None] | None = None, seed: int = 0
) -> CampaignOutcome:
    """`play` for what remembers outcomes of its own: `choose` is always asked for all tasks at once.

    After each experiment `told` gets [B] the action of each task, -1 where none was made, and [B] the target.
    """
    size, rows = len(tasks), np.arange(len(tasks))
    random = np.random.default_rng(derive(seed, "campaign"))
    situation = Situation.first(tasks.belief, tasks.menu, tasks.budget, random)
    experiments: list[Ints] = []
    while (goes_on := situation.goes_on).any():
        actions = choose(situation)
        values, is_set = measured(tasks, actions, len(experiments))
        situation = situation.after(actions, situation.belief.updated(values, is_set, goes_on), goes_on)
        experiments.append(np.where(goes_on, actions, -1))
        if told is not None:
            told(experiments[-1], values[:, tasks.models.target])
    history = np.stack(experiments) if experiments else np.empty((0, size), dtype=np.int64)
    recommended = situation.belief.effect_means().argmax(axis=1)
    return CampaignOutcome(
        regret=tasks.effects.max(axis=1) - tasks.effects[rows, recommended],
        expected_regret=expected_regret(situation.exact, seed=seed),
        num_experiments=(history >= 0).sum(axis=0),
        actions=history,
    )


def expected_regret(belief: Belief, *, seed: int = 0) -> Array:
    """[B] `Belief.expected_regret` by 256 models drawn from each posterior."""
    random = np.random.default_rng(derive(seed, "expected regret"))
    regrets = np.empty(len(belief))
    for part in np.array_split(np.arange(len(belief)), -(-len(belief) // _ROWS)):
        shape = (len(part), _DRAWS)
        normals = random.standard_normal((*shape, *belief.draw_shape))
        regrets[part] = belief.take(part).expected_regret(normals, random.random(shape))
    return regrets
