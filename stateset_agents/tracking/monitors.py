"""The table of health monitors: what is measured, its thresholds, and advice.

Used by the checks of `diagnostics` and by the trainer's live warnings (`runs.recorder`); the report and
`stateset-agents diagnose` show their findings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from stateset_agents.runtime.yaml_files import read_yaml

Severity = Literal["ok", "warn", "fail"]

_SIGNS: Mapping[Severity, str] = {"ok": "✓", "warn": "!", "fail": "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Severity
    seen: str
    """The numbers."""
    cure: str = ""
    """The advice; empty if the verdict is ok."""

    @property
    def sign(self) -> str:
        return _SIGNS[self.verdict]

    def __str__(self) -> str:
        line = f"{self.sign} {self.check}: {self.seen}"
        return f"{line} -> {self.cure}" if self.cure else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Thresholds of one check."""

    warn: float
    """Above it the check warns."""
    fail: float = math.inf
    """Above it the check fails."""
    advice: str
    """The advice, in plain words."""
    live: Severity | None = None
    """The least verdict that is logged during the run; None: only at its end, since it may pass by itself."""
    why: str
    """The quantity that is measured, and the reason for the thresholds."""


def graded(check: str, value: float, seen: str, advice: str | None = None) -> Finding:
    """Ok up to `warn`, a warning up to `fail`; `advice` replaces that of the table."""
    monitor = monitors()[check]
    verdict: Severity = "fail" if value > monitor.fail else "warn" if value > monitor.warn else "ok"
    return Finding(check, verdict, seen, "" if verdict == "ok" else advice or monitor.advice)


@cache
def monitors() -> Mapping[str, Monitor]:
    """The monitors by the names of their checks, from `monitors.yaml`."""
    table = read_yaml(Path(__file__).with_name("monitors.yaml"))
    return {name: Monitor(**fields) for name, fields in table.items()}


MAX_TIED_STEPS = 3
"""Steps in a row without two different rewards in any group, after which it is said at once."""
MAX_LOOP_LAG = 1.0
"""Seconds without the event loop, from which on it is said at once."""
OTHER_CODE_HINT = (
    "no code of yours was seen there: is the machine busy with other work, or does an installed environment, "
    "tool or reward block?"
)
"""The advice where the event loop waits for other code than the user's."""
