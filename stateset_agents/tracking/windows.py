"""Held-out episodes of numbers over time: a policy and rules from the same starts.

An environment fills a `Trace`, the experiment writes `windows.json`, the report draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Quantities of one unit, drawn on one axis."""

    title: str
    """`Replicas`"""
    series: Mapping[str, Sequence[float]]
    """Name -> [T] a value after each step. What nobody decides, such as the load, is the same for every
    player and drawn once."""
    unit: str = ""
    """`ms`, `requests/s`"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The panels of one episode."""

    panels: Sequence[Panel]
    seconds_per_step: float | None = None
    """Seconds of a step; None: time is counted in steps."""

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, of numpy arrays too."""
        panels = [
            {
                **asdict(panel),
                "series": {name: [float(value) for value in values] for name, values in panel.series.items()},
            }
            for panel in self.panels
        ]
        return {"panels": panels, "seconds_per_step": self.seconds_per_step}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Trace:
        """Read the result of `to_json`; numbers that were not finite are None."""
        return cls(
            panels=[Panel(**panel) for panel in record["panels"]], seconds_per_step=record["seconds_per_step"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A start, and each player's episode from it."""

    name: str
    """`worst`, `median` or `best` of the starts, for the policy"""
    seed: int
    traces: Mapping[str, Trace]
    """The episodes by player; the policy first."""
    returns: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The window as windows.json has it."""
        return {
            "name": self.name,
            "seed": self.seed,
            "returns": dict(self.returns),
            "traces": {player: trace.to_json() for player, trace in self.traces.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Window:
        """Read the result of `to_json`."""
        traces = {player: Trace.from_json(trace) for player, trace in record["traces"].items()}
        return cls(**{**record, "traces": traces})
