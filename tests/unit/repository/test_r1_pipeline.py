"""The picture of R1's pipeline shows the stages of the script, with commands that exist."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.r1_pipeline import COLUMNS, FILE, Stage, pipeline


def test_the_picture_of_the_docs_is_the_script_s():
    assert FILE.read_text() == pipeline()


def test_r1_zero_is_reinforcement_alone_and_students_are_not_reinforced():
    names = [[entry.name for entry in entries if isinstance(entry, Stage)] for _, entries in COLUMNS]
    assert names[0] == ["RL (GRPO)"]
    assert [name.split()[0] for name in names[1]] == ["cold-start", "RL", "rejection", "RL"]
    assert names[2] == ["SFT"]


def test_a_stage_that_no_command_does_is_not_drawn(capsys):
    stage = next(entry for entry in COLUMNS[0][1] if isinstance(entry, Stage))
    with pytest.raises(SystemExit):
        _ = replace(stage, command="reinforce r1.yaml").lines
    assert "reinforce" in capsys.readouterr().err
