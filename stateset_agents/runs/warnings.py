"""What a run should not have to end to tell: a reward that never differs, gradients that explode, a collapse.

The trainer hands each step's metrics to a `StepWarnings`; every warning comes once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from stateset_agents.algorithms.baselines import is_over_batch
from stateset_agents.tracking.diagnostics import History, live_findings
from stateset_agents.tracking.monitors import LONG_LAG, NOT_THE_USERS, SAME_STEPS, Finding
from stateset_agents.tracking.run_log import MetricLine
from stateset_agents.types.logs import get_logger

__all__ = ["StepWarnings"]

_log = get_logger(__name__)

_AT_ONCE = ("numbers", "cut replies")
_FIRST, _LAST = 5, 20
"""Steps that are remembered: how the run began, and how it stands."""


class StepWarnings:
    """Looks at the metrics of one step after another."""

    def __init__(self) -> None:
        self._first: list[MetricLine] = []
        self._last: deque[MetricLine] = deque(maxlen=_LAST)
        self._same = 0
        self._told: set[tuple[str, str]] = set()

    def look(
        self,
        step: int,
        metrics: Mapping[str, float],
        training: Mapping[str, Any],
        lag_place: str | None = None,
    ) -> list[Finding]:
        """Log what is new in this step, and give it; `training` are the settings, `lag_place` is where the
        user's code stood on the event loop."""
        line = MetricLine(step, 0.0, dict(metrics))
        if len(self._first) < _FIRST:
            self._first.append(line)
        else:
            self._last.append(line)
        at_once = self._at_once(metrics, training, lag_place)
        found = [*at_once, *self._by_the_checks(training)]
        new = [one for one in found if (one.check, one.verdict) not in self._told]
        self._told |= {(one.check, one.verdict) for one in new}
        for one in new:
            name = "" if one in at_once else f"{one.check}: "
            _log.warning(f"{name}{one.seen}: {one.cure}")
        return new

    def _by_the_checks(self, training: Mapping[str, Any]) -> list[Finding]:
        """One step says little of anything but numbers that are none, and replies that are cut."""
        lines = [*self._first, *self._last]
        found = live_findings(History(lines, training, {}))
        return found if len(lines) >= _FIRST else [one for one in found if one.check in _AT_ONCE]

    def _at_once(
        self, metrics: Mapping[str, float], training: Mapping[str, Any], lag_place: str | None
    ) -> list[Finding]:
        found = []
        tied = "reward/mean" in metrics and metrics.get("group/zero_variance") == 1.0
        if is_over_batch(training.get("baseline_type")):  # then one group teaches by the others
            tied = tied and not metrics.get("reward/std")
        self._same = self._same + 1 if tied else 0
        if self._same == SAME_STEPS:
            seen = (
                f"no group had two different rewards in {SAME_STEPS} steps (mean "
                f"{metrics['reward/mean']:.3g}), so nothing is learned"
            )
            cure = (
                "is the reward the same whatever the agent says, are all scenarios too easy or too hard, or "
                "the replies all alike (temperature)?"
            )
            found.append(Finding("tied groups", "fail", seen, cure))
        if metrics.get("time/loop_lag", 0.0) >= LONG_LAG:
            seen = f"the event loop stood still for {metrics['time/loop_lag']:.1f} s"
            cure = NOT_THE_USERS
            if metrics.get("time/loop_lag_user", 0.0) >= LONG_LAG:
                seen += f" in your code ({lag_place})" if lag_place else " in your code"
                cure = "it blocks there; make that function a plain def, which runs in a thread"
            found.append(Finding("event loop", "warn", seen, cure))
        return found
