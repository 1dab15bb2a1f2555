"""Warnings in the middle of a run: once, when there is a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from healthy_run import HEALTHY, TRAINING, Series

from stateset_agents.runs.recorder import StepWarnings

SAME = {"group/zero_variance": 1.0, "reward/mean": 0.5}


def look(warnings: StepWarnings, *steps: Mapping[str, float]) -> list[str]:
    """The checks that warned, in order."""
    told = []
    for number, metrics in enumerate(steps, 1):
        told += [finding.check for finding in warnings.check(number, metrics, TRAINING)]
    return told


def test_a_reward_that_never_differs_is_said_once_after_three_steps(caplog: pytest.LogCaptureFixture) -> None:
    warnings = StepWarnings()
    for number in range(1, 9):
        look(warnings, SAME)
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
        look(warnings, {**SAME, "group/zero_variance": share})
    look(warnings, {"group/zero_variance": 1.0})  # nothing was scored: another trouble, told elsewhere
    assert not caplog.records


@pytest.mark.parametrize(("spread", "number"), [(0.5, 0), (0.0, 1)])
def test_tied_groups_that_are_compared_with_one_another_teach_where_they_differ(spread, number):
    warnings, settings = StepWarnings(), {**TRAINING, "baseline_type": "global_mean"}
    told = [warnings.check(step, {**SAME, "reward/std": spread}, settings) for step in range(1, 9)]
    assert sum(map(len, told)) == number


def test_an_event_loop_that_stood_still_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    look(StepWarnings(), *({"time/loop_lag": lag} for lag in (0.2, 2.5, 3.0)))
    [record] = caplog.records
    assert "the event loop stood still for 2.5 s: no code of yours was seen there" in record.getMessage()


def test_user_code_is_named_only_where_it_stood_on_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    own = {"time/loop_lag": 2.5, "time/loop_lag_user": 2.4}
    [finding] = StepWarnings().check(1, own, {}, "my_env.py:31, step")
    assert finding.seen == "the event loop stood still for 2.5 s in your code (my_env.py:31, step)"
    assert finding.cure.startswith("it blocks there; make that function a plain def")
    [finding] = StepWarnings().check(1, {**own, "time/loop_lag_user": 0.3}, {}, "my_env.py:31, step")
    assert "your code" not in finding.seen
    assert "plain def" not in finding.cure


def test_replies_that_are_cut_are_said_in_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    look(StepWarnings(), *({"rollout/cut_replies": share} for share in (0.38, 0.4)))
    [record] = caplog.records
    assert record.getMessage() == (
        "cut replies: 38.0% of the last replies were cut by their limit of tokens: raise "
        "agent.max_new_tokens (or max_context_tokens), or ask for shorter replies in the system prompt"
    )


STEPS = 30


def steps_of(changed: Mapping[str, Series]) -> list[Mapping[str, float]]:
    series: dict[str, Any] = {**HEALTHY, **changed}
    return [
        {name: one[step] if isinstance(one, Sequence) else one for name, one in series.items()}
        for step in range(STEPS)
    ]


def test_a_healthy_run_hears_nothing() -> None:
    assert look(StepWarnings(), *steps_of({})) == []


@pytest.mark.parametrize(
    ("check", "changed", "at"),
    [
        ("numbers", {"loss/policy": [0.1, math.nan] * 15}, 2),
        ("gradients", {"optimizer/grad_norm": 6.0}, 5),
        ("entropy", {"policy/entropy": [0.5] * 10 + [0.01] * 20}, 15),
        ("KL to the reference", {"kl/reference": 2.5}, 5),
        ("inner passes", {"policy/clip_fraction_low": 0.95}, 5),
        ("sampler", {"policy/mismatch_rms": [0.01] * 2 + [0.9] * 28}, 3),
        ("sampler", {"policy/rollout_mismatch": [0.1] * 2 + [1.4] + [0.1] * 27}, 3),
        ("off-policy", {"policy/weight": 0.4}, 5),
        ("advantages", {"advantage/std": 3.5}, 5),
        ("failures", {"rollout/failed": 4.0}, 5),
        ("skipped steps", {"optimizer/skipped": 1.0}, 5),
        ("dependencies", {"breaker/environment": [0.0] * 9 + [1.0] * 21}, 10),
    ],
)
def test_a_trouble_is_said_once_as_soon_as_it_shows(
    check: str, changed: Mapping[str, Series], at: int
) -> None:
    warnings, steps = StepWarnings(), steps_of(changed)
    assert look(warnings, *steps[: at - 1]) == []
    assert look(warnings, steps[at - 1]) == [check]
    assert look(warnings, *steps[at:]) == []
