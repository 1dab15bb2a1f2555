"""Who set each setting of a training, and the verb that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateset_agents.cli.main import main
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.setting_origins import counted_origins, setting_origins


@pytest.mark.parametrize(
    ("settings", "name", "origin", "value"),
    [
        ({"beta": 0.3}, "beta", "you", 0.3),
        ({"kl_coef": 0.3}, "beta", "you", 0.3),
        ({"group_size": 4}, "num_generations", "the model's card", 6),
        ({"profile": "aggressive"}, "learning_rate", "profile aggressive", 2e-5),
        ({"profile": "aggressive", "beta": 0.01}, "beta", "you", 0.01),
        ({"advantage_estimator": "turn_gae"}, "min_group_size", "estimator turn_gae", 1),
        ({"loss_type": "gspo", "profile": "conservative"}, "clip_ratio", "loss gspo", 3e-4),
        ({"distillation": {"teacher": "scripted"}}, "beta", "the teacher", 0.0),
        ({}, "beta", "default", 0.1),
    ],
)
def test_the_layer_that_won_is_named(settings: dict[str, Any], name: str, origin: str, value: float) -> None:
    card = {"num_generations": 6} if origin == "the model's card" else {}
    given = {} if card else settings
    config, recommended = TrainingConfig(**given).with_recommended(card)
    assert setting_origins(config, recommended)[name] == origin
    assert getattr(config, name) == value


def test_the_user_wins_over_the_card() -> None:
    config, recommended = TrainingConfig(group_size=4).with_recommended({"num_generations": 6, "beta": 0.2})
    origins = setting_origins(config, recommended)
    assert (origins["num_generations"], origins["beta"]) == ("you", "the model's card")
    assert counted_origins(origins).endswith(f"{len(origins) - 4} default")


def test_train_explain_lists_every_setting_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "agent: {model_name: embedded:desk}\nenvironment: retail_desk\n"
        f"training: {{beta: 0.05, output_dir: {tmp_path / 'runs'}}}\n"
    )
    assert main(["train", str(file), "--explain", "--seed", "7"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {row[0] for row in rows} == set(TrainingConfig.model_fields)
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["beta"] == ["0.05", "you"]
    assert by_name["seed"] == ["7", "you"]
    assert by_name["num_generations"] == ["8", "the", "model's", "card"]
    assert not (tmp_path / "runs").exists()


def test_a_run_counts_who_set_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "agent: {model_name: embedded:desk, max_new_tokens: 8}\nenvironment: retail_desk\n"
        f"training: {{num_generations: 2, per_device_train_batch_size: 4, output_dir: {tmp_path / 'runs'}}}\n"
    )
    main(["train", str(file), "--max-steps", "1", "--no-eval"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("settings: "))
    assert " by you, " in line
    assert " by the model's card, " in line
