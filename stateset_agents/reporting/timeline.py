"""Who did what when in a step: its conversations, group by group, and the updates of that time.

Read from `timeline.jsonl`, as far as it goes, and from the updates in `events.jsonl`, which have the same
clock. Steps are taken whole and evenly spaced over the run; a line is parsed when its step is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stateset_agents.reporting.units import Unit, count, evenly, spread
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog

__all__ = ["TICKS", "Timeline", "no_timeline"]

TICKS = 10_000
"""Of a second: the file's four decimals as whole numbers."""
_MOST_STEPS, _MOST_BYTES = 40, 750_000
"""In one page; bytes of timeline.jsonl, of which an eighth comes to stand there."""
_HEAD = re.compile(rb'\{"step":(\d+),')

_Updates = Mapping[int, tuple[float, float, int]]


def no_timeline() -> dict[str, Any]:
    """What `chosen` gives for a run without any."""
    return {"total": 0, "steps": []}


class Timeline:
    """What a report shows of a run's timeline.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._begin()

    def _begin(self) -> None:
        self._end = 0  # bytes read
        self._steps: dict[int, Unit] = {}

    def read(self) -> None:
        """Take in the lines that were added; all again where the file was cut, as a resumed run does."""
        file = self._folder.timeline
        if not file.exists():
            return
        if file.stat().st_size < self._end:
            self._begin()
        if self._end == 0:
            next(read_lines(file), None)  # checks the header
        with file.open("rb") as stream:
            stream.seek(self._end)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                if head := _HEAD.match(line):  # else the file's header
                    self._steps.setdefault(int(head[1]), Unit()).add(self._end, len(line))
                self._end += len(line)

    def chosen(self) -> dict[str, Any]:
        """`steps` as the page shows them, and the `total` that the run has."""
        if not self._steps:
            return no_timeline()
        number = {id(unit): step for step, unit in self._steps.items()}
        units = evenly(list(self._steps.values()), _MOST_STEPS)
        taken = spread(units, count(units), _MOST_BYTES) or units[-1:]
        updates = _updates(RunLog(self._folder).events())
        with self._folder.timeline.open("rb") as stream:
            steps = []
            for unit in taken:
                lines = []
                for place in unit.places:
                    stream.seek(place)
                    lines.append(json.loads(stream.readline()))
                steps.append(_shown(number[id(unit)], lines, updates))
        return {"total": len(self._steps), "steps": steps}


def _updates(events: Iterable[Mapping[str, Any]]) -> _Updates:
    """Step -> begin and end of its update, by the monotonic clock, and which of the run's sessions, as a
    resumed one may have another clock."""
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


def _shown(step: int, lines: Sequence[Mapping[str, Any]], updates: _Updates) -> dict[str, Any]:
    """A step in ticks from the beginning of its first conversation to the end of its update."""
    lines = [line for line in lines if line["spans"]]
    zero = min((line["begin"] for line in lines), default=0.0)
    ends = [line["begin"] + sum(seconds for _, seconds in line["spans"]) for line in lines]
    newest_session = max((session for _, _, session in updates.values()), default=0)
    _, updated, own = updates.get(step, (0.0, zero, newest_session))
    end = max([*ends, updated], default=zero)
    groups: list[dict[str, Any]] = []
    newest = -1
    for line in lines:
        again = not line["branch_of"] and line["member"] <= newest  # a scenario that came twice in the step
        if not groups or groups[-1]["group"] != line["group"] or again:
            groups.append({"group": line["group"], "rows": []})
        newest = newest if line["branch_of"] else line["member"]
        groups[-1]["rows"].append(_row(line, zero))
    return {
        "step": step,
        "length": _ticks(end - zero),
        "updates": [
            {"step": number, "begin": _ticks(begin - zero), "end": _ticks(stop - zero)}
            for number, (begin, stop, session) in updates.items()
            if session == own and stop > zero and begin < end
        ],
        "groups": groups,
    }


def _row(line: Mapping[str, Any], zero: float) -> dict[str, Any]:
    """`did` has the first letter of each thing a conversation did, `ticks` for how long."""
    return {
        "member": line["member"],
        "branch_of": line["branch_of"],
        "begin": _ticks(line["begin"] - zero),
        "did": "".join(what[0] for what, _ in line["spans"]),
        "ticks": [_ticks(seconds) for _, seconds in line["spans"]],
    }


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)
