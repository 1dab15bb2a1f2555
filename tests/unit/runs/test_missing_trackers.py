"""Naming a tracker: one alone, none of that name, and its library missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_training import make_trainer

from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError


def test_one_tracker_needs_no_list_and_an_unknown_one_is_refused() -> None:
    assert TrainingConfig(report_to="wandb").report_to == ("wandb",)
    assert TrainingConfig(report_to="none").report_to == ()
    with pytest.raises(ConfigurationError, match=r"report_to.*'tensorboard'"):
        TrainingConfig(report_to=["tensorbord"])


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
async def test_a_missing_library_is_told_with_its_cure_before_the_run_has_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    trainer = make_trainer(tmp_path, report_to=name)
    with pytest.raises(ConfigurationError, match=f'pip install "{name}>='):
        await trainer.initialize()
    assert not (tmp_path / "runs").exists()
    await trainer.close()
