"""Families of tasks: random linear-Gaussian models with data, menus, costs and a budget, many at once.

Everything of a task follows from its seed alone, by counters instead of generators, so that a thousand tasks
are drawn as arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import torch

from stateset_agents.numeric.acquisition.graphs import CausalGraph
from stateset_agents.numeric.acquisition.linear_models import (
    Array,
    Belief,
    Bools,
    Ints,
    LinearModels,
    Menu,
    Rows,
)
from stateset_agents.numeric.rollout import uniforms
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

_NOISE_FROM = 1 << 20
"""Position in a task's stream at which the noise of its experiments begins."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tasks(Rows):
    """B tasks: the truth, what is known of it before the first experiment, and what experiments cost."""

    models: LinearModels
    belief: Belief
    menu: Menu
    budget: Array  # [B]
    effects: Array  # [B, A]
    """True E[target | do(intervention)] of the whole menu."""
    keys: np.ndarray  # [B] uint64
    """Keys of the streams from which experiments draw their noise."""
    observations: Array  # [B, n, d]
    """Rows of observational data, which `belief` has learned."""
    family: LinearFamily
    """The family that drew them."""

    def noise(self, experiment: int | Ints) -> Array:
        """[B, d] standard normal numbers of experiment 0, 1, ... of each task, whatever was done before.

        `experiment`: one number, or [B] of them."""
        num_variables = self.models.noise.shape[1]
        return normals(self.keys, _NOISE_FROM + experiment * num_variables, num_variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFamily:
    """Random graphs whose weights, noise, ranges and costs are drawn from what is said here.

    The last variable is the target; every other one can be set to either end of its range.
    """

    num_variables: int = 5
    density: float = 0.6
    """Share of the pairs of variables that have an edge."""
    weight_scale: float = 1.0
    """Standard deviation of weights and, times `intercept_scale`, of intercepts."""
    intercept_scale: float = 0.5
    noise: tuple[float, float] = (0.5, 0.5)
    """Standard deviations between these, uniform in the logarithm."""
    ranges: tuple[float, float] = (1.0, 1.0)
    """Each variable may be set to plus or minus a number between these, uniform in the logarithm."""
    costs: tuple[float, float] = (0.5, 2.0)
    """Limits of the cost of setting a variable, uniform in the logarithm; several at once cost their sum."""
    budget: float = 5.0
    num_observations: int = 0
    """Rows of observational data that are known at the start."""
    num_graphs: int = 1
    """Graphs that could be the true one; 1: the graph is known."""
    set_at_once: int = 1
    """Variables that an experiment may set together."""
    graph: CausalGraph | None = None
    """Graph of every task; None draws random graphs. Its target gets the last number."""

    def __post_init__(self) -> None:
        hint = "a target and what acts on it"
        expect_that(self.num_variables >= 2, "num_variables", "be at least 2", self.num_variables, hint)
        hint = "the target needs ancestors"
        expect_that(0 < self.density <= 1, "density", "be above 0 and at most 1", self.density, hint)
        for name in ("noise", "ranges", "costs"):
            low, high = getattr(self, name)
            expect_that(
                0 < low <= high < np.inf, name, "be two positive numbers, the lower first", (low, high)
            )
        if not self.costs[1] <= self.budget < np.inf:
            raise ConfigurationError(
                f"budget {self.budget} is below a single experiment's cost of up to {self.costs[1]}, or "
                "without end: raise it, or lower costs"
            )
        for name, least in (("num_observations", 0), ("num_graphs", 1), ("set_at_once", 1)):
            expect_that(getattr(self, name) >= least, name, f"be at least {least}", getattr(self, name))
        if self.set_at_once >= self.num_variables:
            raise ConfigurationError(
                f"set_at_once must be below num_variables {self.num_variables}, got {self.set_at_once}"
            )

        if self.graph is not None:
            self._check_graph(self.graph)

    def _check_graph(self, graph: CausalGraph) -> None:
        rule = f"be {len(graph.names)}, as the graph has"
        expect_that(self.num_variables == len(graph.names), "num_variables", rule, self.num_variables)
        rule = "be 1 where the graph is given"
        expect_that(self.num_graphs <= 1, "num_graphs", rule, self.num_graphs, "leave one out")
        if graph.hidden:
            raise ConfigurationError(
                f"{', '.join(sorted(graph.hidden))} of the graph is hidden: the exact posterior needs all "
                "variables measured; give a graph without hidden ones"
            )

    @property
    def most_experiments(self) -> int:
        """Experiments that the budget pays where all have the lowest cost."""
        return int(self.budget / self.costs[0] + 1e-9)

    @property
    def num_actions(self) -> int:
        """Interventions of the menu."""
        return len(self._sets())

    def _sets(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(variables, signs) of every intervention."""
        names = range(self.num_variables - 1)
        return [
            (chosen, signs)
            for size in range(1, self.set_at_once + 1)
            for chosen in combinations(names, size)
            for signs in product((-1, 1), repeat=size)
        ]

    def draw(self, seeds: Sequence[int]) -> Tasks:
        """One task per seed; equal seeds give equal tasks."""
        keys = np.array(seeds, dtype=np.uint64)
        size = self.num_variables
        stream = _Stream(keys)
        noise = _between(stream.uniforms(size), self.noise)
        reach = _between(stream.uniforms(size - 1), self.ranges)
        price = _between(stream.uniforms(size - 1), self.costs)
        order, is_parent = self._graphs(stream)
        rows = np.arange(len(keys))
        scale = np.full(size + 1, self.weight_scale)
        scale[0] *= self.intercept_scale
        which = np.minimum((stream.uniforms(1)[:, 0] * self.num_graphs).astype(np.int64), self.num_graphs - 1)
        weights = stream.normals(size * (size + 1)).reshape(-1, size, size + 1)
        true_order = order[rows, which]
        models = LinearModels(
            weights=np.where(is_parent[rows, which], weights * scale, 0.0),
            noise=np.take_along_axis(noise, true_order, axis=1),
            order=true_order,
            target=size - 1,
        )
        menu = self._menu(reach, price)
        belief = Belief.prior(
            is_parent=is_parent, order=order, noise=noise, scale=scale, target=size - 1, menu=menu
        )
        shape = (len(keys), self.num_observations, size)
        drawn = stream.normals(shape[1] * size).reshape(shape)
        nothing = np.zeros((len(keys), size), dtype=np.bool_)
        observations = models.sample(nothing, np.zeros((len(keys), size)), drawn)
        for index in range(self.num_observations):
            belief = belief.updated(observations[:, index])
        return Tasks(
            models=models,
            belief=belief,
            menu=menu,
            budget=np.full(len(keys), self.budget),
            effects=models.effects(menu),
            keys=keys,
            observations=observations,
            family=self,
        )

    def _graphs(self, stream: _Stream) -> tuple[Ints, Bools]:
        """[B, K, d] orders and [B, K, d, d + 1] parents by position, the intercept among them.

        The target is the last of every order and has a parent: the one before it, where chance gave none.
        """
        size, count = self.num_variables, self.num_graphs
        if self.graph is not None:
            names = [name for name in self.graph.names if name != self.graph.target] + [self.graph.target]
            ordered = self.graph.order()
            numbers = np.array([names.index(name) for name in ordered])
            parents = self.graph.is_parent(ordered)
            shape = (stream.num_tasks, 1)
            return np.tile(numbers, (*shape, 1)), np.tile(parents, (*shape, 1, 1))
        heights = stream.uniforms(count * size).reshape(-1, count, size)
        heights[..., -1] = 2.0
        order = heights.argsort(axis=-1)
        edges = stream.uniforms(count * size * size).reshape(-1, count, size, size) < self.density
        edges &= np.tri(size, k=-1, dtype=np.bool_)
        edges[..., -1, -2] |= ~edges[..., -1, :-1].any(axis=-1)
        return order, np.concatenate([np.ones((*edges.shape[:-1], 1), dtype=np.bool_), edges], axis=-1)

    def _menu(self, reach: Array, price: Array) -> Menu:
        sets = self._sets()
        signs = np.zeros((len(sets), self.num_variables))
        for index, (chosen, signs_of) in enumerate(sets):
            signs[index, list(chosen)] = signs_of
        is_set = signs != 0
        padded = np.concatenate([reach, np.zeros((len(reach), 1))], axis=1)
        return Menu(
            is_set=np.repeat(is_set[None], len(reach), axis=0),
            values=signs * padded[:, None, :],
            costs=price @ is_set[:, :-1].T.astype(np.float64),
        )


def as_key(key: int | torch.Generator) -> int:
    """The seed that a key stands for: an int itself, or a number drawn from a generator.

    Raises ConfigurationError for anything else, such as a key of JAX.
    """
    if isinstance(key, torch.Generator):
        return int(torch.randint(1 << 62, (), generator=key))
    try:
        return operator.index(key)
    except TypeError:
        raise ConfigurationError(
            f"key must be an int or a torch.Generator, got {type(key).__name__}: for jax.random.key(0) write "
            "key=0, and for keys that were split key=0, 1, 2, ..."
        ) from None


class _Stream:
    """The numbers of each task's stream, one after the other."""

    def __init__(self, keys: np.ndarray) -> None:
        self._keys, self._taken = keys, 0

    @property
    def num_tasks(self) -> int:
        return len(self._keys)

    def uniforms(self, number: int) -> Array:
        """[B, number] in [0, 1)."""
        self._taken += number
        return uniforms(self._keys, np.arange(self._taken - number, self._taken)[:, None]).T

    def normals(self, number: int) -> Array:
        """[B, number] standard normal."""
        self._taken += number
        return normals(self._keys, self._taken - number, number)


def normals(keys: np.ndarray, begin: int | Ints, number: int) -> Array:
    """[B, number] standard normal numbers from place `begin` of the streams on, one for all or [B]."""
    drawn = uniforms(keys, np.arange(number)[:, None] + begin).T
    numbers: Array = torch.special.ndtri(torch.from_numpy(np.ascontiguousarray(drawn)) + 2.0**-54).numpy()
    return numbers


def _between(drawn: Array, limits: tuple[float, float]) -> Array:
    """Uniform in the logarithm between two limits."""
    low, high = np.log(limits[0]), np.log(limits[1])
    numbers: Array = np.exp(low + drawn * (high - low))
    return numbers
