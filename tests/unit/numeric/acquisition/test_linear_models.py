"""Linear-Gaussian models and the belief over them: against path sums, samples and textbook regression."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stateset_agents.numeric.acquisition.families import LinearFamily, Tasks
from stateset_agents.numeric.acquisition.graphs import COMPLETE, SACHS
from stateset_agents.numeric.acquisition.linear_models import Belief, LinearModels, Menu
from stateset_agents.types.errors import ConfigurationError

FAMILY = LinearFamily(num_variables=5, set_at_once=2, noise=(0.3, 1.0), ranges=(0.5, 2.0), costs=(1.0, 2.0))


def paths(weights: np.ndarray, begin: int, end: int) -> list[list[int]]:
    """All directed paths between two positions."""
    if begin == end:
        return [[end]]
    children = [child for child in range(begin + 1, len(weights)) if weights[child, begin + 1] != 0]
    return [[begin, *rest] for child in children for rest in paths(weights, child, end)]


def by_paths(tasks: Tasks, row: int, action: int) -> float:
    """E[target | do] as the sum over all paths that no intervention cuts, from values set and intercepts."""
    weights, order = tasks.models.weights[row], tasks.models.order[row]
    end = int((order == tasks.models.target).argmax())
    is_set, values = tasks.menu.is_set[row, action][order], tasks.menu.values[row, action][order]
    total = 0.0
    for begin in range(end + 1):
        source = values[begin] if is_set[begin] else weights[begin, 0]
        for path in paths(weights, begin, end):
            if not is_set[path[1:]].any():
                total += source * np.prod([weights[child, parent + 1] for parent, child in pairwise(path)])
    return total


def test_effects_are_sums_over_paths() -> None:
    tasks = FAMILY.draw(range(6))
    for row in range(6):
        for action in range(FAMILY.num_actions):
            assert tasks.effects[row, action] == pytest.approx(by_paths(tasks, row, action), abs=1e-12)


def test_samples_have_the_effects_as_means_and_the_set_variables_are_set() -> None:
    tasks = FAMILY.draw(range(3))
    rows, action = np.arange(3), np.full(3, 20)
    normals = np.random.default_rng(0).standard_normal((3, 20_000, 5))
    is_set, values = tasks.menu.is_set[rows, action], tasks.menu.values[rows, action]
    sample = tasks.models.sample(is_set, values, normals)
    target = sample[..., tasks.models.target]
    error = target.std(axis=1) / np.sqrt(20_000)
    assert (np.abs(target.mean(axis=1) - tasks.effects[:, 20]) < 4 * error).all()
    assert (sample == values[:, None])[np.repeat(is_set[:, None], 20_000, axis=1)].all()


@pytest.mark.long
def test_a_million_samples_have_the_effects_as_means() -> None:
    tasks = FAMILY.draw(range(4))
    rows, random = np.arange(4), np.random.default_rng(1)
    for action in range(0, FAMILY.num_actions, 5):
        which = np.full(4, action)
        total, squares = np.zeros(4), np.zeros(4)
        for _ in range(10):
            normals = random.standard_normal((4, 100_000, 5))
            sample = tasks.models.sample(
                tasks.menu.is_set[rows, which], tasks.menu.values[rows, which], normals
            )
            total += sample[..., 4].sum(axis=1)
            squares += (sample[..., 4] ** 2).sum(axis=1)
        mean = total / 1e6
        error = np.sqrt((squares / 1e6 - mean**2) / 1e6)
        assert (np.abs(mean - tasks.effects[:, action]) < 4.5 * error).all()


def by_least_squares(
    rows: list[np.ndarray], is_parent: np.ndarray, scale: np.ndarray, noise: float, place: int
):
    """Mean and covariance of a variable's weights: (X'X / s^2 + P)^-1 X'y / s^2."""
    data = np.stack(rows)
    use = np.flatnonzero(is_parent)
    x = np.concatenate([np.ones((len(data), 1)), data], axis=1)[:, use]
    covariance = np.linalg.inv(x.T @ x / noise**2 + np.diag(1 / scale[use] ** 2))
    return use, covariance @ x.T @ data[:, place] / noise**2, covariance


def test_the_posterior_is_that_of_regression_and_leaves_out_what_was_set() -> None:
    family = LinearFamily(num_variables=4, noise=(0.4, 0.9))
    tasks = family.draw([7])
    belief, random = tasks.belief, np.random.default_rng(3)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(12):
        is_set = np.zeros((1, 4), dtype=bool)
        is_set[0, random.integers(0, 4)] = random.random() < 0.5
        values = tasks.models.sample(is_set, np.full((1, 4), 1.5), random.standard_normal((1, 1, 4)))[:, 0]
        belief = belief.updated(values, is_set)
        order = tasks.models.order[0]
        seen.append((values[0, order], is_set[0, order]))
    scale = np.array([0.5, 1, 1, 1, 1])
    for place in range(4):
        rows = [values for values, is_set in seen if not is_set[place]]
        use, mean, covariance = by_least_squares(
            rows, belief.is_parent[0, 0, place], scale, tasks.models.noise[0, place], place
        )
        assert belief.means[0, 0, place, use] == pytest.approx(mean, abs=1e-9)
        assert belief.covariances[0, 0, place][np.ix_(use, use)] == pytest.approx(covariance, abs=1e-9)
        rest = np.setdiff1d(np.arange(5), use)
        assert (belief.means[0, 0, place, rest] == 0).all()


def test_moments_of_effects_are_those_of_drawn_models() -> None:
    tasks = LinearFamily(num_variables=4, num_graphs=2, num_observations=4).draw(range(5))
    mean, deviation = tasks.belief.effect_moments()
    assert mean == pytest.approx(tasks.belief.effect_means(), abs=1e-10)
    random, number = np.random.default_rng(0), 20_000
    drawn = tasks.belief.sampled_effects(
        random.standard_normal((5, number, 4, 5)), random.random((5, number))
    )
    assert (np.abs(drawn.mean(axis=1) - mean) < 5 * deviation / np.sqrt(number) + 1e-9).all()
    assert drawn.std(axis=1) == pytest.approx(deviation, rel=0.1)


def test_intervals_hold_the_true_weights_95_times_of_100() -> None:
    tasks = LinearFamily(num_observations=6).draw(range(1500))
    means, covariances = tasks.belief.means[:, 0], tasks.belief.covariances[:, 0]
    deviation = np.sqrt(np.diagonal(covariances, axis1=-2, axis2=-1))
    real = tasks.belief.is_parent[:, 0]
    inside = np.abs(tasks.models.weights - means)[real] < 1.959964 * deviation[real]
    assert len(inside) > 10_000
    assert inside.mean() == pytest.approx(0.95, abs=0.007)


def test_the_true_graph_wins_and_its_weight_is_calibrated() -> None:
    tasks = LinearFamily(num_graphs=3, num_observations=8).draw(range(2000))
    orders = (tasks.belief.order == tasks.models.order[:, None]).all(axis=2)
    parents = tasks.belief.is_parent[..., 1:].astype(bool)
    truth = (tasks.models.weights[..., 1:] != 0)[:, None]
    is_true = orders & (parents == truth).all(axis=(2, 3))
    weights = tasks.belief.graph_weights
    assert weights.sum(axis=1) == pytest.approx(1.0)
    assert weights[is_true].mean() > 0.6  # a third before any data
    likely = weights > 0.8
    assert is_true[likely].mean() == pytest.approx(weights[likely].mean(), abs=0.03)


def test_an_outcome_is_drawn_from_what_is_predicted() -> None:
    """Mean over imagined outcomes of the mean after them is the mean before: beliefs are martingales."""
    tasks = LinearFamily(num_variables=4, num_graphs=2, num_observations=2).draw([3])
    number, random = 20_000, np.random.default_rng(0)
    many = tasks.belief.take(np.zeros(number, dtype=np.int64))
    after = many.imagined(np.full(number, 1), random.standard_normal((number, 4)), random.random(number))
    means = after.effect_means()
    before = tasks.belief.effect_means()[0]
    assert (np.abs(means.mean(axis=0) - before) < 5 * means.std(axis=0) / np.sqrt(number) + 1e-9).all()
    assert after.graph_weights.mean(axis=0) == pytest.approx(tasks.belief.graph_weights[0], abs=0.02)


def test_the_order_of_the_graph_changes_nothing() -> None:
    """The chain 0 -> 1 -> 2 with another numbering gives the same effects for the same variables."""
    weights = np.array([[[0.5, 0, 0, 0], [0.1, 2, 0, 0], [0, 0, 3, 0]]])
    found = []
    for order in ([0, 1, 2], [1, 0, 2]):
        names = np.array([order])
        is_set = np.zeros((1, 2, 3), dtype=bool)
        is_set[0, 0, order[0]] = is_set[0, 1, order[1]] = True
        menu = Menu(is_set=is_set, values=is_set * 2.0, costs=np.ones((1, 2)))
        models = LinearModels(weights=weights, noise=np.ones((1, 3)), order=names, target=2)
        found.append(models.effects(menu)[0].tolist())
    assert found[0] == found[1] == pytest.approx([(2 * 2 + 0.1) * 3, 2 * 3])


def test_a_given_graph_is_that_of_every_task() -> None:
    family = LinearFamily(graph=SACHS, num_variables=11, num_observations=20)
    tasks = family.draw(range(4))
    names = [name for name in SACHS.names if name != "Akt"] + ["Akt"]
    order = [names[number] for number in tasks.models.order[2]]
    for place, name in enumerate(order):
        found = {order[above] for above in np.flatnonzero(tasks.models.weights[2, place, 1:])}
        assert found == set(SACHS.parents[name])
    without = [index for index, name in enumerate(names[:-1]) if name not in SACHS.ancestors()]
    assert [names[index] for index in without] == ["Plcg", "PIP3", "PIP2", "P38", "Jnk"]
    nothing = tasks.effects[:, [2 * index for index in without]]  # of what does not act on the target
    assert nothing == pytest.approx(np.repeat(nothing[:, :1], 5, axis=1))
    assert np.ptp(tasks.effects, axis=1).min() > 0.01


def test_equal_seeds_give_equal_tasks_in_any_company() -> None:
    family = LinearFamily(num_graphs=2, num_observations=2)
    alone, together = family.draw([9]), family.draw([4, 9])
    assert np.array_equal(alone.effects[0], together.effects[1])
    assert np.array_equal(alone.belief.means[0], together.belief.means[1])
    assert np.array_equal(alone.noise(3)[0], together.noise(3)[1])
    assert not np.array_equal(together.noise(3)[0], together.noise(3)[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_variables": 1}, "num_variables must be at least 2, got 1"),
        (
            {"density": 0.0},
            "density must be above 0 and at most 1, got 0.0: the target needs ancestors",
        ),
        ({"costs": (0.0, 2.0)}, "costs must be two positive numbers"),
        ({"noise": (0.0, 1.0)}, "noise must be two positive numbers"),
        ({"budget": 1.0}, "budget 1.0 is below a single experiment's cost of up to 2.0"),
        ({"budget": np.nan}, "budget nan is below a single experiment's cost of up to 2.0, or without end"),
        ({"graph": SACHS}, "num_variables must be 11, as the graph has, got 5"),
        (
            {"graph": SACHS, "num_variables": 11, "num_graphs": 2},
            "num_graphs must be 1 where the graph is given, got 2",
        ),
        ({"graph": COMPLETE, "num_variables": 9}, "U1, U2 of the graph is hidden: the exact posterior needs"),
        ({"set_at_once": 5}, "set_at_once must be below num_variables 5, got 5"),
    ],
)
def test_a_family_that_cannot_be_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match="^" + message.replace("(", r"\(")):
        LinearFamily(**given)  # type: ignore[arg-type]  # wrong on purpose


def test_a_belief_without_noise_is_refused() -> None:
    tasks = FAMILY.draw([0])
    belief = tasks.belief
    with pytest.raises(
        ConfigurationError, match=r"^noise must be above 0, got 0: without noise the posterior"
    ):
        Belief.prior(
            is_parent=belief.is_parent,
            order=belief.order,
            noise=np.zeros((1, 5)),
            scale=np.ones(1),
            target=4,
            menu=tasks.menu,
        )


def test_an_outcome_s_variance_is_that_of_a_million_samples() -> None:
    tasks = LinearFamily(num_variables=4, noise=(0.3, 2.0)).draw([3])
    known = replace(
        tasks.belief, means=tasks.models.weights[:, None], covariances=0.0 * tasks.belief.covariances
    )
    random = np.random.default_rng(0)
    for action in range(4):
        is_set, values = tasks.menu.is_set[:, action], tasks.menu.values[:, action]
        found = tasks.models.sample(is_set, values, random.standard_normal((1, 200_000, 4)))[0, :, -1]
        assert known.outcome_variances()[0, action] == pytest.approx(found.var(), rel=0.02)


def test_belief_keeps_rows_that_do_not_change() -> None:
    tasks = FAMILY.draw(range(2))
    new = tasks.belief.updated(np.ones((2, 5)))
    mixed = new.where(np.array([True, False]), tasks.belief)
    assert isinstance(mixed, Belief)
    assert np.array_equal(mixed.means[0], new.means[0])
    assert np.array_equal(mixed.means[1], tasks.belief.means[1])
