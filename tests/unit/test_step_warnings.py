"""Warnings in the middle of a run: once, when there is a reason."""

from __future__ import annotations

import pytest

from stateset_agents.training.step_warnings import StepWarnings

SAME = {"group/zero_variance": 1.0, "reward/mean": 0.5}


def test_a_reward_that_never_differs_is_said_once_after_three_steps(caplog: pytest.LogCaptureFixture) -> None:
    warnings = StepWarnings()
    for number in range(1, 9):
        warnings.look(SAME)
        assert len(caplog.records) == (number >= 3)
    assert (
        caplog.records[0]
        .getMessage()
        .startswith(
            "no group had two different rewards in 3 steps (mean 0.5), so nothing is learned: is the reward"
        )
    )


def test_one_group_that_differs_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    warnings = StepWarnings()
    for share in (1.0, 1.0, 0.75, 1.0, 1.0):
        warnings.look({**SAME, "group/zero_variance": share})
    warnings.look({"group/zero_variance": 1.0})  # nothing was scored: another trouble, told elsewhere
    assert not caplog.records


def test_an_event_loop_that_stood_still_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warnings = StepWarnings()
    for lag in (0.2, 2.5, 3.0):
        warnings.look({"time/loop_lag": lag})
    [record] = caplog.records
    assert "the event loop stood still for 2.5 s" in record.getMessage()
