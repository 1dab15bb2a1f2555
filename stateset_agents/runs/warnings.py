"""Warnings while a run goes on: a reward that never differs, gradients that explode, a collapse.

The recorder hands each step's metrics to a `StepWarnings`, which gives every warning once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from stateset_agents.algorithms.baselines import is_over_batch
from stateset_agents.tracking.diagnostics import live_findings
from stateset_agents.tracking.history import History
from stateset_agents.tracking.monitors import MAX_LOOP_LAG, MAX_TIED_STEPS, OTHER_CODE_HINT, Finding
from stateset_agents.tracking.run_log import MetricLine
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_EARLY_CHECKS = ("vocabulary", "numbers", "cut replies")
"""What the first steps already show; the other checks need several steps."""
_FIRST, _LAST = 5, 20
"""Steps that are remembered: how the run began, and how it stands."""


class StepWarnings:
    """Checks the metrics of one step after another."""

    def __init__(self) -> None:
        self._first: list[MetricLine] = []
        self._last: deque[MetricLine] = deque(maxlen=_LAST)
        self._num_tied = 0
        """Steps in a row in which no group had two different rewards."""
        self._reported: set[tuple[str, str]] = set()

    def check(
        self,
        step: int,
        metrics: Mapping[str, float],
        training: Mapping[str, Any],
        lag_place: str | None = None,
    ) -> list[Finding]:
        """Log and return the warnings that are new in this step. `training`: the settings; `lag_place`: where
        the user's code held the event loop."""
        line = MetricLine(step, 0.0, dict(metrics))
        if len(self._first) < _FIRST:
            self._first.append(line)
        else:
            self._last.append(line)
        lines = [*self._first, *self._last]
        checked = live_findings(History(lines, training, {}))
        if len(lines) < _FIRST:
            checked = [finding for finding in checked if finding.check in _EARLY_CHECKS]
        at_once = self._at_once(metrics, training, lag_place)
        new = [
            finding
            for finding in (*at_once, *checked)
            if (finding.check, finding.verdict) not in self._reported
        ]
        for finding in new:
            self._reported.add((finding.check, finding.verdict))
            name = "" if finding in at_once else f"{finding.check}: "
            _log.warning(f"{name}{finding.seen}: {finding.cure}")
        return new

    def _at_once(
        self, metrics: Mapping[str, float], training: Mapping[str, Any], lag_place: str | None
    ) -> list[Finding]:
        """What one step shows by itself, or with a count of the steps before."""
        findings = []
        tied = "reward/mean" in metrics and metrics.get("group/zero_variance") == 1.0
        if is_over_batch(training.get("baseline_type")):  # then a group is compared with the others
            tied = tied and not metrics.get("reward/std")
        self._num_tied = self._num_tied + 1 if tied else 0
        if self._num_tied == MAX_TIED_STEPS:
            seen = (
                f"no group had two different rewards in {MAX_TIED_STEPS} steps (mean "
                f"{metrics['reward/mean']:.3g}), so nothing is learned"
            )
            cure = (
                "is the reward the same whatever the agent says, are all scenarios too easy or too hard, or "
                "the replies all alike (temperature)?"
            )
            if "episode/length" in metrics:
                cure = "is the task solved, or is the reward the same whatever a member does?"
            findings.append(Finding("tied groups", "fail", seen, cure))
        if metrics.get("time/loop_lag", 0.0) >= MAX_LOOP_LAG:
            seen = f"the event loop stood still for {metrics['time/loop_lag']:.1f} s"
            cure = OTHER_CODE_HINT
            if metrics.get("time/loop_lag_user", 0.0) >= MAX_LOOP_LAG:
                seen += f" in your code ({lag_place})" if lag_place else " in your code"
                cure = "it blocks there; make that function a plain def, which runs in a thread"
            findings.append(Finding("event loop", "warn", seen, cure))
        return findings
