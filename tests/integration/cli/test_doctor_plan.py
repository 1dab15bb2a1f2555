"""`doctor --plan`: the memory of a training on a GPU that need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository_paths import ROOT

from stateset_agents.cli.main import main
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import load_experiment
from stateset_agents.training.memory_plan import plan_training

FILE = str(ROOT / "examples" / "desk_with_lora.yaml")


def test_a_plan_names_each_phase_and_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", FILE, "--gpu-memory", "24GB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan["phases"]) == ["start", "rollouts", "update", "hand-over"]
    assert plan["fits"] is True
    assert plan["settings"] == {
        "gradient_checkpointing": False,
        "micro_batch_tokens": 32768,
        "max_cached_tokens": 262144,
    }


def test_what_does_not_fit_exits_with_1_and_the_settings_that_would(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--plan", FILE, "--gpu-memory", "1.13GB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (update,) = [line for line in lines if line.lstrip().startswith("update")]
    assert "GB too much: rollout_sleep: true, lower micro_batch_tokens, or take a smaller model" in update


def test_a_run_keeps_what_the_plan_chose_and_what_its_file_says() -> None:
    config = load_experiment(FILE, {"training.micro_batch_tokens": 4096})
    plan = plan_training(config.agent, config.training, total=24 * 2**30)
    agent, adopted = plan.adopted(config.agent, config.training)
    assert agent.max_cached_tokens == plan.max_cached_tokens
    assert adopted.micro_batch_tokens == 4096
    assert adopted.gradient_checkpointing is False
    assert TrainingConfig(**adopted.model_dump()) == adopted


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--plan", FILE], "there is no GPU here to plan for: say how large one is, --gpu-memory 24GB"),
        (["--plan", FILE, "--gpu-memory", "lots"], "a GPU's memory is given as 24GB, got 'lots'"),
        (["--gpu-memory", "24GB"], "--gpu-memory is of a plan: give --plan FILE, too"),
        (["--plan", str(ROOT / "examples" / "cartpole.yaml")], "--plan is for trainings of language models"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    options: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", *options]) == 1
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
