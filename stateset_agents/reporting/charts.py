"""Small line charts as inline SVG: no script, no network; colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

__all__ = ["Point", "line_chart", "number"]

_WIDTH, _HEIGHT = 340, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 26
_MOST_POINTS = 240
_MOST_DOTS = 9
"""Points of a curve that are marked; of more, the line tells as much."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve, with its interval where it has one."""

    step: float
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps [start, end] onto pixels [first, last]."""

    start: float
    end: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        share = (value - self.start) / (self.end - self.start)
        return round(self.first + share * (self.last - self.first), 1)


def line_chart(
    points: Sequence[Point], *, label: str, percent: bool = False, bounds: tuple[float, float] | None = None
) -> Markup:
    """A curve over steps: the values thin, their moving average strong, the interval as a band.

    `label` is read aloud by screen readers; a touch or hover on a step names its value. Points that are
    not finite leave a gap; more than 240 are averaged in bins. Raises ValueError without a finite point.
    """
    finite = [point for point in points if math.isfinite(point.value)]
    if not finite:
        raise ValueError(f"no finite value to draw for {label}")
    points = _binned(finite)
    low, high = bounds or _range(points)
    y_ticks = ticks(low, high)
    x = _Scale(*_spread(points[0].step, points[-1].step), _LEFT, _WIDTH - _RIGHT)
    y = _Scale(min(low, y_ticks[0]), max(high, y_ticks[-1]), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        _y_axis(y_ticks, y, percent),
        _x_axis(x, points),
        _band(points, x, y),
        _path([(x(p.step), y(p.value)) for p in points], "raw") if len(points) > 1 else "",
        _dots([(x(p.step), y(p.value)) for p in points]) if len(points) <= _MOST_DOTS else "",
        _path([(x(step), y(value)) for step, value in _smooth(points)], "mean"),
        _hover(points, x, percent),
    ]
    ends = [f"{number(point.value, percent)} at step {point.step:g}" for point in (finite[0], finite[-1])]
    spoken = escape(f"{label}: {', '.join(ends)}")
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, spoken, Markup("").join(parts)
    )


def number(value: float, percent: bool = False) -> str:
    """A number short enough for an axis: 38%, 0.0012, 5,120, 1.2e-05."""
    if not math.isfinite(value):
        return "-"
    if percent:
        return f"{value:.1%}".replace(".0%", "%")
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-4:
        return f"{value:.1e}"
    return f"{value:.3g}"


def ticks(low: float, high: float, target: int = 4) -> list[float]:
    """Round numbers (steps of 1, 2 or 5 times a power of ten) that enclose [low, high]."""
    low, high = _spread(low, high)
    rough = (high - low) / target
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def _spread(low: float, high: float) -> tuple[float, float]:
    """The range, widened where it is a single value up to rounding."""
    if high - low > 1e-9 * max(abs(low), abs(high), 1e-30):
        return low, high
    margin = abs(low) * 0.1 or 0.5
    return low - margin, high + margin


def _range(points: Sequence[Point]) -> tuple[float, float]:
    """Of the values; from zero where they are positive and not far from it."""
    values = [point.value for point in points]
    low, high = min(values), max(values)
    if high - low <= 1e-4 * max(abs(low), abs(high)):  # all the same for a reader
        return (0.0, 2 * high or 1.0) if low >= 0 else (2 * low, 0.0)
    return (0.0, high) if 0 <= low < 0.6 * high else (low, high)


def _binned(points: Sequence[Point]) -> Sequence[Point]:
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    return [_bin(points[start : start + size]) for start in range(0, len(points), size)]


def _bin(points: Sequence[Point]) -> Point:
    intervals = [point.interval for point in points if point.interval]
    lows, highs = [low for low, _ in intervals], [high for _, high in intervals]
    interval = (_average(lows), _average(highs)) if intervals else None
    return Point(points[-1].step, _average([point.value for point in points]), interval)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _smooth(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Moving average over about a tenth of the curve, centred; nothing below ten points."""
    if len(points) < 10:
        return []
    half = max(1, len(points) // 20)
    values = [point.value for point in points]
    return [
        (point.step, _average(values[max(0, index - half) : index + half + 1]))
        for index, point in enumerate(points)
    ]


def _y_axis(values: Sequence[float], y: _Scale, percent: bool) -> Markup:
    line = Markup(
        '<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/><text class="tick" x="{}" y="{}">{}</text>'
    )
    return Markup("").join(
        line.format(_LEFT, _WIDTH - _RIGHT, y(v), y(v), _LEFT - 6, y(v) + 4, label)
        for v, label in zip(values, _labels(values, percent), strict=True)
    )


def _labels(values: Sequence[float], percent: bool) -> list[str]:
    """As short as `number`, with more digits where two neighbours would read the same: 1.0001, 1.0002."""
    labels = [number(value, percent) for value in values]
    if percent or len(set(labels)) == len(labels):
        return labels
    return [f"{value:.6g}" for value in values]


def _x_axis(x: _Scale, points: Sequence[Point]) -> Markup:
    text = Markup('<text class="tick step {}" x="{}" y="{}">{}</text>')
    ends = (
        [(points[0].step, "first"), (points[-1].step, "last")] if len(points) > 1 else [(points[0].step, "")]
    )
    named = [text.format(side, x(step), _HEIGHT - 6, f"step {step:g}") for step, side in ends]
    return Markup("").join(named)


def _band(points: Sequence[Point], x: _Scale, y: _Scale) -> Markup:
    edges = [(x(p.step), y(p.interval[0]), y(p.interval[1])) for p in points if p.interval]
    if not edges:
        return Markup("")
    outline = [(px, high) for px, _, high in edges] + [(px, low) for px, low, _ in reversed(edges)]
    return Markup('<polygon class="band" points="{}"/>').format(" ".join(f"{px},{py}" for px, py in outline))


def _path(places: Sequence[tuple[float, float]], kind: str) -> Markup:
    if not places:
        return Markup("")
    line = " ".join(f"{px},{py}" for px, py in places)
    return Markup('<polyline class="{}" points="{}"/>').format(kind, line)


def _dots(places: Sequence[tuple[float, float]]) -> Markup:
    return Markup("").join(
        Markup('<circle class="raw dot" cx="{}" cy="{}" r="3"/>').format(*place) for place in places
    )


def _hover(points: Sequence[Point], x: _Scale, percent: bool) -> Markup:
    """An invisible column per point whose tooltip names the value."""
    width = max(2.0, (_WIDTH - _LEFT - _RIGHT) / len(points))
    column = Markup('<rect class="hover" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>')
    height = _HEIGHT - _TOP - _BOTTOM
    return Markup("").join(
        column.format(round(x(p.step) - width / 2, 1), _TOP, round(width, 1), height, _named(p, percent))
        for p in points
    )


def _named(point: Point, percent: bool) -> str:
    text = f"step {point.step:g}: {number(point.value, percent)}"
    if point.interval is None:
        return text
    low, high = point.interval
    return f"{text} [{number(low, percent)}, {number(high, percent)}]"
