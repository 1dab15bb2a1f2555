"""The Gaussian process against its textbook formula, and causal Bayesian optimisation of papers' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scripts.rivals.causal_bo import GaussianProcess, causal_prior, optimize
from scripts.rivals.causal_models import CausalModel, complete_graph, toy_graph
from stateset_agents.types.errors import ConfigurationError


def slope(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return 2 * points[:, 0], 0.3 + np.abs(points[:, 0])


def process(number: int = 12, **given: object) -> GaussianProcess:
    random = np.random.default_rng(0)
    points = random.uniform(-2, 2, (number, 2))
    settings = {"lengths": np.array([0.7, 1.5]), "variance": 2.0, "noise": 0.1, "prior": slope, **given}
    return GaussianProcess(points=points, outcomes=random.standard_normal(number), **settings)  # type: ignore[arg-type]  # any field


def test_the_posterior_is_the_conditional_of_the_joint_normal() -> None:
    """By inverting the joint covariance of outcomes and effects, in which nothing is factorised."""
    gp, at = process(), np.random.default_rng(1).uniform(-2, 2, (5, 2))
    everywhere = np.concatenate([gp.points, at])
    joint = np.empty((17, 17))
    for i, one in enumerate(everywhere):
        for j, other in enumerate(everywhere):
            near = 2.0 * np.exp(-0.5 * (((one - other) / gp.lengths) ** 2).sum())
            joint[i, j] = near + (0.3 + abs(one[0])) * (0.3 + abs(other[0])) + (0.1 if i == j < 12 else 0.0)
    precision = np.linalg.inv(joint)
    covariance = np.linalg.inv(precision[12:, 12:])
    mean = 2 * at[:, 0] - covariance @ precision[12:, :12] @ (gp.outcomes - 2 * gp.points[:, 0])
    found, deviation = gp.posterior(at)
    assert found == pytest.approx(mean, abs=1e-9)
    assert deviation == pytest.approx(np.sqrt(np.diag(covariance)), abs=1e-9)


def test_before_any_outcome_it_is_the_causal_prior() -> None:
    mean, deviation = process(0).posterior(np.array([[1.5, 0.0]]))
    assert (mean[0], deviation[0] ** 2) == (3.0, pytest.approx(2.0 + 1.8**2))


def test_an_outcome_pulls_the_mean_and_the_likelihood_is_the_normal_s() -> None:
    gp = process(1)
    near = gp.posterior(gp.points)
    assert abs(near[0][0] - gp.outcomes[0]) < abs(2 * gp.points[0, 0] - gp.outcomes[0])
    variance = 2.0 + (0.3 + abs(gp.points[0, 0])) ** 2 + 0.1
    missed = gp.outcomes[0] - 2 * gp.points[0, 0]
    assert gp.log_likelihood() == pytest.approx(-0.5 * (missed**2 / variance + np.log(2 * np.pi * variance)))
    more = gp.with_outcome([5.0, 5.0], 1.0)
    assert (len(more.points), len(gp.points)) == (2, 1)


def test_fitting_finds_the_length_of_what_made_the_outcomes() -> None:
    points = np.linspace(-5, 5, 40)[:, None]
    for cycles, limits in ((6.0, (0.0, 0.9)), (0.4, (1.4, 6.0))):
        gp = GaussianProcess(points=points, outcomes=np.sin(cycles * points[:, 0]), lengths=np.ones(1))
        found = gp.fitted([(-5.0, 5.0)])
        assert limits[0] < found.lengths[0] < limits[1]
        assert found.log_likelihood() >= gp.log_likelihood() - 1e-9


def test_a_singular_posterior_is_refused_in_one_line() -> None:
    gp = GaussianProcess(points=np.zeros((2, 1)), outcomes=np.ones(2), lengths=np.ones(1), noise=0.0)
    with pytest.raises(
        ConfigurationError, match=r"^the posterior is singular: 2 outcomes at .* noise 0; raise noise$"
    ):
        gp.posterior(np.zeros((1, 1)))
    with pytest.raises(ConfigurationError, match=r"lengths\[0\] must be above 0, got 0"):
        GaussianProcess(points=np.zeros((2, 1)), outcomes=np.ones(2), lengths=np.zeros(1))
    with pytest.raises(ConfigurationError, match="noise must be at least 0, got -1"):
        process(noise=-1.0)
    with pytest.raises(ConfigurationError, match=r"points and outcomes must be finite, got \[nan\]"):
        GaussianProcess(points=np.zeros((1, 1)), outcomes=np.array([np.nan]), lengths=np.ones(1))


def test_the_causal_prior_knows_what_was_seen_and_doubts_what_was_not() -> None:
    model, random = toy_graph(), np.random.default_rng(0)
    seen = model.observed(model.sample(200, random))
    mean, deviation = causal_prior(model.graph, seen, ["Z"], random=random)(np.array([[0.5], [1.0], [2.0]]))
    exact = np.cos([0.5, 1.0, 2.0]) - np.exp(-np.array([0.5, 1.0, 2.0]) / 20)
    assert mean == pytest.approx(exact, abs=0.4)
    assert (deviation < 0.4).all()


def test_cbo_finds_toy_graph_s_optimum_within_ten_experiments() -> None:
    model, random = toy_graph(), np.random.default_rng(1)
    seen = model.observed(model.sample(100, random))
    trials = optimize(model, sets=[["X"], ["Z"]], budget=10, observations=seen, samples=10_000, random=random)
    assert len(trials) == 10
    best = min(trials, key=lambda trial: trial.outcome)
    exact = np.cos(best.intervention["Z"]) - np.exp(-best.intervention["Z"] / 20)
    assert exact == pytest.approx(-2.1718, abs=0.05)


def test_dear_sets_are_left_alone_where_the_budget_is_small() -> None:
    model = toy_graph(costs={"X": 1.0, "Z": 10.0})
    trials = optimize(model, sets=[["X"], ["Z"]], budget=9, samples=100, random=np.random.default_rng(0))
    assert {tuple(trial.intervention) for trial in trials} == {("X",)}
    assert sum(trial.cost for trial in trials) == 9
    dear = optimize(model, sets=[["X"], ["Z"]], budget=200, samples=100, random=np.random.default_rng(0))
    assert ("Z",) in {tuple(trial.intervention) for trial in dear}


def in_other_units(scale: float, zero: float) -> CausalModel:
    """ToyGraph whose target is `scale` times Y plus `zero`."""
    model = toy_graph()
    target = model.variables["Y"]

    def moved(noise: np.ndarray, z: np.ndarray) -> np.ndarray:
        return scale * target.mechanism(noise, z) + zero

    return replace(model, variables={**model.variables, "Y": replace(target, mechanism=moved)})


@pytest.mark.parametrize("has_prior", [False, True])
def test_what_is_tried_does_not_depend_on_the_target_s_unit_and_zero(has_prior: bool) -> None:
    tried = []
    for scale, zero in ((1.0, 0.0), (1.0, 100.0), (1.0, -100.0), (100.0, 0.0), (0.01, 0.0)):
        model, random = in_other_units(scale, zero), np.random.default_rng(3)
        seen = model.observed(model.sample(60, random)) if has_prior else None
        trials = optimize(
            model, sets=[["X"], ["Z"]], budget=8, observations=seen, samples=2000, points=60, random=random
        )
        tried.append([(name, value) for trial in trials for name, value in trial.intervention.items()])
    names, values = (
        [[name for name, _ in one] for one in tried],
        [[value for _, value in one] for one in tried],
    )
    assert all(one == names[0] for one in names)
    assert values == pytest.approx(np.array([values[0]] * len(values)), abs=1e-9)
    assert len(set(zip(names[0], values[0], strict=True))) > 3  # not one point again and again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"X": [0.0, np.nan, 1.0]},
            r"observations of X must be finite, got nan in row 1: drop the row",
        ),
        ({"Y": [0.0, 1.0, -np.inf]}, "observations of Y must be finite, got -inf in row 2"),
        ({"Z": [0.0, 1.0]}, "in every row, got 3 of X, 2 of Z, 3 of Y"),
        (
            {"Z": [[0.0], [1.0], [2.0]]},
            "observations of Z must be a row of two numbers or more",
        ),
        ({"Z": ["a", "b", "c"]}, "observations of Z must be numbers: could not convert string"),
        ({"Z": None}, "observations have no Z, a variable that is seen: add its column"),
    ],
)
def test_observations_that_cannot_be_are_refused_where_they_enter(
    changes: Mapping[str, Any], message: str
) -> None:
    data = {**{name: [0.0, 1.0, 2.0] for name in "XYZ"}, **changes}
    seen: Any = {name: values for name, values in data.items() if values is not None}
    with pytest.raises(ConfigurationError, match=message):
        optimize(toy_graph(), sets=[["X"]], budget=5, observations=seen, random=np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match=message):
        causal_prior(toy_graph().graph, seen, ["X"], random=np.random.default_rng(0))


def test_cbo_refuses_what_cannot_be() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(
        ConfigurationError, match=r"budget 0.5 is below the cheapest experiment's 1: raise it"
    ):
        optimize(toy_graph(), sets=[["X"]], budget=0.5, random=random)
    with pytest.raises(ConfigurationError, match="sets must have at least one exploration set, got none"):
        optimize(toy_graph(), sets=[], budget=5, random=random)
    with pytest.raises(ConfigurationError, match=r"do\(Y\): Y is the target"):
        optimize(toy_graph(), sets=[["Y"]], budget=5, random=random)


@pytest.mark.long
@pytest.mark.parametrize(("has_prior", "least"), [(False, 19), (True, 14)])
def test_cbo_is_within_a_twentieth_of_toy_graph_s_optimum(has_prior: bool, least: int) -> None:
    """Of 20 seeds. The prior of observed data is sure where it knows nothing more often than it helps."""
    found = 0
    for seed in range(20):
        model, random = toy_graph(), np.random.default_rng(seed)
        seen = model.observed(model.sample(100, random)) if has_prior else None
        trials = optimize(
            model, sets=[["X"], ["Z"]], budget=10, observations=seen, samples=10_000, random=random
        )
        best = min(trials, key=lambda trial: trial.outcome).intervention
        found += "Z" in best and np.cos(best["Z"]) - np.exp(-best["Z"] / 20) < -2.1218
    assert found >= least


@pytest.mark.long
def test_cbo_sets_two_variables_of_complete_graph_where_that_pays() -> None:
    model, sets = complete_graph(), [["B"], ["D"], ["E"], ["D", "E"], ["B", "D"]]
    best = [
        min(
            trial.outcome
            for trial in optimize(model, sets=sets, budget=40, random=np.random.default_rng(seed))
        )
        for seed in range(3)
    ]
    assert np.median(best) < -2.5  # do(B = -5, D = 3.34) has -3.49, do(D = 3.34, E = -1.32) -0.64
