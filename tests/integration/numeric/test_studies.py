"""A study survives a kill and gives the same table; what its folder refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from repository_paths import ROOT

from stateset_agents.cli.main import main
from stateset_agents.numeric.studies.analyzer import GRPOvsPPOAnalyzer
from stateset_agents.numeric.studies.runner import ARMS, StudySettings, open_study, run_study
from stateset_agents.numeric.studies.study import Cell, StudyFolder
from stateset_agents.types.errors import ConfigurationError

SMALL = {"num_groups": 4, "steps_per_rollout": 100, "minibatch_size": 64, "num_iterations": 1}


def settings(**changes):
    plain = {
        "name": "toy",
        "suites": ("curriculum", "cart_pole"),
        "arms": {"PPO": ARMS["PPO"], "task": ARMS["task"]},
        "seeds": (0,),
        "total_steps": 250,
        "settings": SMALL,
        "episodes": 2,
    }
    return StudySettings(**{**plain, **changes})


def without_times(cells):
    return [dataclasses.replace(cell, cpu_seconds=0.0) for cell in cells]


def ended_twice_alike(whole: StudyFolder, ended: StudyFolder) -> None:
    """The study that was ended goes on after a torn line, and says what the whole one says."""
    with ended.cells_file.open("a") as stream:
        stream.write('{"suite": "curriculum", "arm"')  # a kill in the middle of a line
    asyncio.run(run_study(ended.path))
    assert without_times(ended.cells()) == without_times(whole.cells())
    assert len(ended.cells()) == 3  # parts by task on a single task would be PPO
    reports = [GRPOvsPPOAnalyzer(folder.path).generate_report() for folder in (whole, ended)]
    assert reports[0].splitlines()[1:] == reports[1].splitlines()[1:]
    assert "curriculum: worst task's final score of task against PPO" in reports[0]


@pytest.mark.long
def test_a_study_that_was_ended_goes_on_and_gives_the_same_table(tmp_path: Path) -> None:
    def stop(cell: Cell, number: int, cells: int) -> None:
        raise InterruptedError(f"after cell {number} of {cells}")

    whole = asyncio.run(run_study(tmp_path / "whole", settings()))
    with pytest.raises(InterruptedError, match="after cell 1 of 3"):
        asyncio.run(run_study(tmp_path / "ended", settings(), on_cell=stop))
    assert len(StudyFolder(tmp_path / "ended").cells()) == 1
    ended_twice_alike(whole, StudyFolder(tmp_path / "ended"))


@pytest.mark.long
def test_a_killed_study_goes_on_and_gives_the_same_table(tmp_path: Path) -> None:
    whole = asyncio.run(run_study(tmp_path / "whole", settings()))
    killed, _ = open_study(tmp_path / "killed", settings())
    command = [sys.executable, "-m", "stateset_agents", "study", "run", str(killed.path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not killed.cells() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 1 <= len(killed.cells()) < 3
    ended_twice_alike(whole, killed)


def test_more_seeds_are_added_and_other_settings_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = settings(suites=("cart_pole",), arms={"PPO": ARMS["PPO"]}, seeds=(0,))
    asyncio.run(run_study(tmp_path, one))
    assert main(["study", "run", str(tmp_path), "--seeds", "2"]) == 0
    assert [cell.seed for cell in StudyFolder(tmp_path).cells()] == [0, 1]
    assert "2/2 cart_pole PPO seed 1" in capsys.readouterr().out
    assert main(["study", "report", str(tmp_path)]) == 0
    assert "2 cells of 2." in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="has total_steps 250, got 300: give another folder"):
        open_study(tmp_path, settings(**{**one.model_dump(), "seeds": (0, 1), "total_steps": 300}))


def test_the_command_of_a_cell_runs_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = settings(
        suites=("cart_pole",), arms={"two": {"group_strategy": "length", "n_groups": 2}}, seeds=(3,)
    )
    (cell,) = asyncio.run(run_study(tmp_path / "study", one)).cells()
    monkeypatch.chdir(tmp_path)
    words = cell.command.split()
    assert main(words[1:]) == 0
    (again,) = StudyFolder(tmp_path / "cell").cells()
    assert (again.curve, again.final) == (cell.curve, cell.final)
    assert again.settings == cell.settings


def test_a_grid_is_run_cell_by_cell(tmp_path: Path) -> None:
    words = [
        "study",
        "run",
        str(tmp_path / "grid"),
        "--suite",
        "cart_pole",
        "--arm",
        "random",
        "--seeds",
        "1",
    ]
    words += ["--grid", "n_groups=2,3", "--steps", "100", "--episodes", "1"]
    words += [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    assert main(words) == 0
    found = StudyFolder(tmp_path / "grid")
    assert [cell.settings["n_groups"] for cell in found.cells()] == [2, 3]
    assert found.settings()["axes"] == {"n_groups": [2, 3]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "has no study.yaml: say what to run"),
        (["--arm", "PPO"], "a new study needs a suite"),
        (["--suite", "cart_poles"], "did you mean 'cart_pole'"),
        (["--suite", "cart_pole", "--arm", "tasks"], "did you mean 'task'"),
        (["--suite", "cart_pole", "--grid", "n_groups=2"], "--grid is over one --arm"),
        (["--suite", "cart_pole", "--seeds", "0"], "--seeds must be at least 1"),
        (["--suite", "cart_pole", "--set", "seed=3"], "seed is the study's own"),
        (["--suite", "cart_pole", "--set", "learning_rates=1"], "did you mean 'learning_rate'"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "run", str(tmp_path / "new"), *words]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new" / "cells.jsonl").exists()


def test_report_of_no_study_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "report", str(tmp_path)]) == 1
    assert "has no study.yaml" in capsys.readouterr().err


@pytest.mark.long
def test_by_task_repairs_the_drowned_task(tmp_path: Path) -> None:
    """Worst-task score on the mix with scales 100 apart, three seeds; with none it is about 0."""
    analyzer = GRPOvsPPOAnalyzer(tmp_path)
    arms = {"PPO": ARMS["PPO"], "task": ARMS["task"]}
    found = asyncio.run(analyzer.compare(["mix_acrobot_large"], n_seeds=3, arms=arms, total_steps=60_000))
    worst = {arm: found["arms"][arm]["worst_task"] for arm in arms}
    assert worst["PPO"] < 0.1
    assert worst["task"] > worst["PPO"] + 0.2
