"""States of a campaign as values: every step gives a new one and leaves the old one as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.linear_models import Array, Bools, Ints
from stateset_agents.numeric.environments.base import BoolArray, FloatArray
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive


@dataclass(frozen=True, slots=True, eq=False)
class AcquisitionState:
    """B campaigns under way. Nothing here changes it: what acts works on copies."""

    environment: AcquisitionEnv

    def __len__(self) -> int:
        return len(self.environment.situation.left)

    @property
    def observations(self) -> dict[str, FloatArray]:
        """The policy's observations, as `AcquisitionEnv` gives them."""
        return self.environment.observe()

    @property
    def mask(self) -> BoolArray:
        """[B, A] what can be paid."""
        return self.environment.situation.affordable

    @property
    def goes_on(self) -> Bools:
        """[B] can any experiment be paid?"""
        return self.environment.situation.goes_on

    def take(self, rows: Ints) -> AcquisitionState:
        """A state of these rows alone; rows may repeat, and repeated ones have the same noise to come."""
        return AcquisitionState(self.environment.fork(rows))

    def joined(self, others: Sequence[AcquisitionState]) -> AcquisitionState:
        """A state of these rows and then those of the others."""
        return AcquisitionState(self.environment.joined([other.environment for other in others]))

    def after(self, actions: Ints) -> AcquisitionState:
        """The state after one experiment in every row that has not ended."""
        copy = self.environment.fork(np.arange(len(self)))
        copy.step(actions)
        return AcquisitionState(copy)

    def worth(self) -> dict[str, Array]:
        """[B] each: what an experiment may better, more is better; differences of it are rewards.

        regret and expected_regret with their sign turned; `structure`, -entropy of the graphs in nats;
        `precision`, - mean logarithm of the effects' deviations; `cost`, the budget's share that is left.
        """
        environment = self.environment
        belief, budget = environment.situation.belief, environment.tasks.budget
        weights = np.maximum(belief.graph_weights, 1e-30)
        _, deviations = belief.effect_moments()
        return {
            "regret": -environment.regret,
            "expected_regret": -environment.expected_regret,
            "structure": (weights * np.log(weights)).sum(axis=1),
            "precision": -np.log(deviations + 1e-6).mean(axis=1),
            "cost": environment.situation.left / budget,
        }


def create_random_scm(key: int, family: LinearFamily | None = None, *, number: int = 1) -> Tasks:
    """`number` random models with what is known of them; a function of `key` alone. The default family is
    the one on which looking ahead gains much: 5 variables, costs 1 to 20, budget 20."""
    family = family or LinearFamily(costs=(1.0, 20.0), budget=20.0)
    return family.draw([derive(key, "scm", index) for index in range(number)])


def create_acquisition_state(family: LinearFamily, tasks: Tasks, **settings: Any) -> AcquisitionState:
    """The state of these tasks of `family` before the first experiment. `settings`: of `AcquisitionEnv`."""
    if tasks.menu.costs.shape[1] != family.num_actions:
        raise ConfigurationError(
            f"the tasks have {tasks.menu.costs.shape[1]} interventions and the family has "
            f"{family.num_actions}: give the family that drew them"
        )
    environment = AcquisitionEnv(family, **settings)
    environment.begin(tasks)
    return AcquisitionState(environment)
