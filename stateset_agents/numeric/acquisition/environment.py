"""Acquisition as a `BatchedEnvironment`: a row is a task, an action is an experiment of its menu.

An episode ends when the budget pays no further experiment. What is recommended at any time is the
intervention with the highest posterior mean, and the reward is by how much its regret fell.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Self

import numpy as np

from stateset_agents.numeric.acquisition.campaign import measured
from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.linear_models import Array, joined, taken
from stateset_agents.numeric.acquisition.rules import RULES, Rule, Situation, expected_improvement
from stateset_agents.numeric.acquisition.surrogates import Surrogate, SurrogateBelief
from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Spec, Transition
from stateset_agents.numeric.environments.base import Rule as EnvironmentRule
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that

RewardKind = Literal["regret", "expected_regret"]

CANDIDATE_FEATURES = (
    "mean",
    "deviation",
    "improvement",
    "improvement per cost",
    "probability of being best",
    "cost",
    "share of what is left",
    "affordable",
    "count",
    "acts directly",
    "variables set",
    "range",
    "noise",
)
"""Features of one intervention. Effects are in units of the prior's spread of them, and relative to the best
mean."""
CONTEXT_FEATURES = ("left", "experiments left", "expected regret", "spread", "graphs")
"""Features of the whole task."""
_DRAWS = 32


def linear_acquisition(
    *,
    reward: RewardKind = "expected_regret",
    reward_scale: float = 1.0,
    max_experiments: int | None = None,
    num_variables: int = 5,
    density: float = 0.6,
    noise: tuple[float, float] = (0.5, 0.5),
    costs: tuple[float, float] = (1.0, 20.0),
    budget: float = 20.0,
    num_observations: int = 0,
    num_graphs: int = 1,
    set_at_once: int = 1,
) -> AcquisitionEnv:
    """An `AcquisitionEnv` of a `LinearFamily` from plain numbers, for `environment: causal_acquisition`."""
    family = LinearFamily(
        num_variables=num_variables,
        density=density,
        noise=(noise[0], noise[1]),
        costs=(costs[0], costs[1]),
        budget=budget,
        num_observations=num_observations,
        num_graphs=num_graphs,
        set_at_once=set_at_once,
    )
    return AcquisitionEnv(family, reward=reward, reward_scale=reward_scale, max_experiments=max_experiments)


class AcquisitionEnv:
    """Observations by name: `candidates` [B, A, 13] and `context` [B, 5], see CANDIDATE_FEATURES and
    CONTEXT_FEATURES.

    `reward`: "regret" is the fall of tanh(regret / s) s, s being `reward_scale`, since a few regrets are very
    large; "expected_regret" is the fall of the posterior's own expectation, by 32 models drawn from it, whose
    mean is that of the raw regret's fall while most of its noise is gone.
    Components: the raw regret and its posterior expectation at the end (0 in every step before), and what was
    paid.
    """

    situation: Situation
    """Information that a rule may use now."""
    tasks: Tasks
    """The rows' tasks, the truth included."""
    regret: Array  # [B]
    """Regret of the interventions that are recommended now."""
    expected_regret: Array  # [B]
    """The same by 32 models drawn from the posterior."""

    def __init__(
        self,
        family: LinearFamily,
        *,
        reward: RewardKind = "regret",
        reward_scale: float = 1.0,
        max_experiments: int | None = None,
        surrogate: Surrogate | None = None,
    ) -> None:
        """`max_experiments`: truncates an episode; when absent, the budget alone ends it. `surrogate`: what
        believes in place of the exact posterior."""
        expect_that(reward in ("regret", "expected_regret"), "reward", "be regret or expected_regret", reward)
        expect_that(0 < reward_scale < np.inf, "reward_scale", "be above 0", reward_scale)
        self.family, self.surrogate, self._reward, self._scale = family, surrogate, reward, reward_scale
        self.spec = Spec(
            name="acquisition",
            observation_shape={
                "candidates": (family.num_actions, len(CANDIDATE_FEATURES)),
                "context": (len(CONTEXT_FEATURES),),
            },
            num_actions=family.num_actions,
            horizon=family.most_experiments if max_experiments is None else max_experiments,
            components=("regret", "expected_regret", "cost"),
        )

    # ------------------------------------------------------------------------------ as the protocol has it

    def reset(self, seeds: Sequence[int]) -> dict[str, FloatArray]:
        """One task per seed, whose experiments' noise follows from the seed and their number."""
        distinct, rows = np.unique(np.array(seeds, dtype=np.uint64), return_inverse=True)
        return self.begin(self.family.draw([int(seed) for seed in distinct]).take(rows))

    def step(self, actions: IntArray) -> Transition:
        """Make one experiment in every row that can pay it.

        Raises ConfigurationError for an experiment that is not in the menu, and for one that costs more than
        what is left while another would not.
        """
        before, rows = self.situation, np.arange(len(actions))
        outside = (actions < 0) | (actions >= self.spec.num_actions)
        if outside.any():
            row = int(outside.argmax())
            raise ConfigurationError(
                f"row {row}: experiment {actions[row]} is not in the menu, 0 to {self.spec.num_actions - 1}"
            )
        goes_on = before.goes_on
        dear = goes_on & ~before.affordable[rows, actions]
        if dear.any():
            row = int(dear.argmax())
            price, left = before.costs[row, actions[row]], before.left[row]
            raise ConfigurationError(
                f"row {row}: experiment {actions[row]} costs {price:.4g}, above {left:.4g}: see action_mask()"
            )
        number = before.counts.sum(axis=1)
        belief = before.belief.updated(*measured(self.tasks, actions, number), goes_on)
        self.situation = before.after(actions, belief, goes_on)
        was, was_expected = self.regret, self.expected_regret
        self._look()
        observations = self.observe()
        terminated = ~self.situation.goes_on
        truncated = np.logical_and(~terminated, number + 1 >= self.spec.horizon)
        ended = terminated | truncated
        if self._reward == "regret":
            rewards = self._scale * (np.tanh(was / self._scale) - np.tanh(self.regret / self._scale))
        else:
            rewards = was_expected - self.expected_regret
        return Transition(
            observations=observations,
            rewards=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            components={
                "regret": np.where(ended, self.regret, 0.0),
                "expected_regret": np.where(ended, self.expected_regret, 0.0),
                "cost": np.where(goes_on, before.costs[rows, actions], 0.0),
            },
        )

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows, with the same noise to come."""
        return self._with_rows(lambda name: taken(getattr(self, name), rows))

    def joined(self, others: Sequence[Self]) -> Self:
        """A new environment with these rows and then those of the others, each where it is."""
        return self._with_rows(lambda name: joined([getattr(each, name) for each in (self, *others)]))

    def _with_rows(self, rows_of: Callable[[str], Any]) -> Self:
        """A copy whose attributes of rows, by name, are what `rows_of` gives."""
        other = copy.copy(self)
        for name in ("tasks", "situation", "regret", "expected_regret", "_unit", "_share"):
            setattr(other, name, rows_of(name))
        return other

    def action_mask(self) -> BoolArray | None:
        """[B, A] what can be paid."""
        return self.situation.affordable

    # ------------------------------------------------------------------------------ beside it

    def begin(self, tasks: Tasks) -> dict[str, FloatArray]:
        """`reset` with tasks that are there, one per row."""
        self.tasks = tasks
        belief = tasks.belief if self.surrogate is None else SurrogateBelief.begun(self.surrogate, tasks)
        self.situation = Situation.first(belief, tasks.menu, tasks.budget, np.random.default_rng(0))
        _, deviations = belief.effect_moments()
        self._unit: Array = np.sqrt((deviations**2).mean(axis=1)) + 1e-12
        self._look()
        return self.observe()

    def believing(self, surrogate: Surrogate) -> Self:
        """A copy in which this surrogate believes, of the same experiments.

        Raises ConfigurationError where experiments were made by the exact posterior, which keeps none.
        """
        other, belief = copy.copy(self), self.situation.belief
        other.surrogate = surrogate
        other.begin(self.tasks)
        if isinstance(belief, SurrogateBelief):
            other.situation = replace(self.situation, belief=belief.by(surrogate))
            other._look()
        else:
            rule, hint = "be 0, as it keeps none for a surrogate", "begin with the surrogate"
            number = int(self.situation.counts.sum())
            expect_that(not number, "experiments by the exact posterior", rule, number, hint)
        return other

    def rule_actions(self, rule: Rule) -> IntArray:
        """[B] what a rule would do now; 0 for rows that have ended."""
        live = np.flatnonzero(self.situation.goes_on)
        actions = np.zeros(len(self.situation), dtype=np.int64)
        if len(live):
            actions[live] = rule(self.situation.take(live))
        return actions

    def rules(self) -> Mapping[str, EnvironmentRule]:
        """Rules without learning, by name, to compare a policy with."""

        def played(rule: Rule) -> EnvironmentRule:
            return lambda environment: lambda: environment.rule_actions(rule)

        return {name: played(rule) for name, rule in RULES.items()}

    # ------------------------------------------------------------------------------ inside

    def _look(self) -> None:
        """Regrets, and each intervention's share of the drawn models in which it is best."""
        belief, size = self.situation.belief, len(self.situation)
        normals, uniforms = _draws(belief.draw_shape)
        drawn = belief.sampled_effects(
            np.broadcast_to(normals, (size, *normals.shape)), np.broadcast_to(uniforms, (size, _DRAWS))
        )
        recommended = belief.effect_means().argmax(axis=1)
        rows = np.arange(size)
        self.regret = self.tasks.effects.max(axis=1) - self.tasks.effects[rows, recommended]
        self.expected_regret = (drawn.max(axis=2) - drawn[rows, :, recommended]).mean(axis=1)
        best = drawn.argmax(axis=2)
        self._share: Array = (best[..., None] == np.arange(drawn.shape[2])).mean(axis=1)

    def observe(self) -> dict[str, FloatArray]:
        """[B, ...] what the policy sees now."""
        situation, menu, unit = self.situation, self.tasks.menu, self._unit[:, None]
        mean, deviation = situation.belief.effect_moments()
        improvement = expected_improvement(mean, deviation) / unit
        costs, left = situation.costs, situation.left[:, None]
        mean_cost = costs.mean(axis=1, keepdims=True)
        noise = np.empty_like(self.tasks.models.noise)
        np.put_along_axis(noise, self.tasks.models.order, self.tasks.models.noise, axis=1)
        set_size = menu.is_set.sum(axis=2)
        columns = {
            "mean": (mean - mean.max(axis=1, keepdims=True)) / unit,
            "deviation": deviation / unit,
            "improvement": improvement,
            "improvement per cost": improvement * mean_cost / costs,
            "probability of being best": self._share,
            "cost": np.log(costs / mean_cost),
            "share of what is left": np.minimum(costs / np.maximum(left, 1e-9), 2.0),
            "affordable": situation.affordable,
            "count": np.log1p(situation.counts),
            "acts directly": situation.belief.acts_directly(),
            "variables set": set_size - 1.0,
            "range": np.log(np.sqrt((menu.values**2).sum(axis=2) / set_size)),
            "noise": np.log((menu.is_set * noise[:, None]).sum(axis=2) / set_size),
        }
        assert tuple(columns) == CANDIDATE_FEATURES
        weights = np.maximum(situation.belief.graph_weights, 1e-30)
        context = {
            "left": situation.left / self.tasks.budget,
            "experiments left": np.log1p(situation.left / mean_cost[:, 0]),
            "expected regret": self.expected_regret / self._unit,
            "spread": np.sqrt((deviation**2).mean(axis=1)) / self._unit,
            "graphs": -(weights * np.log(weights)).sum(axis=1),
        }
        assert tuple(context) == CONTEXT_FEATURES
        return {
            "candidates": np.stack(list(columns.values()), axis=-1).astype(np.float32),
            "context": np.stack(list(context.values()), axis=-1).astype(np.float32),
        }


@cache
def _draws(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """The numbers from which models are drawn, the same for all rows and steps."""
    random = np.random.default_rng(derive(0, "acquisition", "draws"))
    half = random.standard_normal((_DRAWS // 2, *shape))
    uniforms = (np.arange(_DRAWS) + 0.5) / _DRAWS
    random.shuffle(uniforms)
    return np.concatenate([half, -half]), uniforms
