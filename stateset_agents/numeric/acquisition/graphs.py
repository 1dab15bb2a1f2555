"""Causal graphs: checked once, put in topological order; standard ones and random ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

import numpy as np

from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalGraph:
    """Variables, the parents of each, and which of them is the target.

    Raises ConfigurationError for a cycle, a parent that is no variable, and a target without ancestors that
    can be set.
    """

    parents: Mapping[str, tuple[str, ...]]
    """Every variable -> its parents, in the order of a mechanism's arguments."""
    target: str
    hidden: frozenset[str] = frozenset()
    """Variables that are neither seen nor set: what confounds their children."""

    def __post_init__(self) -> None:
        for name, above in self.parents.items():
            missing = [parent for parent in above if parent not in self.parents]
            if missing:
                raise ConfigurationError(
                    f"{name} has the parent {missing[0]!r}, which is no variable: add it to parents"
                )
        for name in (self.target, *self.hidden):
            if name not in self.parents:
                raise ConfigurationError(
                    f"{name!r} is no variable of the graph, which has {', '.join(self.parents)}"
                )
        if self.target in self.hidden:
            raise ConfigurationError(f"the target {self.target} is hidden: a target must be seen")
        try:
            self.order()
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            raise ConfigurationError(f"the graph has a cycle, {circle}: take one of its edges out") from error
        if not self.ancestors() - self.hidden:
            raise ConfigurationError(
                f"the target {self.target} has no ancestor that can be set: choose another, or add an edge"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """All variables, as they were given."""
        return tuple(self.parents)

    def order(self) -> tuple[str, ...]:
        """All variables, parents before children."""
        return tuple(TopologicalSorter(self.parents).static_order())

    def ancestors(self, name: str | None = None) -> frozenset[str]:
        """What has a directed path to a variable, the target when absent."""
        found: set[str] = set()
        waiting = list(self.parents[name or self.target])
        while waiting:
            above = waiting.pop()
            if above not in found:
                found.add(above)
                waiting.extend(self.parents[above])
        return frozenset(found)

    def is_parent(self, order: Sequence[str]) -> np.ndarray:
        """[d, d + 1] bool, by position in `order`: does this variable follow from that one? The intercept is
        in front, and True."""
        found = np.zeros((len(order), len(order) + 1), dtype=np.bool_)
        found[:, 0] = True
        for place, name in enumerate(order):
            for parent in self.parents[name]:
                found[place, 1 + order.index(parent)] = True
        return found


def random_graph(num_variables: int, density: float, random: np.random.Generator) -> CausalGraph:
    """Variables V0, V1, ... in a random order; each earlier one is a parent of each later one with chance
    `density` (Erdős and Rényi's model, directed). The last one is the target and has a parent at least."""
    if num_variables < 2:
        raise ConfigurationError(
            f"num_variables must be at least 2, got {num_variables}: a target and what acts on it"
        )
    if not 0 < density <= 1:
        raise ConfigurationError(f"density must be above 0 and at most 1, got {density}")
    names = [f"V{number}" for number in random.permutation(num_variables)]
    parents = {
        name: tuple(above for above in names[:place] if random.random() < density)
        for place, name in enumerate(names)
    }
    if not parents[names[-1]]:
        parents[names[-1]] = (names[-2],)
    return CausalGraph(parents=parents, target=names[-1])


def _graph(target: str, edges: Iterable[str], hidden: Iterable[str] = ()) -> CausalGraph:
    """From lines such as "C: A B", C being a child of A and B."""
    parents = {}
    for line in edges:
        child, above = line.split(":")
        parents[child] = tuple(above.split())
    return CausalGraph(parents=parents, target=target, hidden=frozenset(hidden))


TOY = _graph("Y", ["X:", "Z: X", "Y: Z"])
"""ToyGraph of Aglietti and others, Causal Bayesian Optimization, AISTATS 2020 (https://arxiv.org/abs/2005.11741)."""

COMPLETE = _graph(
    "Y",
    ["U1:", "U2:", "F:", "A: F U1", "B: U2", "C: B", "D: C", "E: A C", "Y: D E U1 U2"],
    hidden=("U1", "U2"),
)
"""CompleteGraph of the same paper; U1 confounds A and Y, U2 confounds B and Y."""

SACHS = _graph(
    "Akt",
    [
        "PKC:",
        "Plcg:",
        "PKA: PKC",
        "PIP3: Plcg",
        "PIP2: Plcg PIP3",
        "Raf: PKC PKA",
        "Mek: PKC PKA Raf",
        "Erk: PKA Mek",
        "Akt: PKA Erk",
        "P38: PKC PKA",
        "Jnk: PKC PKA",
    ],
)
"""Proteins of a cell: the consensus network of Sachs and others, Science 308, 2005; 11 nodes, 17 edges."""

ASIA = _graph(
    "dysp",
    [
        "asia:",
        "smoke:",
        "tub: asia",
        "lung: smoke",
        "bronc: smoke",
        "either: tub lung",
        "xray: either",
        "dysp: bronc either",
    ],
)
"""Shortness of breath: Lauritzen and Spiegelhalter, J. Royal Statistical Society B 50, 1988; 8 nodes."""

GRAPHS: Mapping[str, CausalGraph] = {"toy": TOY, "complete": COMPLETE, "sachs": SACHS, "asia": ASIA}
