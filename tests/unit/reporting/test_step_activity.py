"""Seconds of each step with rollouts, updates or both, from the events of a run."""

from __future__ import annotations

from typing import Any

from stateset_agents.reporting.curves import (
    OTHER,
    OVERLAPPED,
    ROLLOUT_ONLY,
    UPDATE_ONLY,
    activity_curves,
    step_activity,
)


def event(name: str, at: float, step: int = 1, **fields: Any) -> dict[str, Any]:
    return {"event": name, "step": step, "monotonic": at, **fields}


STRICT = [
    event("group admitted", 10.0, group=0),
    event("group admitted", 10.0, group=1),
    event("group finished", 12.0, group=0),
    event("group finished", 13.0, group=1),
    event("update begun", 13.5),
    event("group consumed", 15.0, group=0),
    event("update ended", 15.5),
]


def test_without_overlap_rollouts_and_updates_alternate() -> None:
    [line] = step_activity(STRICT)
    assert line.step == 1
    assert line.values == {ROLLOUT_ONLY: 3.0, OVERLAPPED: 0.0, UPDATE_ONLY: 2.0, OTHER: 0.5}


def test_with_overlap_both_run_at_once() -> None:
    later = [
        event("group admitted", 16.0, 2, group=2),
        event("group admitted", 16.0, 3, group=3),
        event("group finished", 18.0, 2, group=2),
        event("update begun", 18.0, 2),
        event("group finished", 19.0, 3, group=3),
        event("update ended", 20.0, 2),
    ]
    first, second = step_activity([*STRICT, *later])
    assert first.values[OVERLAPPED] == 0.0
    assert second.step == 2
    assert second.values == {ROLLOUT_ONLY: 2.0, OVERLAPPED: 1.0, UPDATE_ONLY: 1.0, OTHER: 0.5}


def test_groups_and_updates_of_a_killed_process_end_with_it() -> None:
    killed = [event("group admitted", 16.0, 2, group=2), event("update begun", 17.0, 2)]
    for begins in ([{"event": "resumed", "step": 1}], []):  # a clock that goes back says it, too
        again = [{**item, "step": 2, "monotonic": item["monotonic"] - 8} for item in STRICT]
        _, line = step_activity([*STRICT, *killed, *begins, *again])
        assert line.step == 2
        assert line.values == {ROLLOUT_ONLY: 3.0, OVERLAPPED: 0.0, UPDATE_ONLY: 2.0, OTHER: 0.5}


def test_dropped_groups_are_no_longer_active() -> None:
    events = [*STRICT[:2], event("groups dropped", 11.0, groups=[0, 1]), event("update ended", 14.0)]
    [line] = step_activity(events)
    assert (line.values[ROLLOUT_ONLY], line.values[OTHER]) == (1.0, 3.0)


def test_the_chart_s_parts_sum_to_the_step() -> None:
    [chart] = activity_curves(step_activity(STRICT))
    assert chart.stacked
    assert [item.values for item in chart.series] == [[3.0], [0.0], [2.0], [0.5]]
    assert chart.range is not None
    assert chart.range[1] > 5.5
    assert activity_curves(step_activity([{"event": "paths", "step": 0}])) == []
