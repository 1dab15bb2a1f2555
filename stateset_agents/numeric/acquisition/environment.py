"""Acquisition as a `BatchedEnvironment`: a row is a task, an action is an experiment of its menu.

An episode ends when the budget pays no further experiment. What is recommended at any time is the
intervention with the highest posterior mean, and the reward is by how much its regret fell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np

from stateset_agents.numeric.acquisition.campaign import experimented
from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks, joined
from stateset_agents.numeric.acquisition.linear_models import Array
from stateset_agents.numeric.acquisition.rules import RULES, Rule, Situation, expected_improvement
from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Spec, Transition
from stateset_agents.numeric.environments.base import Rule as EnvironmentRule
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

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
"""Of one intervention. Effects are in units of the prior's spread of them, and relative to the best mean."""
CONTEXT_FEATURES = ("left", "experiments left", "expected regret", "spread", "graphs")
"""Of the whole task."""
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

    def __init__(
        self,
        family: LinearFamily,
        *,
        reward: RewardKind = "regret",
        reward_scale: float = 1.0,
        max_experiments: int | None = None,
    ) -> None:
        """`max_experiments`: truncates an episode; when absent, the budget alone ends it."""
        if reward not in ("regret", "expected_regret"):
            raise ConfigurationError(f"reward must be regret or expected_regret, got {reward!r}")
        if not 0 < reward_scale < np.inf:
            raise ConfigurationError(f"reward_scale must be above 0, got {reward_scale}")
        self.family, self._reward, self._scale = family, reward, reward_scale
        self._situation: Situation
        self.spec = Spec(
            name="acquisition",
            observation_shape={
                "candidates": (family.num_actions, len(CANDIDATE_FEATURES)),
                "context": (len(CONTEXT_FEATURES),),
            },
            num_actions=family.num_actions,
            horizon=int(family.budget / family.costs[0] + 1e-9)
            if max_experiments is None
            else max_experiments,
            components=("regret", "expected_regret", "cost"),
        )
        random = np.random.default_rng(derive(0, "acquisition", "draws"))
        size = family.num_variables
        half = random.standard_normal((_DRAWS // 2, size, size + 1))
        self._normals = np.concatenate([half, -half])  # the same for all rows and steps
        self._uniforms = (np.arange(_DRAWS) + 0.5) / _DRAWS
        random.shuffle(self._uniforms)

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
        before, rows = self._situation, np.arange(len(actions))
        outside = (actions < 0) | (actions >= self.spec.num_actions)
        if outside.any():
            row = int(outside.argmax())
            raise ConfigurationError(
                f"row {row}: experiment {actions[row]} is not in the menu: give 0 to "
                f"{self.spec.num_actions - 1}"
            )
        goes_on = before.goes_on
        dear = goes_on & ~before.affordable[rows, actions]
        if dear.any():
            row = int(dear.argmax())
            price, left = before.costs[row, actions[row]], before.left[row]
            raise ConfigurationError(
                f"row {row}: experiment {actions[row]} costs {price:.4g}, above the {left:.4g} that are "
                "left: choose by action_mask()"
            )
        counts = before.counts.copy()
        counts[rows, actions] += goes_on
        number = before.counts.sum(axis=1)
        belief = experimented(self._tasks, before.belief, actions, number)
        spent = np.where(goes_on, before.costs[rows, actions], 0.0)
        self._situation = replace(
            before, belief=belief.where(goes_on, before.belief), left=before.left - spent, counts=counts
        )
        was, was_expected = self._regret, self._expected
        self._look()
        observations = self.observe()
        terminated = ~self._situation.goes_on
        truncated = np.logical_and(~terminated, number + 1 >= self.spec.horizon)
        ended = terminated | truncated
        if self._reward == "regret":
            rewards = self._scale * (np.tanh(was / self._scale) - np.tanh(self._regret / self._scale))
        else:
            rewards = was_expected - self._expected
        return Transition(
            observations=observations,
            rewards=rewards.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            components={
                "regret": np.where(ended, self._regret, 0.0),
                "expected_regret": np.where(ended, self._expected, 0.0),
                "cost": spent,
            },
        )

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows, with the same noise to come."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._tasks, copy._situation = self._tasks.take(rows), self._situation.take(rows)
        copy._regret, copy._expected, copy._unit = self._regret[rows], self._expected[rows], self._unit[rows]
        copy._share = self._share[rows]
        return copy

    def joined(self, others: Sequence[Self]) -> Self:
        """A new environment with these rows and then those of the others, each where it is."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in ("_tasks", "_situation", "_regret", "_expected", "_unit", "_share"):
            setattr(copy, name, joined([getattr(each, name) for each in (self, *others)]))
        return copy

    def action_mask(self) -> BoolArray | None:
        """[B, A] what can be paid."""
        return self._situation.affordable

    # ------------------------------------------------------------------------------ beside it

    def begin(self, tasks: Tasks) -> dict[str, FloatArray]:
        """`reset` with tasks that are there, one per row."""
        self._begin(tasks)
        return self.observe()

    @property
    def situation(self) -> Situation:
        """What a rule may know now."""
        return self._situation

    @property
    def tasks(self) -> Tasks:
        """The rows' tasks, the truth included."""
        return self._tasks

    @property
    def regret(self) -> Array:
        """[B] of what is recommended now."""
        return self._regret

    @property
    def expected_regret(self) -> Array:
        """[B] the same by 32 models drawn from the posterior."""
        return self._expected

    def rule_actions(self, rule: Rule) -> IntArray:
        """[B] what a rule would do now; 0 for rows that have ended."""
        live = np.flatnonzero(self._situation.goes_on)
        actions = np.zeros(len(self._situation.left), dtype=np.int64)
        if len(live):
            actions[live] = rule(self._situation.take(live))
        return actions

    def rules(self) -> Mapping[str, EnvironmentRule]:
        """Those that choose without learning, for a comparison."""

        def played(rule: Rule) -> EnvironmentRule:
            return lambda environment: lambda: environment.rule_actions(rule)

        return {name: played(rule) for name, rule in RULES.items()}

    # ------------------------------------------------------------------------------ inside

    def _begin(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._situation = Situation(
            belief=tasks.belief,
            costs=tasks.menu.costs,
            left=tasks.budget,
            counts=np.zeros(tasks.menu.costs.shape, dtype=np.int64),
            random=np.random.default_rng(0),
        )
        _, deviations = tasks.belief.effect_moments()
        self._unit: Array = np.sqrt((deviations**2).mean(axis=1)) + 1e-12
        self._look()

    def _look(self) -> None:
        """Regrets, and each intervention's share of the drawn models in which it is best."""
        belief, size = self._situation.belief, len(self._situation.left)
        drawn = belief.sampled_effects(
            np.broadcast_to(self._normals, (size, *self._normals.shape)),
            np.broadcast_to(self._uniforms, (size, _DRAWS)),
        )
        means = belief.effect_means()
        recommended = means.argmax(axis=1)
        rows = np.arange(size)
        self._regret: Array = self._tasks.effects.max(axis=1) - self._tasks.effects[rows, recommended]
        self._expected: Array = (drawn.max(axis=2) - drawn[rows, :, recommended]).mean(axis=1)
        best = drawn.argmax(axis=2)
        self._share: Array = (best[..., None] == np.arange(drawn.shape[2])).mean(axis=1)

    def observe(self) -> dict[str, FloatArray]:
        """[B, ...] what the policy sees now."""
        situation, menu, unit = self._situation, self._tasks.menu, self._unit[:, None]
        mean, deviation = situation.belief.effect_moments()
        improvement = expected_improvement(mean, deviation) / unit
        costs, left = situation.costs, situation.left[:, None]
        mean_cost = costs.mean(axis=1, keepdims=True)
        noise = np.empty_like(self._tasks.models.noise)
        np.put_along_axis(noise, self._tasks.models.order, self._tasks.models.noise, axis=1)
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
            "acts directly": self._acts_directly(),
            "variables set": set_size - 1.0,
            "range": np.log(np.sqrt((menu.values**2).sum(axis=2) / set_size)),
            "noise": np.log((menu.is_set * noise[:, None]).sum(axis=2) / set_size),
        }
        assert tuple(columns) == CANDIDATE_FEATURES
        weights = np.maximum(situation.belief.graph_weights, 1e-30)
        context = {
            "left": situation.left / self._tasks.budget,
            "experiments left": np.log1p(situation.left / mean_cost[:, 0]),
            "expected regret": self._expected / self._unit,
            "spread": np.sqrt((deviation**2).mean(axis=1)) / self._unit,
            "graphs": -(weights * np.log(weights)).sum(axis=1),
        }
        assert tuple(context) == CONTEXT_FEATURES
        return {
            "candidates": np.stack(list(columns.values()), axis=-1).astype(np.float32),
            "context": np.stack(list(context.values()), axis=-1).astype(np.float32),
        }

    def _acts_directly(self) -> Array:
        """[B, A] probability that a variable which is set is a parent of the target."""
        belief = self._situation.belief
        target = belief.position[..., None, None]
        own = np.take_along_axis(belief.is_parent, target, axis=2)[:, :, 0, 1:]  # [B, K, d]
        direct = (belief.plan.is_set & own[:, :, None, :]).any(axis=-1)
        found: Array = (belief.graph_weights[..., None] * direct).sum(axis=1)
        return found
