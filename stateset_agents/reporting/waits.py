"""Who waited for whom: the events of a run become the seconds that each step spent in which way.

Read from `events.jsonl`, whose events of groups and updates carry a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stateset_agents.tracking.run_log import MetricLine

__all__ = ["BOTH", "NEITHER", "TALKING", "UPDATING", "waits"]

TALKING, BOTH, UPDATING, NEITHER = "waits/talking", "waits/both", "waits/updating", "waits/neither"
"""Conversations under way and no update, both at once, an update alone, nothing of the two."""


def waits(events: Iterable[Mapping[str, Any]]) -> list[MetricLine]:
    """One line for each update: how the seconds since the end of the one before it were spent.

    A group is under way from `group admitted` to `group finished`, an update from `update begun` to
    `update ended`. What a killed process left open is forgotten where the next one begins; events without
    the clock say nothing here.

    >>> waits([{"event": "group admitted", "group": 0, "step": 1, "monotonic": 5.0}, ...])
    """
    lines: list[MetricLine] = []
    groups: set[Any] = set()
    is_updating, last = False, None
    spent = dict.fromkeys((TALKING, BOTH, UPDATING, NEITHER), 0.0)
    for event in events:
        what, now = event["event"], event.get("monotonic")
        if what == "resumed" or (now is not None and last is not None and now < last):
            groups, is_updating, last = set(), False, None
            spent = dict.fromkeys(spent, 0.0)
        if now is None:
            continue
        if last is not None:
            spent[_way(bool(groups), is_updating)] += now - last
        last = now
        if what == "group admitted":
            groups.add(event["group"])
        elif what == "group finished":
            groups.discard(event["group"])
        elif what == "groups dropped":
            groups = set()
        elif what == "update begun":
            is_updating = True
        elif what == "update ended":
            is_updating = False
            lines.append(MetricLine(event["step"], now, spent))
            spent = dict.fromkeys(spent, 0.0)
    return lines


def _way(talking: bool, updating: bool) -> str:
    if talking:
        return BOTH if updating else TALKING
    return UPDATING if updating else NEITHER
