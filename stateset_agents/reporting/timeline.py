"""The timeline of a step: its conversations, group by group, and the updates of that time.

Read from `timeline.jsonl`, which may still grow, and from the updates in `events.jsonl`, which have the same
clock. Steps are selected whole and evenly spaced over the run; a line is parsed if its step is selected.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stateset_agents.reporting.conversations import (
    LineGroup,
    evenly_spaced,
    num_lines,
    within_limits,
)
from stateset_agents.tracking.jsonl import GrowingFile
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import MetricLine, RunLog

TICKS = 10_000
"""Per second: the file's four decimals as whole numbers."""
_MAX_STEPS, _MAX_BYTES = 40, 750_000
"""The most steps and bytes of timeline.jsonl in one page; the page takes an eighth of these bytes."""
_FIRST_FIELD = re.compile(rb'\{"step":(\d+),')

_Updates = Mapping[int, tuple[float, float, int]]


class Timeline:
    """The part of a run's timeline.jsonl that a report shows."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lines = GrowingFile(folder.timeline)
        self._steps: dict[int, LineGroup] = {}

    def read(self) -> None:
        """Read the lines that were added, or all again if the file was truncated."""
        if self._lines.was_truncated():
            self._steps = {}
        for offset, line in self._lines.new_lines():
            match = _FIRST_FIELD.match(line)
            step = int(match[1]) if match else self._lines.parse(line, offset)["step"]
            self._steps.setdefault(step, LineGroup()).add(offset, len(line))

    def select(self) -> dict[str, Any]:
        """`steps` as the page shows them, and the `total` that the run has."""
        if not self._steps:
            return {"total": 0, "steps": []}
        number = {id(group): step for step, group in self._steps.items()}
        groups = evenly_spaced(list(self._steps.values()), _MAX_STEPS)
        selected = within_limits(groups, num_lines(groups), _MAX_BYTES) or groups[-1:]
        log = RunLog(self._folder)
        updates, rows = _updates(log.events()), _rows(log.metrics())
        steps = []
        for group in selected:
            lines, step = list(self._lines.records_at(group.offsets)), number[id(group)]
            steps.append(_step_data(step, lines, updates) | {"rows": rows.get(step)})
        return {"total": len(self._steps), "steps": steps}


def _rows(lines: Iterable[MetricLine]) -> dict[int, tuple[float, float]]:
    """Step -> rows of its conversations, mean and largest, where one has several."""
    names = ("rollout/rows", "rollout/rows_max")
    logged = {
        line.step: (line.values[names[0]], line.values[names[1]])
        for line in lines
        if line.values.keys() >= {*names}
    }
    return {step: rows for step, rows in logged.items() if rows[1] > 1}


def _updates(events: Iterable[Mapping[str, Any]]) -> _Updates:
    """Step -> begin and end of its update by the monotonic clock, and the number of the run's session: after
    a resume the clock may be another."""
    begun: dict[int, float] = {}
    updates: dict[int, tuple[float, float, int]] = {}
    session = 0
    for event in events:
        session += event["event"] == "resumed"
        if "monotonic" not in event:
            continue
        if event["event"] == "update begun":
            begun[event["step"]] = event["monotonic"]
        elif event["event"] == "update ended" and event["step"] in begun:
            updates[event["step"]] = (begun[event["step"]], event["monotonic"], session)
    return updates


def _step_data(step: int, lines: Sequence[Mapping[str, Any]], updates: _Updates) -> dict[str, Any]:
    """A step in ticks from the beginning of its first conversation to the end of its update."""
    lines = [line for line in lines if line["spans"]]
    origin = min((line["begin"] for line in lines), default=0.0)
    ends = [line["begin"] + sum(seconds for _, seconds in line["spans"]) for line in lines]
    last_session = max((session for _, _, session in updates.values()), default=0)
    _, update_end, session_of_step = updates.get(step, (0.0, origin, last_session))
    end = max([*ends, update_end], default=origin)
    groups: list[dict[str, Any]] = []
    last_member = -1
    for line in lines:
        is_repeated = not line["branch_of"] and line["member"] <= last_member  # a scenario drawn twice
        if not groups or groups[-1]["group"] != line["group"] or is_repeated:
            groups.append({"group": line["group"], "rows": []})
        last_member = last_member if line["branch_of"] else line["member"]
        groups[-1]["rows"].append(_row(line, origin))
    return {
        "step": step,
        "length": _ticks(end - origin),
        "updates": [
            {"step": number, "begin": _ticks(begin - origin), "end": _ticks(stop - origin)}
            for number, (begin, stop, session) in updates.items()
            if session == session_of_step and stop > origin and begin < end
        ],
        "groups": groups,
    }


def _row(line: Mapping[str, Any], origin: float) -> dict[str, Any]:
    """`did` has the first letter of each thing that the conversation did, `ticks` its duration."""
    return {
        "member": line["member"],
        "branch_of": line["branch_of"],
        "begin": _ticks(line["begin"] - origin),
        "did": "".join(doing[0] for doing, _ in line["spans"]),
        "ticks": [_ticks(seconds) for _, seconds in line["spans"]],
    }


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)
