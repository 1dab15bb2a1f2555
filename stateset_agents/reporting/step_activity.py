"""Seconds of each step with rollouts, updates, both or neither, from the run's `events.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stateset_agents.tracking.run_log import MetricLine

ROLLOUT_ONLY, OVERLAPPED = "waits/talking", "waits/both"
"""Conversations without an update, and both at once."""
UPDATE_ONLY, OTHER = "waits/updating", "waits/neither"
"""An update alone, and neither."""


def step_activity(events: Iterable[Mapping[str, Any]]) -> list[MetricLine]:
    """One line for each update: the seconds of each activity since the end of the update before it.

    A group is active from `group admitted` to `group finished`, an update from `update begun` to
    `update ended`, by the monotonic clock of these events; events without it are ignored. Groups and updates
    of a killed process end where the next process begins.

    >>> step_activity([{"event": "group admitted", "group": 0, "step": 1, "monotonic": 5.0}, ...])
    """
    lines: list[MetricLine] = []
    groups: set[Any] = set()
    is_updating, last = False, None
    seconds = dict.fromkeys((ROLLOUT_ONLY, OVERLAPPED, UPDATE_ONLY, OTHER), 0.0)
    for event in events:
        name, now = event["event"], event.get("monotonic")
        if name == "resumed" or (now is not None and last is not None and now < last):
            groups, is_updating, last = set(), False, None
            seconds = dict.fromkeys(seconds, 0.0)
        if now is None:
            continue
        if last is not None:
            seconds[_activity(bool(groups), is_updating)] += now - last
        last = now
        if name == "group admitted":
            groups.add(event["group"])
        elif name == "group finished":
            groups.discard(event["group"])
        elif name == "groups dropped":
            groups = set()
        elif name == "update begun":
            is_updating = True
        elif name == "update ended":
            is_updating = False
            lines.append(MetricLine(event["step"], now, seconds))
            seconds = dict.fromkeys(seconds, 0.0)
    return lines


def _activity(is_rolling_out: bool, is_updating: bool) -> str:
    if is_rolling_out:
        return OVERLAPPED if is_updating else ROLLOUT_ONLY
    return UPDATE_ONLY if is_updating else OTHER
