"""A causal model with mechanisms of any kind: samples, do(), costs, and the models that papers give.

One model at a time, all samples of it as arrays: what `causal_bo.optimize` experiments on. Where every
mechanism is linear with Gaussian noise, `numeric.acquisition.linear_models` has thousands of models at once,
and exact effects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stateset_agents.numeric.acquisition.graphs import ASIA, COMPLETE, TOY, CausalGraph
from stateset_agents.numeric.acquisition.linear_models import Array
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

Mechanism = Callable[..., Array]
"""(noise [n], one array [n] per parent) -> [n] values."""
Intervention = Mapping[str, float]
"""Variables and what they are set to, at once."""
Noise = Literal["normal", "uniform"]
CostType = Literal["fixed", "fixed and value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A variable's mechanism, and the limits and cost of setting it."""

    mechanism: Mechanism
    noise: Noise = "normal"
    """Standard normal, or uniform in [0, 1)."""
    limits: tuple[float, float] | None = None
    """It may be set within these; None: it cannot be set."""
    cost: float = 1.0
    """Cost of setting it once."""

    def __post_init__(self) -> None:
        hint = "a free experiment would be repeated for ever"
        expect_that(0 < self.cost < np.inf, "cost", "be above 0", self.cost, hint)
        if self.limits is not None and not self.limits[0] <= self.limits[1]:
            raise ConfigurationError(f"limits must be the lower and the upper one, got {self.limits}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalModel:
    """A graph and a `Variable` for each of its names.

    Raises ConfigurationError where names differ, or a hidden variable or the target can be set.
    """

    graph: CausalGraph
    variables: Mapping[str, Variable]
    cost_type: CostType = "fixed"
    """An experiment costs the sum of its variables' costs; "fixed and value" adds their absolute values."""

    def __post_init__(self) -> None:
        if self.variables.keys() != set(self.graph.names):
            odd = sorted(self.variables.keys() ^ set(self.graph.names))
            raise ConfigurationError(f"{odd[0]!r} is in one of graph and variables only: give the same names")
        for name in (self.graph.target, *sorted(self.graph.hidden)):
            if self.variables[name].limits is not None:
                kind = "the target" if name == self.graph.target else "hidden"
                raise ConfigurationError(f"{name} is {kind} and has limits: it cannot be set, leave them out")

    @property
    def settable(self) -> tuple[str, ...]:
        """Variables that can be set and act on the target, in topological order."""
        ancestors = self.graph.ancestors()
        return tuple(
            name
            for name in self.graph.order()
            if self.variables[name].limits is not None and name in ancestors
        )

    def check(self, intervention: Intervention) -> None:
        """Raises ConfigurationError for a target, a name or a value that cannot be."""
        for name, value in intervention.items():
            if name not in self.variables:
                raise ConfigurationError(
                    f"do({name}): no such variable; there are {', '.join(self.graph.names)}"
                )
            if name == self.graph.target:
                raise ConfigurationError(f"do({name}): {name} is the target, which is measured and not set")
            limits = self.variables[name].limits
            if limits is None:
                raise ConfigurationError(
                    f"do({name}): {name} cannot be set; choose of {', '.join(self.settable)}"
                )
            if not limits[0] <= value <= limits[1]:
                raise ConfigurationError(
                    f"do({name}={value:g}) is out of range: give a value from {limits[0]:g} to {limits[1]:g}"
                )

    def cost(self, intervention: Intervention) -> float:
        """The cost of an experiment, in units of the budget."""
        self.check(intervention)
        fixed = sum(self.variables[name].cost for name in intervention)
        return fixed + (sum(map(abs, intervention.values())) if self.cost_type == "fixed and value" else 0.0)

    def check_budget(self, budget: float) -> None:
        """Raises ConfigurationError for a budget that pays no experiment at all."""
        cheapest = min(
            self.cost({name: min(max(0.0, limits[0]), limits[1])})
            for name in self.settable
            if (limits := self.variables[name].limits) is not None
        )
        if not budget >= cheapest:
            raise ConfigurationError(
                f"budget {budget:g} is below the cheapest experiment's {cheapest:g}: raise it"
            )
        if budget == math.inf:
            raise ConfigurationError("budget inf never ends: give what may be spent")

    def sample(
        self, number: int, random: np.random.Generator, intervention: Intervention | None = None
    ) -> dict[str, Array]:
        """[number] values of each variable, hidden ones too; without an intervention, observed."""
        self.check(intervention or {})
        columns: dict[str, Array] = {}
        for name in self.graph.order():
            variable = self.variables[name]
            # Drawn for a variable that is set, too: two interventions from one seed share all other noise.
            noise = random.standard_normal(number) if variable.noise == "normal" else random.random(number)
            if intervention and name in intervention:
                columns[name] = np.full(number, float(intervention[name]))
                continue
            values = variable.mechanism(noise, *(columns[parent] for parent in self.graph.parents[name]))
            columns[name] = np.asarray(values, dtype=np.float64)
        return columns

    def observed(self, sample: Mapping[str, Array]) -> dict[str, Array]:
        """A sample without what is hidden."""
        return {name: values for name, values in sample.items() if name not in self.graph.hidden}

    def effect(
        self, intervention: Intervention, number: int, random: np.random.Generator
    ) -> tuple[float, float]:
        """E[target | do(intervention)] from `number` samples, and its standard error."""
        values = self.sample(number, random, intervention)[self.graph.target]
        return float(values.mean()), float(values.std(ddof=1) / np.sqrt(number))


# ------------------------------------------------------------------------------------------ of papers


def toy_graph(*, costs: Mapping[str, float] | None = None, cost_type: CostType = "fixed") -> CausalModel:
    """ToyGraph: X -> Z = exp(-X) + noise -> Y = cos Z - exp(-Z / 20) + noise; Y is to be low.

    `costs`: of X and Z, 1 when absent; the paper's unequal ones are 1 and 10.
    """
    price = {"X": 1.0, "Z": 1.0, **(costs or {})}
    return CausalModel(
        graph=TOY,
        cost_type=cost_type,
        variables={
            "X": Variable(mechanism=lambda noise: noise, limits=(-5.0, 5.0), cost=price["X"]),
            "Z": Variable(
                mechanism=lambda noise, x: np.exp(-x) + noise, limits=(-5.0, 20.0), cost=price["Z"]
            ),
            "Y": Variable(mechanism=lambda noise, z: np.cos(z) - np.exp(-z / 20) + noise),
        },
    )


def complete_graph(*, costs: Mapping[str, float] | None = None, cost_type: CostType = "fixed") -> CausalModel:
    """CompleteGraph: seven variables that are seen and two that are not; Y is to be low.

    `costs`: of B, D, E and F, 1 when absent; the paper's unequal ones are 10, 5, 20 and 3.
    """
    price = {"B": 1.0, "D": 1.0, "E": 1.0, "F": 1.0, **(costs or {})}
    return CausalModel(
        graph=COMPLETE,
        cost_type=cost_type,
        variables={
            "U1": Variable(mechanism=lambda noise: noise),
            "U2": Variable(mechanism=lambda noise: noise),
            "F": Variable(mechanism=lambda noise: noise, limits=(-4.0, 4.0), cost=price["F"]),
            "A": Variable(mechanism=lambda noise, f, u1: f**2 + u1 + noise),
            "B": Variable(mechanism=lambda noise, u2: u2 + noise, limits=(-5.0, 4.0), cost=price["B"]),
            "C": Variable(mechanism=lambda noise, b: np.exp(-b) + noise),
            "D": Variable(
                mechanism=lambda noise, c: np.exp(-c) / 10 + noise, limits=(-5.0, 5.0), cost=price["D"]
            ),
            "E": Variable(
                mechanism=lambda noise, a, c: np.cos(a) + c / 10 + noise, limits=(-6.0, 3.0), cost=price["E"]
            ),
            "Y": Variable(
                mechanism=lambda noise, d, e, u1, u2: (
                    np.cos(d) - d / 5 + np.sin(e) - e / 4 + u1 + np.exp(-u2) + noise
                )
            ),
        },
    )


def _table(*shares: float) -> Mechanism:
    """Binary: 1 with a probability that the parents choose, the first parent being the highest digit."""
    table = np.array(shares)

    def draw(noise: Array, *parents: Array) -> Array:
        index = np.zeros(len(noise), dtype=np.int64)
        for parent in parents:
            index = 2 * index + (parent > 0.5)
        return (noise < table[index]).astype(np.float64)

    return draw


def asia() -> CausalModel:
    """Asia with the tables of its paper; every variable but the target can be set to a value from 0 to 1,
    which its children read as 1 above a half."""
    tables = {
        "asia": _table(0.01),
        "smoke": _table(0.5),
        "tub": _table(0.01, 0.05),
        "lung": _table(0.01, 0.1),
        "bronc": _table(0.3, 0.6),
        "either": _table(0.0, 1.0, 1.0, 1.0),
        "xray": _table(0.05, 0.98),
        "dysp": _table(0.1, 0.7, 0.8, 0.9),
    }
    return CausalModel(
        graph=ASIA,
        variables={
            name: Variable(
                mechanism=table, noise="uniform", limits=None if name == ASIA.target else (0.0, 1.0)
            )
            for name, table in tables.items()
        },
    )


# ------------------------------------------------------------------------------------------ random


def random_graph(num_variables: int, density: float, random: np.random.Generator) -> CausalGraph:
    """Variables V0, V1, ... in a random order; each earlier one is a parent of each later one with chance
    `density` (Erdős and Rényi's model, directed). The last one is the target and has a parent at least."""
    expect_that(
        num_variables >= 2, "num_variables", "be at least 2", num_variables, "a target and what acts on it"
    )
    expect_that(0 < density <= 1, "density", "be above 0 and at most 1", density)
    names = [f"V{number}" for number in random.permutation(num_variables)]
    parents = {
        name: tuple(above for above in names[:place] if random.random() < density)
        for place, name in enumerate(names)
    }
    if not parents[names[-1]]:
        parents[names[-1]] = (names[-2],)
    return CausalGraph(parents=parents, target=names[-1])


def random_model(
    graph: CausalGraph,
    kind: Literal["linear", "nonlinear", "discrete"],
    random: np.random.Generator,
    *,
    noise: float = 0.5,
    limit: float = 2.0,
    costs: tuple[float, float] = (1.0, 1.0),
) -> CausalModel:
    """Random mechanisms for a graph; what is seen and is not the target can be set from -limit to limit.

    linear: b + sum w x + noise, w and b normal; nonlinear: with tanh(w x) + .3 sin(2 w x) for each w x;
    discrete: binary by a random table. `costs`: uniform between these.
    """
    variables = {}
    for name in graph.names:
        number = len(graph.parents[name])
        if kind == "discrete":
            mechanism, law, limits = _table(*random.random(2**number)), "uniform", (0.0, 1.0)
        else:
            weights, bias = random.standard_normal(number), 0.5 * random.standard_normal()
            mechanism, law, limits = (
                _weighted(weights, bias, noise, kind == "nonlinear"),
                "normal",
                (-limit, limit),
            )
        fixed = name == graph.target or name in graph.hidden
        variables[name] = Variable(
            mechanism=mechanism,
            noise="uniform" if law == "uniform" else "normal",
            limits=None if fixed else limits,
            cost=float(random.uniform(*costs)),
        )
    return CausalModel(graph=graph, variables=variables)


def _weighted(weights: Array, bias: float, deviation: float, bent: bool) -> Mechanism:
    def value(noise: Array, *parents: Array) -> Array:
        total = bias + deviation * noise
        for weight, parent in zip(weights, parents, strict=True):
            part = weight * parent
            total = total + (np.tanh(part) + 0.3 * np.sin(2 * part) if bent else part)
        return total

    return value
