"""A user's load from a CSV file: `seconds,requests_per_second` (or per_minute, per_hour), one row per moment.

Each episode is a window of it, drawn by the seed. Between two moments the load is a line.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from stateset_agents.numeric.autoscaling.queueing import Array
from stateset_agents.numeric.autoscaling.workload import realised
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that, nearest

_UNITS = {"requests_per_second": 1.0, "requests_per_minute": 60.0, "requests_per_hour": 3600.0}


@dataclass(frozen=True, slots=True, eq=False)
class TraceLoad:
    """Measured load."""

    seconds: Array  # [N] from 0 on, rising
    rates: Array  # [N] requests per second

    @classmethod
    def from_csv(cls, path: str | Path) -> Self:
        """Raises ConfigurationError, naming the line, for what is no trace."""
        path = Path(path)
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                lines = list(csv.reader(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} cannot be read as a CSV file: {error}") from error
        if not lines:
            raise ConfigurationError(f"{path} is empty: give it a line seconds,requests_per_second")
        header = [name.strip() for name in lines[0]]
        unit = _unit(header, path)
        time_column, rate_column = header.index("seconds"), header.index(unit)
        rows = [(number, row) for number, row in enumerate(lines[1:], start=2) if row]
        seconds = [_number(path, number, row, time_column, "seconds") for number, row in rows]
        rates = [_number(path, number, row, rate_column, unit) for number, row in rows]
        for (number, _), rate in zip(rows, rates, strict=True):
            if rate < 0:
                raise ConfigurationError(f"{path}, line {number}: {unit} must not be negative, got {rate:g}")
        for (number, _), before, after in zip(rows[1:], seconds, seconds[1:], strict=False):
            if after <= before:
                raise ConfigurationError(
                    f"{path}, line {number}: seconds must rise, got {after:g} after {before:g}: sort the rows"
                )
        expect_that(len(rows) >= 2, f"{path}", "have at least two rows of load", len(rows))
        if not any(rates):
            raise ConfigurationError(f"{path}: {unit} is 0 in every row: there is nothing to serve")
        return cls(np.array(seconds) - seconds[0], np.array(rates) / _UNITS[unit])

    @property
    def mean_rate(self) -> float:
        """Requests per second over the whole trace."""
        return float(np.trapezoid(self.rates, self.seconds) / self.seconds[-1])

    def draw(self, seed: int, num_steps: int, step_seconds: float) -> Array:
        """[num_steps] requests per second, Poisson around a window of the trace.

        Raises ConfigurationError where the trace is shorter than the window.
        """
        span, length = num_steps * step_seconds, float(self.seconds[-1])
        if span > length:
            raise ConfigurationError(
                f"the trace lasts {length:g} s and an episode needs {span:g} s: give a longer one, or a "
                f"horizon of {max(int(length / step_seconds) - 1, 0)} steps at most"
            )
        generator = np.random.default_rng([seed, 1])
        begin = generator.uniform(0, length - span)
        middles = begin + (np.arange(num_steps) + 0.5) * step_seconds
        return realised(generator, np.interp(middles, self.seconds, self.rates), step_seconds)


def _unit(header: Sequence[str], path: Path) -> str:
    units = [name for name in header if name in _UNITS]
    for name in ("seconds", *([] if units else [next(iter(_UNITS))])):
        if name not in header:
            choice = name if name == "seconds" else alternatives(_UNITS)
            raise ConfigurationError(
                f"{path} must have a column {choice}, got {','.join(header)}{nearest(name, header)}"
            )
    if len(units) > 1:
        raise ConfigurationError(f"{path} must have one column of load, got {', '.join(units)}")
    return units[0]


def _number(path: Path, number: int, row: Sequence[str], column: int, name: str) -> float:
    text = row[column] if column < len(row) else ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigurationError(f"{path}, line {number}: {name} must be a number, got {text!r}")
    return value
