"""The table of docs/evidence/delayed-credit.md, PPO beside GRPO, names the settings that the code knows."""

from __future__ import annotations

import re

import pytest
from repository_paths import ROOT

from stateset_agents import TrainingConfig
from stateset_agents.algorithms.memory import training_memory
from stateset_agents.types.errors import ConfigurationError

PAGE = (ROOT / "docs/evidence/delayed-credit.md").read_text(encoding="utf-8")
OTHER = {
    "baseline_type": "group_median",
    "value_learning_rate": 0.01,
    "value_iterations": 2,
    "value_clip": 0.5,
    "value_dropout": 0.1,
    "gae_lambda": 0.9,
    "bootstrap_truncated": False,
    "gamma": 0.9,
}
"""A value of each setting that is not its default."""


def cells(aspect: str) -> list[str]:
    """The columns of a row."""
    (row,) = re.findall(rf"^\| {aspect}[^|]*\|(.*)\|$", PAGE, flags=re.MULTILINE)
    return [cell.strip() for cell in row.split(" | ")]


@pytest.mark.parametrize(("column", "own", "other"), [(0, "group", "token_gae"), (1, "token_gae", "group")])
def test_a_setting_of_one_is_refused_by_the_other(column, own, other):
    names = re.findall(r"`(\w+)`", cells("hyperparameters")[column])
    assert names
    for name in names:
        TrainingConfig(advantage_estimator=own, **{name: OTHER[name]})
        with pytest.raises(ConfigurationError, match=name):
            TrainingConfig(advantage_estimator=other, **{name: OTHER[name]})


def test_the_memory_of_both_is_computed():
    grpo, ppo = (training_memory(7e9, critic=critic, reference=7e9).total for critic in (0, 7e9))
    first, second, _ = cells("memory, critic of equal size")
    assert first.startswith(f"{grpo / 1e9:.0f} GB")
    assert first.endswith(f"{100 * (1 - grpo / ppo):.1f} % less")
    assert second == f"{ppo / 1e9:.0f} GB"
