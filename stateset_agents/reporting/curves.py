"""The charts of the report, made from metric lines: which there are, their series and axes.

A chart is plain data; `page/shared/page.charts.js` draws it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, TypeVar

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.tracking.diagnostics import CONVERSATIONS, NUMERIC, Units
from stateset_agents.tracking.run_log import MetricLine

# ------------------------------------------------------------------------------ who waits for whom

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


# ------------------------------------------------------------------------------ charts

_MAX_POINTS = 2000
"""Points of a curve; a longer one is averaged in bins."""

Range = tuple[float, float]
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; [N] values over [N] steps."""

    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    """A value is None where the number was not finite."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """The upper ends of the 95 % intervals; None where there are none, like `low`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart with its texts."""

    title: str
    note: str
    percent: bool = False
    stacked: bool = False
    """The series are parts of a sum, drawn on top of one another."""
    range: Range | None
    """The ends of the vertical axis; values outside are marked at its edge. None: the page fits it."""
    series: Sequence[Series]
    signed: bool = False
    """True if the parts are stacked and those below zero hang from it."""
    along: str = "step"
    """The thing that the horizontal axis counts."""
    smoothed: bool = True
    """True if the page draws a moving average of a long line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A chart that the report has if its metrics were logged."""

    title: str
    metrics: Mapping[str, str]
    """Metric -> name of its line."""
    note: str = ""
    """The text under the title, with the fields of `Units` in braces."""
    percent: bool = False
    stacked: bool = False
    bounds: Range | None = None
    """The ends of the vertical axis; None: they are fitted."""


_SHARE = (0.0, 1.0)
_BAND = "band: 95 % interval, by scenario"
_BANDS = {
    "reward/mean": "rollout/reward",
    "success/rate": "rollout/success",
    "eval/success": "eval/success",
    "eval/reward": "eval/reward",
}
"""Metric -> what its bounds are called before `_low` and `_high`."""
_EXTREME = re.compile(r"(?:^|[/_])(max|min|peak)(?:_|$)")


@cache
def _charts() -> Mapping[str, Sequence[_Kind]]:
    """The kinds of `charts.yaml`: of conversations' runs (`learning`, `rows` where some have several, and
    `activity`) and of numeric ones (`numeric`)."""
    table = read_yaml(Path(__file__).parent / "assets" / "charts.yaml")
    for kinds in table.values():
        for fields in kinds:
            fields["bounds"] = tuple(fields["bounds"]) if "bounds" in fields else None
    return {run: [_Kind(**fields) for fields in kinds] for run, kinds in table.items()}


@cache
def _means() -> set[str]:
    kinds = (*_charts()["learning"], *_charts()["numeric"])
    return {metric for kind in kinds for metric in kind.metrics}


_FAMILIES, _STALENESS = "success/", "staleness/"


def learning_curves(lines: Sequence[MetricLine]) -> list[Chart]:
    """The charts to look at first, as far as their metrics were logged."""
    return [chart for kind in _learning(lines) if (chart := _chart(kind, lines, CONVERSATIONS))]


def numeric_curves(lines: Sequence[MetricLine]) -> list[Chart]:
    """`learning_curves` of a numeric training."""
    return [chart for kind in _charts()["numeric"] if (chart := _chart(kind, lines, NUMERIC))]


def captions(units: Units) -> dict[str, dict[str, Any]]:
    """Metric -> title, note, `percent` and range of its chart, of those that have a learning curve."""
    kinds = _charts()["numeric" if units is NUMERIC else "learning"]
    return {
        metric: {
            "title": kind.title if len(kind.metrics) == 1 else f"{kind.title}: {label}",
            "note": _note(kind, units).partition("; band")[0].removeprefix(_BAND),
            "percent": kind.percent,
            "range": kind.bounds,
        }
        for kind in kinds
        for metric, label in kind.metrics.items()
    }


def activity_curves(lines: Sequence[MetricLine]) -> list[Chart]:
    """The chart of the lines that `step_activity` returns; an empty list without lines."""
    return [chart for kind in _charts()["activity"] if (chart := _chart(kind, lines, CONVERSATIONS))]


def reward_terms(lines: Sequence[MetricLine]) -> list[Chart]:
    """One chart for each term of the rewards, by name."""
    names = [name for name in _metrics_without_chart(lines, _learning(lines)) if _is_term(name)]
    return list(_chart_each(names, lines, CONVERSATIONS, prefix="reward/"))


def other_curves(lines: Sequence[MetricLine], units: Units) -> list[tuple[str, list[Chart]]]:
    """One chart for each metric without a learning curve, grouped by the stage in its name."""
    kinds = _charts()["numeric"] if units is NUMERIC else _learning(lines)
    names = [name for name in _metrics_without_chart(lines, kinds) if not _is_term(name)]
    grouped = groupby(names, key=lambda name: name.partition("/")[0])
    stages = [(stage, list(_chart_each(members, lines, units))) for stage, members in grouped]
    return [(stage, charts) for stage, charts in stages if charts]


def axis(values: Sequence[float]) -> Range | None:
    """The range of the vertical axis for finite values, without single outliers, which would flatten a curve.

    A value is an outlier if it lies over four interquartile ranges beyond the quartiles and neither of its
    neighbours does. The axis starts at zero if the values are positive and near it. None without values.

    >>> axis([1.0, 2.0, 1.0, 2.0, 900.0, 1.0, 2.0, 1.0, 2.0, 1.0])
    (0.0, 2.1)
    """
    if not values:
        return None
    near_values = values
    if len(values) >= 8:
        first, _, third = quantiles(values, n=4)
        reach = 4 * (third - first)
        is_near = [True, *(first - reach <= value <= third + reach for value in values), True]
        neighbours = zip(values, is_near, is_near[1:], is_near[2:], strict=False)
        near_values = [v for v, before, near, after in neighbours if near or not (before and after)] or values
    low, high = min(near_values), max(near_values)
    if high - low <= 1e-4 * max(abs(low), abs(high)):  # the values look equal
        return (0.0, 2 * high or 1.0) if low >= 0 else (2 * low, 0.0)
    margin = 0.05 * (high - low)
    if 0 <= low < 0.6 * high:
        return 0.0, high + 0.05 * high
    return low - margin, high + margin


def _learning(lines: Sequence[MetricLine]) -> list[_Kind]:
    """The fixed charts, then success by family after success, staleness and rows at the end."""
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
    has_several = any(line.values.get("rollout/rows_max", 1.0) > 1.0 for line in lines)
    fixed = _charts()["learning"]
    return [*fixed[:2], by_family, *fixed[2:], staleness, *(_charts()["rows"] if has_several else ())]


def _metrics_without_chart(lines: Sequence[MetricLine], kinds: Sequence[_Kind]) -> list[str]:
    """Names of the metrics that none of these charts has, sorted."""
    names = {name for kind in kinds for name in kind.metrics}
    names |= {f"{base}_{end}" for name, base in _BANDS.items() if name in names for end in ("low", "high")}
    return sorted({name for line in lines for name in line.values} - names)


def _is_term(name: str) -> bool:
    return name.startswith("reward/") and name != "reward/std"


def _chart_each(
    names: Iterator[str] | Sequence[str], lines: Sequence[MetricLine], units: Units, prefix: str = ""
) -> Iterator[Chart]:
    for name in names:
        title = name.removeprefix(prefix)
        if chart := _chart(_Kind(title=title, metrics={name: title}), lines, units):
            yield chart


def _note(kind: _Kind, units: Units) -> str:
    return kind.note.format(**asdict(units))


def _chart(kind: _Kind, lines: Sequence[MetricLine], units: Units) -> Chart | None:
    logged = [
        (name, label) for name, label in kind.metrics.items() if any(name in line.values for line in lines)
    ]
    series = [_series(name, label, lines) for name, label in logged]
    if all(value is None for line in series for value in line.values):
        return None
    size = max(binned([line for line in lines if name in line.values], _MAX_POINTS)[1] for name, _ in logged)
    extreme = any(_EXTREME.search(name) for name, _ in logged)
    point = "mean, of a maximum the largest," if extreme else "mean"
    each = f"each point the {point} of {size} {units.update}s"
    notes = [_note(kind, units)] * bool(kind.note) + [each] * (size > 1)
    return Chart(
        title=kind.title,
        note="; ".join(notes),
        percent=kind.percent,
        stacked=kind.stacked,
        range=kind.bounds or (_range_of_sums(series) if kind.stacked else _range_of_lines(series)),
        series=series,
        smoothed=all(
            is_smoothed(name, (line.values[name] for line in lines if name in line.values))
            for name, _ in logged
        ),
        along=units.along,
    )


def _range_of_lines(series: Sequence[Series]) -> Range | None:
    """The vertical axis of all lines and their intervals."""
    return common_axis(
        line for item in series for line in (item.values, item.low, item.high) if line is not None
    )


def common_axis(lines: Iterable[Iterable[float | None]]) -> Range | None:
    """The range of the vertical axis of several lines; None without values."""
    ranges = [fit for line in lines if (fit := axis([value for value in line if value is not None]))]
    return (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None


def _range_of_sums(series: Sequence[Series]) -> Range | None:
    """The vertical axis of a stacked chart."""
    sums: dict[float, float] = {}
    for line in series:
        for step, value in zip(line.steps, line.values, strict=True):
            sums[step] = sums.get(step, 0.0) + (value or 0.0)
    fit = axis([sums[step] for step in sorted(sums)])
    return fit and (0.0, fit[1])


def _series(name: str, label: str, lines: Sequence[MetricLine]) -> Series:
    bins, _ = binned([line for line in lines if name in line.values], _MAX_POINTS)
    intervals = [[pair for line in part if (pair := _interval(name, line.values))] for part in bins]
    has_band = any(intervals)
    return Series(
        name=label,
        steps=[part[-1].step for part in bins],
        values=[bin_value(name, [line.values[name] for line in part]) for part in bins],
        low=[bin_value("", [low for low, _ in pairs]) for pairs in intervals] if has_band else None,
        high=[bin_value("", [high for _, high in pairs]) for pairs in intervals] if has_band else None,
    )


def binned(items: Sequence[_Item], max_bins: int) -> tuple[list[Sequence[_Item]], int]:
    """The items in at most `max_bins` bins of one size, the last perhaps smaller; and that size."""
    size = max(1, math.ceil(len(items) / max_bins))
    return [items[start : start + size] for start in range(0, len(items), size)], size


def bin_value(name: str, values: Iterable[float], digits: int = 7) -> float | None:
    """One value for several steps: the largest of a maximum, the lowest of a minimum, else the mean; only
    finite values count. Below 1e-12 is rounding, and 0."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    extreme = _EXTREME.search(name)
    value = fmean(finite) if extreme is None else min(finite) if extreme[1] == "min" else max(finite)
    return float(f"{value:.{digits}g}") if abs(value) >= 1e-12 else 0.0


def is_smoothed(name: str, values: Iterable[float]) -> bool:
    """True if a moving average of the metric is meaningful: not for an extreme, nor for counts."""
    if _EXTREME.search(name):
        return False
    is_mean = name in _means() or name.startswith(("reward/", "success/"))
    return is_mean or not all(value.is_integer() for value in map(float, values) if math.isfinite(value))


def _interval(name: str, values: Mapping[str, float]) -> Range | None:
    """The 95 % interval that was logged with it: of a step by scenario (`loop.metrics`), of an evaluation."""
    base = _BANDS.get(name)
    if base is None or f"{base}_low" not in values:
        return None
    return values[f"{base}_low"], values[f"{base}_high"]
