"""Causal Bayesian optimisation on tasks with menus: a process for each set, and what it spends."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.rivals.causal_bo import GaussianProcess, _MenuProcesses, play_cbo
from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.rules import RULES


def test_cbo_on_menus_is_a_gaussian_process_per_set() -> None:
    family = LinearFamily(num_variables=3, costs=(1.0, 4.0), budget=40.0, num_observations=5)
    tasks = family.draw(range(2))
    processes = _MenuProcesses(tasks, 0.5, 4.0)
    mean, deviation = tasks.belief.effect_moments()
    variance = 4.0 * (deviation[0] ** 2).mean()
    values = tasks.menu.values[0][:2, 0]
    prior = dict(zip(values, zip(mean[0, :2], deviation[0, :2], strict=True), strict=True))

    def known(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = np.array([prior[value] for value in points[:, 0]])
        return found[:, 0], found[:, 1]

    reach = np.abs(values).max()
    noise = tasks.belief.outcome_variances()[0, 0]
    process = GaussianProcess(
        points=np.full((3, 1), values[0]),
        outcomes=np.array([1.0, -0.5, 2.0]),
        lengths=np.array([0.5 * reach]),
        variance=variance,
        noise=float(noise),
        prior=known,
    )
    for outcome in (1.0, -0.5, 2.0):
        processes.learn(np.array([0, -1]), np.array([outcome, 99.0]))
    found, spread = process.posterior(values[:, None])
    assert processes.mean[0, :2] == pytest.approx(found)
    assert np.sqrt(np.diag(processes.covariance[0]))[:2] == pytest.approx(spread)
    assert processes.mean[0, 2:] == pytest.approx(mean[0, 2:])  # another set learns nothing of it
    assert processes.mean[1] == pytest.approx(mean[1])  # where nothing was done nothing was learned


def test_cbo_beats_random_and_pays_what_it_can() -> None:
    family = LinearFamily(costs=(1.0, 20.0), budget=20.0)
    tasks = family.draw(range(300))
    found = play_cbo(tasks)
    spent = np.zeros(300)
    for row in found.actions:
        spent += np.where(row >= 0, tasks.menu.costs[np.arange(300), row], 0.0)
    assert (spent <= 20.0 + 1e-9).all()
    assert (spent > 15.0).mean() > 0.5
    assert found.expected_regret.mean() < 0.8 * play(RULES["random"], tasks).expected_regret.mean()
