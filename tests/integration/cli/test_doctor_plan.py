"""`doctor --plan`: the memory of a training on a GPU that need not be there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from repository_paths import ROOT
from tiny_models import odd_model

from stateset_agents.cli.main import main
from stateset_agents.training import trainer as trainer_module
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import Experiment, load_experiment
from stateset_agents.training.memory_plan import plan_training
from stateset_agents.types.errors import ConfigurationError

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


async def test_a_training_plans_before_it_loads_and_keeps_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "gpu_memory", lambda device: (24 * 2**30, 0))
    changes = {"training.output_dir": str(tmp_path), "training.progress": False, "agent.device": "cpu"}
    trainer = Experiment(load_experiment(FILE, changes)).trainer
    await trainer.initialize()
    assert trainer.memory_plan is not None
    assert trainer.config.micro_batch_tokens == trainer.memory_plan.micro_batch_tokens
    assert trainer.agent.config.max_cached_tokens == trainer.memory_plan.max_cached_tokens
    kept = (trainer.run.path / "config.yaml").read_text()
    assert f"micro_batch_tokens: {trainer.memory_plan.micro_batch_tokens}" in kept
    metrics = await trainer.step()
    assert metrics["memory/gpu/predicted_peak_mib"] == pytest.approx(trainer.memory_plan.peak / 2**20)
    await trainer.close()


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "gpu_memory", lambda device: (int(1.13 * 2**30), 0))
    trainer = Experiment(load_experiment(FILE, {"training.output_dir": str(tmp_path)})).trainer
    with pytest.raises(ConfigurationError, match=r"update would take .* are usable: rollout_sleep"):
        await trainer.initialize()
    assert trainer.agent.loads_model
    assert files(tmp_path) == []
    await trainer.close()


def test_a_model_that_cannot_be_simulated_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd_model("rwkv").save_pretrained(tmp_path / "model")
    capsys.readouterr()
    file = tmp_path / "train.yaml"
    file.write_text("agent: {model_name: ./model}\nenvironment: retail_desk\n")
    assert main(["doctor", "--plan", str(file), "--gpu-memory", "24GB"]) == 1
    error = capsys.readouterr().err
    assert "the memory of a rwkv cannot be planned" in error
    assert error.count("\n") == 1


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
