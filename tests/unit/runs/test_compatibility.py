"""What a run that goes on must have in common with the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateset_agents.runs.compatibility import Identity, as_json
from stateset_agents.training.loop.checkpointer import training_compatibility
from stateset_agents.types.errors import CheckpointError


def told(was: dict[str, Any], now: dict[str, Any]) -> str:
    """What a resume says of two trainings' settings."""
    then = {"base": "b", "scenarios": "s", "settings": as_json({"training": was})}
    here = Identity(base="b", scenarios="s", settings={"training": now})
    with pytest.raises(CheckpointError) as caught:
        training_compatibility().check(Path("step-1"), then, here)
    return str(caught.value)


def test_the_one_setting_of_a_section_that_differs_is_named() -> None:
    lora = {"rank": 16, "alpha": 32.0, "target_modules": ["q_proj"], "quantization": "4bit"}
    assert told({"lora": lora}, {"lora": {**lora, "quantization": "8bit"}}) == (
        "step-1 is from other settings (training.lora.quantization was '4bit' and is '8bit'): resume with "
        "the same ones"
    )
    assert "training.lora.rank was None and is 16" in told({"lora": None}, {"lora": lora})


def test_another_number_of_processes_is_told_how_steps_stay_as_large() -> None:
    shape = {"num_processes": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    assert told(shape, {**shape, "num_processes": 1}).endswith(
        "(training.num_processes was 2 and is 1): resume with the same ones, or with --set "
        "training.per_device_train_batch_size=4, so that a step has as many episodes"
    )
    assert told(shape, {**shape, "num_processes": 3}).endswith("resume with the same ones")
