"""Metric lines become the charts of the report: which there are, what they show, how far their axes go.

A chart is plain data; the page draws it (`page.charts.js`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import quantiles
from typing import Any

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.reporting.waits import BOTH, NEITHER, TALKING, UPDATING
from stateset_agents.tracking.run_log import MetricLine

__all__ = ["Chart", "Series", "axis", "learning_curves", "other_curves", "reward_terms", "who_waits"]

_MOST_POINTS = 2000
"""Of a curve; a longer one is averaged in bins."""

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; [N] values over [N] steps."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    """None where the number was not finite."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """Of the 95 % interval, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart with its words."""

    title: str
    note: str
    percent: bool
    stacked: bool
    """The series are parts of a whole, drawn on top of one another."""
    range: Range | None
    """Of the vertical axis; values may lie outside, and are then marked at its edge. None fits it."""
    series: Sequence[Series]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A chart that a report has when its metrics were logged."""

    title: str
    metrics: Mapping[str, str]
    """Metric and what its line is called."""
    note: str = ""
    percent: bool = False
    stacked: bool = False
    bounds: Range | None = None


def _one(title: str, metric: str, note: str, **options: Any) -> _Kind:
    return _Kind(title=title, metrics={metric: title}, note=note, **options)


_SHARE = (0.0, 1.0)
_BAND = "band: 95 % interval, too narrow where scenarios differ"
_LEARNING = (
    _one("Reward", "reward/mean", f"mean of the step's conversations; {_BAND}"),
    _one(
        "Success",
        "success/rate",
        f"of the step's conversations; {_BAND}",
        percent=True,
        bounds=_SHARE,
    ),
    _one(
        "Validation success",
        "eval/success",
        "of held-out scenarios; band: 95 % interval",
        percent=True,
        bounds=_SHARE,
    ),
    _one("KL to the reference", "kl/reference", "nats per token"),
    _one("Entropy", "policy/entropy", "nats per token"),
    _Kind(
        title="Clip fraction",
        metrics={"policy/clip_fraction_low": "below", "policy/clip_fraction_high": "above"},
        note="share of tokens; 0 with one pass per batch",
        percent=True,
    ),
    _one(
        "Value function",
        "value/explained_variance",
        "share of the returns' variance it explains; 1 is all, below 0 is worse than a constant",
        bounds=(-1.0, 1.0),
    ),
    _one("Value loss", "loss/value", "of the step's returns"),
    _one("Gradient norm", "optimizer/grad_norm", "before clipping"),
    _Kind(
        title="Time",
        metrics={"time/rollout": "rollout", "time/update": "update"},
        note="seconds of each step",
        stacked=True,
    ),
    _Kind(
        title="Tokens",
        metrics={
            "tokens/agent": "agent, trained",
            "tokens/branches": "branches",
            "tokens/environment": "environment",
            "tokens/padding": "padding",
        },
        note="of each step",
        stacked=True,
    ),
    _one("Speed", "tokens/per_second", "sampled tokens per second, update included"),
)
_FAMILIES, _STALENESS = "success/", "staleness/"


def learning_curves(lines: Sequence[MetricLine]) -> list[Chart]:
    """The charts everyone looks at first; those whose metrics were logged."""
    return [chart for kind in _learning(lines) if (chart := _chart(kind, lines))]


def who_waits(lines: Sequence[MetricLine]) -> list[Chart]:
    """The chart of what `waits.waits` found; none where it found nothing."""
    kind = _Kind(
        title="Who waits for whom",
        metrics={
            TALKING: "conversations; the update waits",
            BOTH: "conversations and update",
            UPDATING: "update; conversations wait",
            NEITHER: "neither: evaluation, checkpoint",
        },
        note="seconds of each step, of conversations and updates under way",
        stacked=True,
    )
    chart = _chart(kind, lines)
    return [chart] if chart else []


def reward_terms(lines: Sequence[MetricLine]) -> list[Chart]:
    """One chart for each term of the rewards' breakdowns, by name."""
    names = [name for name in _others(lines) if _is_term(name)]
    return list(_singles(names, lines, prefix="reward/"))


def other_curves(lines: Sequence[MetricLine]) -> list[tuple[str, list[Chart]]]:
    """One chart for each metric that has none yet, under the stage with which its name begins."""
    names = [name for name in _others(lines) if not _is_term(name)]
    grouped = groupby(names, key=lambda name: name.partition("/")[0])
    stages = [(stage, list(_singles(members, lines))) for stage, members in grouped]
    return [(stage, charts) for stage, charts in stages if charts]


def axis(values: Sequence[float]) -> Range | None:
    """The vertical axis of finite values, by which a step that stands alone far outside flattens no curve.

    A value is left out when it lies over four interquartile ranges beyond the quartiles and both its
    neighbours do not. From zero where the rest is positive and not far from it. None without values.

    >>> axis([1.0, 2.0, 1.0, 2.0, 900.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    (0.0, 2.1)
    """
    if not values:
        return None
    inside = values
    if len(values) >= 8:
        first, _, third = quantiles(values, n=4)
        reach = 4 * (third - first)
        near = [first - reach <= value <= third + reach for value in values]
        padded = [True, *near, True]
        alone = [not near[at] and padded[at] and padded[at + 2] for at in range(len(near))]
        inside = [value for value, left_out in zip(values, alone, strict=True) if not left_out] or values
    low, high = min(inside), max(inside)
    if high - low <= 1e-4 * max(abs(low), abs(high)):  # all the same for a reader
        return (0.0, 2 * high or 1.0) if low >= 0 else (2 * low, 0.0)
    margin = 0.05 * (high - low)
    if 0 <= low < 0.6 * high:
        return 0.0, high + 0.05 * high
    return low - margin, high + margin


def _learning(lines: Sequence[MetricLine]) -> list[_Kind]:
    """The fixed charts, after success that of each family, and at the end the age of what was trained on."""
    names = sorted({name for line in lines for name in line.values} - {"success/rate"})
    by_family = _Kind(
        title="Success by family",
        metrics={name: name.removeprefix(_FAMILIES) for name in names if name.startswith(_FAMILIES)},
        note="lines: moving average over about a tenth of the run; numbers: the step itself",
        percent=True,
        bounds=_SHARE,
    )
    staleness = _Kind(
        title="Staleness",
        metrics={name: name.removeprefix(_STALENESS) for name in names if name.startswith(_STALENESS)},
        note="policy versions between sampling and update",
    )
    return [*_LEARNING[:2], by_family, *_LEARNING[2:], staleness]


def _others(lines: Sequence[MetricLine]) -> list[str]:
    """Metrics of no learning curve, by name."""
    shown = {name for kind in _learning(lines) for name in kind.metrics}
    return sorted({name for line in lines for name in line.values} - shown)


def _is_term(name: str) -> bool:
    return name.startswith("reward/") and name != "reward/std"


def _singles(
    names: Iterator[str] | Sequence[str], lines: Sequence[MetricLine], prefix: str = ""
) -> Iterator[Chart]:
    for name in names:
        if chart := _chart(_one(name.removeprefix(prefix), name, ""), lines):
            yield chart


def _chart(kind: _Kind, lines: Sequence[MetricLine]) -> Chart | None:
    found = [
        (name, called) for name, called in kind.metrics.items() if any(name in line.values for line in lines)
    ]
    series = [_series(name, called, lines) for name, called in found]
    values = [value for one in series for value in one.values if value is not None]
    if not values:
        return None
    size = max(_bin_size(sum(name in line.values for line in lines)) for name, _ in found)
    note = (
        kind.note
        if size == 1
        else f"{kind.note}{'; ' if kind.note else ''}each point the mean of {size} steps"
    )
    fitted = kind.bounds or (_sums(series) if kind.stacked else _covering(series))
    return Chart(
        title=kind.title, note=note, percent=kind.percent, stacked=kind.stacked, range=fitted, series=series
    )


def _covering(series: Sequence[Series]) -> Range | None:
    """The vertical axis of all lines and their intervals."""
    lines = [line for one in series for line in (one.values, one.low, one.high) if line is not None]
    fitted = [axis([value for value in line if value is not None]) for line in lines]
    ranges = [one for one in fitted if one is not None]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _sums(series: Sequence[Series]) -> Range | None:
    """The vertical axis of parts on top of one another."""
    sums: dict[float, float] = {}
    for one in series:
        for step, value in zip(one.steps, one.values, strict=True):
            sums[step] = sums.get(step, 0.0) + (value or 0.0)
    fitted = axis([sums[step] for step in sorted(sums)])
    return fitted and (0.0, fitted[1])


def _series(name: str, called: str, lines: Sequence[MetricLine]) -> Series:
    chosen = [line for line in lines if name in line.values]
    size = _bin_size(len(chosen))
    bins = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    intervals = [[_interval(name, line.values) for line in one] for one in bins]
    has_band = any(interval for one in intervals for interval in one)
    low = [_mean([pair[0] for pair in one if pair]) for one in intervals]
    high = [_mean([pair[1] for pair in one if pair]) for one in intervals]
    return Series(
        name=called,
        steps=[one[-1].step for one in bins],
        values=[_mean([line.values[name] for line in one]) for one in bins],
        low=low if has_band else None,
        high=high if has_band else None,
    )


def _bin_size(points: int) -> int:
    return max(1, math.ceil(points / _MOST_POINTS))


def _mean(values: Sequence[float]) -> float | None:
    """Of the finite ones, to seven digits."""
    finite = [value for value in values if math.isfinite(value)]
    return float(f"{sum(finite) / len(finite):.7g}") if finite else None


def _interval(name: str, values: Mapping[str, float]) -> Range | None:
    """95 %, with the conversations of one group taken as independent: with groups of eight and half of the
    variance between scenarios it holds the truth in 62 % (scripts/interval_coverage.py)."""
    if name == "eval/success" and "eval/success_low" in values:
        return values["eval/success_low"], values["eval/success_high"]
    if name not in ("success/rate", "reward/mean") or "rollout/conversations" not in values:
        return None
    n = round(values["rollout/conversations"] - values.get("rollout/failed", 0.0))
    mean = values[name]
    if name == "reward/mean":
        n -= round(values.get("rollout/unscored", 0.0))
    if n < 1 or not math.isfinite(mean):
        return None
    if name == "success/rate":
        return wilson(round(mean * n), n)
    if "reward/std" not in values:
        return None
    half = 1.96 * values["reward/std"] / math.sqrt(n)
    return mean - half, mean + half
