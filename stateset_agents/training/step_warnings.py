"""What a run should not have to end to tell: a reward that never differs, an event loop that stands still.

The trainer hands each step's metrics to a `StepWarnings`; every warning comes once.
"""

from __future__ import annotations

from collections.abc import Mapping

from stateset_agents.tracking.logging import get_logger

__all__ = ["StepWarnings"]

_log = get_logger(__name__)

SAME_STEPS = 3
"""Steps in a row without two different rewards in any group, after which it is said."""
LONG_LAG = 1.0
"""Seconds without the event loop, from which on it is said."""


class StepWarnings:
    """Looks at the metrics of one step after another."""

    def __init__(self) -> None:
        self._same = 0
        self._lagged = False

    def look(self, metrics: Mapping[str, float]) -> None:
        """Warn of what is new in this step."""
        scored = "reward/mean" in metrics
        self._same = self._same + 1 if scored and metrics.get("group/zero_variance") == 1.0 else 0
        if self._same == SAME_STEPS:
            _log.warning(
                f"no group had two different rewards in {SAME_STEPS} steps (mean "
                f"{metrics['reward/mean']:.3g}), so nothing is learned: is the reward the same whatever the "
                "agent says, are all scenarios too easy or too hard, or the replies all alike (temperature)?"
            )
        if metrics.get("time/loop_lag", 0.0) >= LONG_LAG and not self._lagged:
            self._lagged = True
            _log.warning(
                f"the event loop stood still for {metrics['time/loop_lag']:.1f} s: in an async user, tool, "
                "reward or callback something blocks; make that function a plain def, which runs in a thread"
            )
