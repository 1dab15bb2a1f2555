"""Causal models with mechanisms of any kind: standard ones, random ones, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.rivals.causal_models import (
    CausalModel,
    Variable,
    asia,
    complete_graph,
    random_graph,
    random_model,
    toy_graph,
)
from stateset_agents.numeric.acquisition.graphs import CausalGraph
from stateset_agents.types.errors import ConfigurationError


def noise_of(noise: np.ndarray, *parents: np.ndarray) -> np.ndarray:
    return noise


def test_toy_graph_s_best_intervention() -> None:
    model, random = toy_graph(), np.random.default_rng(0)
    value, error = model.effect({"Z": -3.20}, 20_000, random)
    assert value == pytest.approx(-2.1718, abs=4 * error)
    grid = np.arange(-5, 20, 0.01)
    exact = np.cos(grid) - np.exp(-grid / 20)
    assert (grid[exact.argmin()], exact.min()) == (
        pytest.approx(-3.20, abs=0.01),
        pytest.approx(-2.1718, abs=1e-4),
    )


@pytest.mark.long
def test_the_papers_models_have_their_known_optima() -> None:
    random = np.random.default_rng(0)
    value, error = toy_graph().effect({"Z": -3.20}, 1_000_000, random)
    assert value == pytest.approx(-2.1718, abs=4 * error)
    best = [toy_graph().effect({"X": x}, 1_000_000, np.random.default_rng(1)) for x in np.arange(-2, 0, 0.1)]
    assert min(best)[0] == pytest.approx(-1.465, abs=0.01)
    model = complete_graph()
    value, error = model.effect({"D": 3.34, "E": -1.32}, 1_000_000, random)
    assert value == pytest.approx(-0.638, abs=4 * error)
    for beside in ({"D": 3.0, "E": -1.32}, {"D": 3.34, "E": -1.7}, {"D": 3.34}, {"B": 0.0}):
        assert model.effect(beside, 1_000_000, np.random.default_rng(0))[0] > value + 0.02
    # Lowest of what D and E can do; within its limits B does more: C = exp(5) lifts E to 15.
    assert model.effect({"B": -5.0, "D": 3.34}, 100_000, random)[0] == pytest.approx(-3.485, abs=0.03)


def test_complete_graph_s_optimum_and_its_confounding() -> None:
    model, random = complete_graph(), np.random.default_rng(0)
    value, error = model.effect({"D": 3.34, "E": -1.32}, 50_000, random)
    assert value == pytest.approx(-0.638, abs=4 * error)
    sample = model.sample(50_000, random)
    assert set(model.observed(sample)) == {"A", "B", "C", "D", "E", "F", "Y"}
    # A low B goes with a low U2, and so with a high exp(-U2): seeing it differs from setting it.
    low = sample["B"] < -1
    seen = sample["Y"][low].mean()
    done = model.effect({"B": float(sample["B"][low].mean())}, 50_000, random)[0]
    assert seen - done > 1.0


def test_asia_has_the_shares_of_its_tables() -> None:
    sample = asia().sample(200_000, np.random.default_rng(0))
    shares = {name: values.mean() for name, values in sample.items()}
    # tub .0104, lung .055, bronc .45, either 1 - (1 - .0104)(1 - .055), and dysp .436 in the paper
    assert shares["tub"] == pytest.approx(0.0104, abs=0.001)
    assert shares["lung"] == pytest.approx(0.055, abs=0.002)
    assert shares["bronc"] == pytest.approx(0.45, abs=0.004)
    assert shares["either"] == pytest.approx(0.0648, abs=0.003)
    assert shares["dysp"] == pytest.approx(0.436, abs=0.004)
    assert asia().effect({"bronc": 0.0}, 100_000, np.random.default_rng(0))[0] < 0.15


@pytest.mark.parametrize("kind", ["linear", "nonlinear", "discrete"])
def test_random_models_of_every_kind_answer_to_interventions(kind: str) -> None:
    random = np.random.default_rng(4)
    graph = random_graph(6, 0.7, random)
    model = random_model(graph, kind, random, costs=(1.0, 20.0))  # type: ignore[arg-type]  # a literal
    name = model.settable[-1]
    low, high = model.variables[name].limits or (0.0, 0.0)
    first = model.sample(4000, np.random.default_rng(1), {name: low})
    second = model.sample(4000, np.random.default_rng(1), {name: high})
    assert (first[name] == low).all()
    assert abs(first[graph.target].mean() - second[graph.target].mean()) > 0.01
    assert all(
        np.array_equal(first[other], second[other]) for other in graph.ancestors(name)
    )  # causes do not change
    assert model.cost({name: low}) == model.variables[name].cost
    assert 1.0 <= model.cost({name: low}) <= 20.0


def test_a_nonlinear_model_is_none_of_straight_lines() -> None:
    graph = CausalGraph(parents={"X": (), "Y": ("X",)}, target="Y")
    bends = []
    for kind in ("linear", "nonlinear"):
        model = random_model(graph, kind, np.random.default_rng(2), noise=1e-9)  # type: ignore[arg-type]  # a literal
        low, middle, high = (
            model.effect({"X": x}, 10, np.random.default_rng(0))[0] for x in (-2.0, 1.0, 2.0)
        )
        bends.append(abs(middle - (low + 0.75 * (high - low))))
    assert bends[0] < 1e-6 < 0.05 < bends[1]


def test_costs_by_value() -> None:
    model = toy_graph(costs={"X": 1.0, "Z": 10.0}, cost_type="fixed and value")
    assert model.cost({"X": -2.0, "Z": 3.0}) == 16.0
    assert toy_graph().cost({"X": -2.0}) == 1.0
    model.check_budget(1.0)


def two(**variables: Variable) -> CausalModel:
    return CausalModel(graph=CausalGraph(parents={"X": (), "Y": ("X",)}, target="Y"), variables=variables)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: toy_graph().cost({"Y": 1.0}), r"do\(Y\): Y is the target, which is measured and not set"),
        (lambda: toy_graph().cost({"Z": 21.0}), r"do\(Z=21\) is out of range: give a value from -5 to 20"),
        (lambda: toy_graph().cost({"Q": 1.0}), r"do\(Q\): no such variable; there are X, Z, Y"),
        (lambda: complete_graph().cost({"U1": 1.0}), r"do\(U1\): U1 cannot be set; choose of"),
        (lambda: toy_graph(costs={"X": 0.0}), "cost must be above 0, got 0.0"),
        (
            lambda: toy_graph(costs={"X": 3.0, "Z": 10.0}).check_budget(2.0),
            "budget 2 is below the cheapest experiment's 3",
        ),
        (lambda: toy_graph().check_budget(math.nan), "budget nan is below the cheapest experiment's 1"),
        (lambda: toy_graph().check_budget(math.inf), "budget inf never ends: give what may be spent"),
        (
            lambda: toy_graph().cost({"X": math.nan}),
            r"do\(X=nan\) is out of range: give a value from -5 to 5",
        ),
        (
            lambda: two(X=Variable(mechanism=noise_of), Y=Variable(mechanism=noise_of, limits=(0, 1))),
            "Y is the target and has limits: it cannot be set, leave them out",
        ),
        (lambda: two(X=Variable(mechanism=noise_of)), "'Y' is in one of graph and variables only"),
        (
            lambda: Variable(mechanism=noise_of, limits=(2.0, 1.0)),
            r"limits must be the lower and the upper one",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, message: str) -> None:
    with pytest.raises(ConfigurationError, match="^" + message) as refused:
        make()
    assert "\n" not in str(refused.value)
