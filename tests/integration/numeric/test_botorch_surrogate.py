"""A model of BoTorch is a surrogate as it is; run by `make test-botorch`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.own_surrogate import FAMILY, SURROGATES, trained
from scripts import beside_botorch
from scripts.own_surrogates import table
from stateset_agents.numeric.acquisition.environment import AcquisitionEnv

pytestmark = pytest.mark.botorch


def test_its_posterior_in_the_environment_is_the_one_by_hand() -> None:
    environment = AcquisitionEnv(FAMILY, surrogate=SURROGATES["Gaussian process"]())
    environment.reset(range(6))
    points, outcomes = [np.zeros((6, 1, 10))], [np.zeros((6, 1))]  # the first row: nothing set, nothing seen
    tasks = environment.tasks
    menu = np.concatenate([tasks.menu.is_set, tasks.menu.values], axis=2)
    for number in range(3):
        assert environment.situation.goes_on.all()
        actions = environment.situation.costs.argmin(axis=1)
        points.append(menu[np.arange(6), actions][:, None])
        environment.step(actions)
        outcomes.append(environment.situation.belief.outcomes[:, number, -1:])
    x, y = np.concatenate(points, axis=1), np.concatenate(outcomes, axis=1)
    variances = np.diag([0.4] * 5 + [1.4] * 5)
    within = x @ variances @ x.transpose(0, 2, 1) + 0.65 + np.eye(4)
    beside = menu @ variances @ x.transpose(0, 2, 1) + 0.65
    gain = beside @ np.linalg.inv(within)
    mean, deviation = environment.situation.belief.effect_moments()
    assert mean == pytest.approx((gain @ y[..., None])[..., 0], abs=1e-5)
    own = (menu @ variances * menu).sum(axis=2) + 0.65
    assert deviation**2 == pytest.approx(own - (gain * beside).sum(axis=2), abs=1e-5)


def test_it_trains_a_policy() -> None:
    torch.set_num_threads(1)
    run = trained(SURROGATES["Gaussian process"](), steps=600, seed=0, log=lambda line: None)
    assert run.num_experiments >= 600
    assert run.opt_state.num_updates == len(run.updates) == 8


def test_the_table_has_a_row_for_each_surrogate_and_seed(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]  # pytest's
    rows = table(1, 1, 12, tmp_path).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| Gaussian process", "| neural ensemble"]
    capsys.readouterr()
    assert table(1, 1, 12, tmp_path).splitlines() == rows  # what is there is not made again
    assert capsys.readouterr().out == ""


def test_our_gaussian_process_is_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        beside_botorch.main()
    finally:
        torch.set_default_dtype(torch.float32)
    differences = [float(line.rsplit(" ", 1)[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(differences) == 4
    assert max(differences) < 1e-11
