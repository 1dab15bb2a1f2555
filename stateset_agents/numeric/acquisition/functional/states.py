"""States of a campaign as values: every step gives a new one and leaves the old one as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stateset_agents.numeric.acquisition.environment import AcquisitionEnv
from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks, as_key
from stateset_agents.numeric.acquisition.linear_models import Array, Bools, Ints, joined
from stateset_agents.numeric.acquisition.surrogates import Surrogate
from stateset_agents.numeric.environments.base import BoolArray, FloatArray
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that


@dataclass(frozen=True, slots=True, eq=False)
class AcquisitionState:
    """B campaigns under way, `state[i]` being one of them. Nothing here changes it: what acts works on
    copies."""

    environment: AcquisitionEnv
    observations: dict[str, FloatArray]
    """What the policy sees of them, as `AcquisitionEnv` gives it."""

    def __len__(self) -> int:
        return len(self.environment.situation.left)

    def __getitem__(self, rows: int | slice) -> AcquisitionState:
        places = np.arange(len(self))[rows]  # IndexError behind the last, so that a loop ends
        return self.take(np.atleast_1d(places))

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
        seen = {name: part[rows] for name, part in self.observations.items()}
        return AcquisitionState(self.environment.fork(rows), seen)

    def joined(self, others: Sequence[AcquisitionState]) -> AcquisitionState:
        """A state of these rows and then those of the others."""
        return _state(self.environment.joined([other.environment for other in others]))

    def after(self, actions: Ints) -> AcquisitionState:
        """The state after one experiment in every row that has not ended."""
        environment = self.environment.fork(np.arange(len(self)))
        seen: Any = environment.step(actions).observations
        return AcquisitionState(environment, seen)

    def believing(self, surrogate_model: Surrogate | None, surrogate_params: Any = None) -> AcquisitionState:
        """The state in which this surrogate, with these parameters, believes of the same experiments. None:
        the state as it is.

        Raises ConfigurationError for parameters without a torch module that takes them.
        """
        surrogate: Any = surrogate_model
        if surrogate_params is not None:
            rule, kind = "be None where surrogate_model is no torch module", type(surrogate_params).__name__
            expect_that(isinstance(surrogate, torch.nn.Module), "surrogate_params", rule, kind)
            surrogate = deepcopy(surrogate)
            surrogate.load_state_dict(surrogate_params)
        if surrogate is None or surrogate is self.environment.surrogate:
            return self
        return _state(self.environment.believing(surrogate))

    def interventions(self, actions: Ints) -> list[dict[int, float]]:
        """What each row's action sets: the variable's number and the value."""
        menu, rows = self.environment.tasks.menu, np.arange(len(self))
        sets, values = menu.is_set[rows, actions], menu.values[rows, actions]
        return [
            {int(number): float(values[row, number]) for number in np.flatnonzero(sets[row])} for row in rows
        ]

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


def create_random_scm(
    key: int | torch.Generator, family: LinearFamily | None = None, *, number: int = 1
) -> Tasks:
    """`number` random models with what is known of them; a function of `key` alone. The default family is
    the one on which looking ahead gains much: 5 variables, costs 1 to 20, budget 20."""
    family, seed = family or LinearFamily(costs=(1.0, 20.0), budget=20.0), as_key(key)
    return family.draw([derive(seed, "scm", index) for index in range(number)])


def create_acquisition_state(scms: Tasks | Sequence[Tasks], **settings: Any) -> AcquisitionState:
    """The state of these models before the first experiment. `settings`: of `AcquisitionEnv`, such as
    `surrogate`."""
    tasks = joined_scms(scms)
    environment = AcquisitionEnv(tasks.family, **settings)
    return AcquisitionState(environment, environment.begin(tasks))


def joined_scms(scms: Tasks | Sequence[Tasks]) -> Tasks:
    """Models of one family as one value.

    Raises ConfigurationError for models of several families, and for none.
    """
    if isinstance(scms, Tasks):
        return scms
    together: Tasks = joined(_alike("scms", scms, lambda tasks: tasks.family))
    return together


def joined_states(states: AcquisitionState | Sequence[AcquisitionState]) -> AcquisitionState:
    """States of one family and one surrogate as one value.

    Raises ConfigurationError for states of several, and for none.
    """
    if isinstance(states, AcquisitionState):
        return states
    _alike("states", states, lambda state: (state.environment.family, state.environment.surrogate))
    return states[0].joined(states[1:])


def check_scms(scms: Tasks | Sequence[Tasks], states: AcquisitionState) -> None:
    """Raises ConfigurationError for other models than those that answer the states' experiments."""
    is_same = np.array_equal(joined_scms(scms).keys, states.environment.tasks.keys)
    rule, hint = "be the models that the states were made of", "make states by create_acquisition_state(scms)"
    expect_that(is_same, "scms", rule, "others, or in another order", hint)


def _state(environment: AcquisitionEnv) -> AcquisitionState:
    return AcquisitionState(environment, environment.observe())


def _alike(name: str, parts: Sequence[Any], kind_of: Callable[[Any], Any]) -> Sequence[Any]:
    expect_that(len(parts) > 0, name, "be at least one", len(parts))
    for index, part in enumerate(parts):
        rule, hint = f"be of the family and surrogate of {name}[0]", "train families one after another"
        expect_that(kind_of(part) == kind_of(parts[0]), f"{name}[{index}]", rule, "another", hint)
    return parts
