"""Causal graphs: variables, their parents, a target; and the graphs of papers, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import numpy as np

from stateset_agents.runtime.yaml_files import read_sections
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
        """Variables with a directed path to `name`, by default to the target."""
        names: set[str] = set()
        waiting = list(self.parents[name or self.target])
        while waiting:
            above = waiting.pop()
            if above not in names:
                names.add(above)
                waiting.extend(self.parents[above])
        return frozenset(names)

    def is_parent(self, order: Sequence[str]) -> np.ndarray:
        """[d, d + 1] bool, by position in `order`: does this variable follow from that one? The intercept is
        in front, and True."""
        table = np.zeros((len(order), len(order) + 1), dtype=np.bool_)
        table[:, 0] = True
        for place, name in enumerate(order):
            for parent in self.parents[name]:
                table[place, 1 + order.index(parent)] = True
        return table


GRAPHS: Mapping[str, CausalGraph] = {
    name: CausalGraph(
        parents={child: tuple(above) for child, above in graph["parents"].items()},
        target=graph["target"],
        hidden=frozenset(graph.get("hidden", ())),
    )
    for name, graph in read_sections(Path(__file__).with_name("graphs.yaml")).items()
}
"""The graphs of papers, which graphs.yaml names."""
TOY, COMPLETE, SACHS, ASIA = (GRAPHS[name] for name in ("toy", "complete", "sachs", "asia"))
