"""The metrics of a run for the checks: all values, and the means at the start and at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stateset_agents.tracking.run_log import MetricLine
from stateset_agents.tracking.units import CONVERSATIONS, NUMERIC, Units


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of a run's steps, its training settings, its summary, and its most common error."""

    lines: Sequence[MetricLine]
    training: Mapping[str, Any]
    summary: Mapping[str, Any]
    most_common_error: str | None = None
    """`RewardError: ... (12 times)`"""
    gains: Sequence[float] = ()
    """The held-out results after training less those before it, scenario by scenario (`held_out_gains`)."""

    def values(self, name: str) -> list[float]:
        """Every value of a metric, NaN included."""
        return [line.values[name] for line in self.lines if name in line.values]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.values(name) if math.isfinite(value)]

    def start(self, name: str) -> float | None:
        """To compare with the end; None where there are too few steps for both."""
        values = self.finite(name)
        return fmean(values[: window(values)]) if len(values) >= 2 * window(values) else None

    def end(self, name: str) -> float | None:
        values = self.finite(name)
        return fmean(values[-window(values) :]) if values else None

    def is_numeric(self) -> bool:
        """Are its episodes numbers, not conversations?"""
        return bool(self.values("episode/length"))

    def units(self) -> Units:
        """Of its numbers."""
        return NUMERIC if self.is_numeric() else CONVERSATIONS

    def is_solved(self) -> bool:
        """Do nine in ten of the last conversations succeed? Then little is left to learn."""
        return (self.end("success/rate") or 0.0) >= 0.9


def part_name(name: str, metrics: Mapping[str, float]) -> str:
    """The name of a part's metric, such as of a reward's term: `reward/mean_part` for a term called mean, as
    what reads `reward/mean` wants the mean."""
    return f"{name}_part" if name in metrics else name


def window(values: Sequence[float]) -> int:
    """How many values the start and the end have: a tenth, at least five."""
    return max(5, len(values) // 10)
