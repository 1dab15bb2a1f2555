"""An agent whose context is too short learns to write summaries that hold what it needs."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from repository_paths import ROOT

pytestmark = pytest.mark.long


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/short_memory.py, imported."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module("short_memory")
    monkeypatch.setattr(module.critic, "assign_credit", module.assign_credit)  # put back what a test masks
    return module


async def test_summaries_that_are_trained_carry_the_fact(example: ModuleType, tmp_path: Path) -> None:
    before, after = await example.main(80, 0, str(tmp_path))
    assert before < 0.4
    assert after >= 0.8


async def test_summaries_that_are_masked_stay_at_chance(example: ModuleType, tmp_path: Path) -> None:
    example.mask_summaries()
    before, after = await example.main(80, 0, str(tmp_path))
    assert before < 0.4
    assert after < 0.4
