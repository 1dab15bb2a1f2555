"""Who waited for whom, told from a run's events."""

from __future__ import annotations

from typing import Any

from stateset_agents.reporting.curves import who_waits
from stateset_agents.reporting.waits import BOTH, NEITHER, TALKING, UPDATING, waits


def event(what: str, at: float, step: int = 1, **fields: Any) -> dict[str, Any]:
    return {"event": what, "step": step, "monotonic": at, **fields}


STRICT = [
    event("group admitted", 10.0, group=0),
    event("group admitted", 10.0, group=1),
    event("group finished", 12.0, group=0),
    event("group finished", 13.0, group=1),
    event("update begun", 13.5),
    event("group consumed", 15.0, group=0),
    event("update ended", 15.5),
]


def test_without_overlap_one_waits_for_the_other() -> None:
    [line] = waits(STRICT)
    assert line.step == 1
    assert line.values == {TALKING: 3.0, BOTH: 0.0, UPDATING: 2.0, NEITHER: 0.5}


def test_with_overlap_both_go_on() -> None:
    later = [
        event("group admitted", 16.0, 2, group=2),
        event("group admitted", 16.0, 3, group=3),
        event("group finished", 18.0, 2, group=2),
        event("update begun", 18.0, 2),
        event("group finished", 19.0, 3, group=3),
        event("update ended", 20.0, 2),
    ]
    first, second = waits([*STRICT, *later])
    assert first.values[BOTH] == 0.0
    assert second.step == 2
    assert second.values == {TALKING: 2.0, BOTH: 1.0, UPDATING: 1.0, NEITHER: 0.5}


def test_what_a_killed_process_left_open_is_forgotten() -> None:
    killed = [event("group admitted", 16.0, 2, group=2), event("update begun", 17.0, 2)]
    for begins in ([{"event": "resumed", "step": 1}], []):  # a clock that goes back says it, too
        again = [{**one, "step": 2, "monotonic": one["monotonic"] - 8} for one in STRICT]
        _, line = waits([*STRICT, *killed, *begins, *again])
        assert line.step == 2
        assert line.values == {TALKING: 3.0, BOTH: 0.0, UPDATING: 2.0, NEITHER: 0.5}


def test_dropped_groups_are_under_way_no_more() -> None:
    events = [*STRICT[:2], event("groups dropped", 11.0, groups=[0, 1]), event("update ended", 14.0)]
    [line] = waits(events)
    assert (line.values[TALKING], line.values[NEITHER]) == (1.0, 3.0)


def test_the_chart_is_of_parts_that_make_the_step() -> None:
    [chart] = who_waits(waits(STRICT))
    assert chart.stacked
    assert [one.values for one in chart.series] == [[3.0], [0.0], [2.0], [0.5]]
    assert chart.range is not None
    assert chart.range[1] > 5.5
    assert who_waits(waits([{"event": "paths", "step": 0}])) == []
