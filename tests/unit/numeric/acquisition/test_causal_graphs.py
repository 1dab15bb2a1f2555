"""Causal graphs: those of papers, and what is refused."""

from __future__ import annotations

import pytest

from stateset_agents.numeric.acquisition.graphs import ASIA, GRAPHS, SACHS, CausalGraph
from stateset_agents.types.errors import ConfigurationError


def test_standard_graphs_have_their_sizes() -> None:
    edges = {name: sum(map(len, graph.parents.values())) for name, graph in GRAPHS.items()}
    assert edges == {"toy": 2, "complete": 11, "sachs": 17, "asia": 8}
    assert len(SACHS.names) == 11
    assert ASIA.order().index("either") > ASIA.order().index("lung")
    assert SACHS.ancestors("Erk") == {"PKC", "PKA", "Raf", "Mek"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CausalGraph(parents={"X": ("Z",), "Z": ("X",), "Y": ("X",)}, target="Y"),
            r"the graph has a cycle, (X -> Z -> X|Z -> X -> Z): take one of its edges out",
        ),
        (
            lambda: CausalGraph(parents={"X": (), "Y": ()}, target="Y"),
            "the target Y has no ancestor that can be set: choose another, or add an edge",
        ),
        (
            lambda: CausalGraph(parents={"U": (), "Y": ("U",)}, target="Y", hidden=frozenset({"U"})),
            "the target Y has no ancestor that can be set",
        ),
        (
            lambda: CausalGraph(parents={"Y": ("Q",)}, target="Y"),
            "Y has the parent 'Q', which is no variable",
        ),
        (lambda: CausalGraph(parents={"X": ()}, target="Y"), "'Y' is no variable of the graph, which has X"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_in_one_line(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match="^" + message) as refused:
        make()
    assert "\n" not in str(refused.value)
