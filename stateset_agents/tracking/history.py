"""The metrics of a run as the checks read them: values, and how they stood at the start and at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stateset_agents.tracking.run_log import MetricLine

__all__ = ["History", "window"]


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of a run's steps, its training settings, how it ended, and what broke most often."""

    lines: Sequence[MetricLine]
    training: Mapping[str, Any]
    summary: Mapping[str, Any]
    commonest_error: str | None = None
    """`RewardError: ... (12 times)`"""

    def all(self, name: str) -> list[float]:
        """Every value of a metric, NaN included."""
        return [line.values[name] for line in self.lines if name in line.values]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.all(name) if math.isfinite(value)]

    def start(self, name: str) -> float | None:
        values = self.finite(name)
        return fmean(values[: window(values)]) if values else None

    def end(self, name: str) -> float | None:
        values = self.finite(name)
        return fmean(values[-window(values) :]) if values else None

    def solved(self) -> bool:
        """Do nine in ten of the last conversations succeed? Little is left to learn then."""
        return (self.end("success/rate") or 0.0) >= 0.9


def window(values: Sequence[float]) -> int:
    """How many values the start and the end are: a tenth, five at least."""
    return max(5, len(values) // 10)
