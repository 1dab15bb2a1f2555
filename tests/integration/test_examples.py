"""Every example runs as its first lines say, from any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Beside other test workers, more threads than cores only wait for one another."""


def run_script(name: str, *arguments: str, folder: Path) -> str:
    """What `python name arguments` prints, run in `folder`."""
    done = subprocess.run(
        [sys.executable, str(ROOT / name), *arguments],
        cwd=folder,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_trains_and_answers(tmp_path: Path) -> None:
    *_, answer, folder = run_script("examples/quickstart.py", folder=tmp_path).strip().splitlines()
    assert answer
    assert folder.startswith("run folder:")
    run = tmp_path / "runs" / "0001-quickstart"
    assert (run / "checkpoints").is_dir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) > 1


def test_the_complete_example_measures_trains_saves_and_talks(tmp_path: Path) -> None:
    printed = run_script(
        "examples/complete_grpo_training.py", "--steps", "2", "--episodes", "12", folder=tmp_path
    )
    assert re.search(r"before: \d+\.\d% \[.*\] of 12\nafter: ", printed)
    assert re.search(r"user:  \w.*\nagent: .*\w", printed)
    run = tmp_path / "runs" / "0001-complete"
    assert (run / "checkpoints" / "step-000002" / "model" / "model.safetensors").is_file()
    assert (run / "agent" / "model.safetensors").is_file()


def test_the_reward_example_pays_help_most(tmp_path: Path) -> None:
    printed = run_script("examples/custom_reward.py", folder=tmp_path)
    paid = {line.split()[0]: float(line.split()[1]) for line in printed.splitlines()}
    assert paid.keys() == {"helps", "promises", "refuses", "stuffs"}
    assert paid["helps"] > 0.9
    assert max(paid["promises"], paid["refuses"], paid["stuffs"]) < 0.5


def test_a_model_of_ones_own_is_trained_and_loaded_by_plain_transformers(tmp_path: Path) -> None:
    printed = run_script("examples/own_model.py", folder=tmp_path)
    assert "37,344 parameters, 261 tokens, by transformers alone" in printed


def test_the_critic_s_figures_are_shown_step_by_step(tmp_path: Path) -> None:
    printed = run_script("examples/value_function_gae.py", "--steps", "2", folder=tmp_path)
    steps = re.findall(r"step +(\d+)  .*loss (\S+)  explained variance ([+-]\d\.\d\d)", printed)
    assert [step for step, _, _ in steps] == ["1", "2"]
    assert all(float(loss) > 0 for _, loss, _ in steps)


def test_two_checkpoints_are_compared_scenario_by_scenario(tmp_path: Path) -> None:
    printed = run_script(
        "examples/compare_checkpoints.py", "--steps", "2", "--episodes", "12", folder=tmp_path
    )
    assert re.search(r"step-000001: \d+\.\d%   step-000002: \d+\.\d%", printed)
    won, lost, tied, played = map(int, re.findall(r"\d+", printed.splitlines()[-1]))
    assert won + lost + tied == played == 12


def test_the_table_of_scripted_agents_is_as_documented(tmp_path: Path) -> None:
    printed = run_script("scripts/desk_agents.py", "--families", "learnable", folder=tmp_path)
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    after = printed.partition("the right answer is no for")[2].splitlines()[1:]
    rows = [line.partition("both twins right")[0].rsplit(maxsplit=2) for line in after]
    assert len(rows) == 8
    for name, success, reward in rows:
        shown = reward.replace("-0.", "\u2212.").replace("0.", ".")
        share = f"{float(success.rstrip('%')):g} %"
        assert f"| {name.strip().replace('_', ' ')} | {share} | {shown} |" in results
