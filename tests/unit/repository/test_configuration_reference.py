"""docs/configuration.md is what the settings models say, and every setting says what it does."""

from __future__ import annotations

import subprocess

import pytest
from repository_paths import ROOT
from warm_python import warm_python

from stateset_agents.core.agent import AgentConfig
from stateset_agents.training.config import PROFILES, TrainingConfig
from stateset_agents.training.experiment import EvaluationConfig, ExperimentConfig
from stateset_agents.types.settings import Settings

MODELS = [ExperimentConfig, AgentConfig, TrainingConfig, EvaluationConfig]


def test_the_page_is_up_to_date() -> None:
    check = subprocess.run(
        [*warm_python(), str(ROOT / "scripts" / "configuration_reference.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert (check.returncode, check.stderr) == (0, "")


@pytest.mark.parametrize("model", MODELS)
def test_every_setting_has_a_description_and_a_row(model: type[Settings]) -> None:
    rows = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()
    for name, text in model.descriptions().items():
        assert text, f"{model.__name__}.{name} has no description"
        assert any(row.startswith(f"| `{name}` |") and text[:20] in row for row in rows), name


def test_every_accepted_name_stands_in_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert "One of `grpo`, `dapo`, `dr_grpo`" in page
    assert [name for name in TrainingConfig.field_names() if f"`{name}`" not in page] == []
    assert [name for table in PROFILES.values() for name in table if f"| `{name}` |" not in page] == []
