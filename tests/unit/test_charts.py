"""Line charts: where points land, round ticks, gaps, and curves of any length."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.reporting.charts import Point, line_chart, number, ticks


def places(svg: str, kind: str) -> list[tuple[float, float]]:
    """The pixel places of one polyline or polygon."""
    (found,) = re.findall(rf'class="{kind}" points="([^"]*)"', svg)
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found.split())]


def test_points_land_where_the_axes_say() -> None:
    svg = line_chart([Point(0, 0.0), Point(5, 0.5), Point(10, 1.0)], label="share", bounds=(0.0, 1.0))
    assert places(svg, "raw") == [(46.0, 164.0), (188.0, 87.0), (330.0, 10.0)]


def test_a_band_runs_along_the_highs_and_back_along_the_lows() -> None:
    points = [Point(0, 0.5, (0.25, 0.75)), Point(1, 0.5, (0.0, 1.0))]
    svg = line_chart(points, label="share", bounds=(0.0, 1.0))
    assert places(svg, "band") == [(46.0, 48.5), (330.0, 10.0), (330.0, 164.0), (46.0, 125.5)]


def test_a_curve_with_gaps_keeps_its_finite_points() -> None:
    svg = line_chart([Point(1, 1.0), Point(2, math.nan), Point(3, math.inf), Point(4, 2.0)], label="x")
    assert len(places(svg, "raw")) == 2


def test_a_curve_without_a_finite_point_is_refused() -> None:
    with pytest.raises(ValueError, match="no finite value to draw for reward"):
        line_chart([Point(1, math.nan)], label="reward")


def test_a_single_point_is_a_dot() -> None:
    svg = line_chart([Point(1, 0.0, (0.0, 0.3))], label="x")
    assert svg.count("<circle") == 1
    assert "step 1: 0 [0, 0.3]" in svg


def test_a_few_points_are_marked_and_many_are_a_line() -> None:
    few, many = [line_chart([Point(i, i) for i in range(n)], label="reward") for n in (3, 10)]
    assert re.findall(r'cx="([^"]*)"', few) == ["46.0", "188.0", "330.0"]
    assert "<circle" not in many


def test_a_constant_that_cannot_be_negative_stands_above_zero() -> None:
    svg = line_chart([Point(1, 0.0), Point(2, 0.0)], label="clip fraction", percent=True)
    assert re.findall(r'<text class="tick"[^>]*>([^<]*)<', svg) == ["0%", "50%", "100%"]


def test_a_long_curve_is_averaged_in_bins() -> None:
    points = [Point(step, float(step % 2), (0.0, 1.0)) for step in range(10_000)]
    svg = line_chart(points, label="x")
    raw = places(svg, "raw")
    assert len(raw) <= 240
    assert len(places(svg, "band")) == 2 * len(raw)
    assert {y for _, y in raw} == {87.0}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.0, 0.83, [0.0, 0.5, 1.0]),
        (3.0, 3.0, [2.6, 2.8, 3.0, 3.2, 3.4]),
        (-0.001, 0.002, [-0.001, 0.0, 0.001, 0.002]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_any_range_gets_a_few_ticks_around_it(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    tolerance = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert found[0] <= low + tolerance
    assert found[-1] >= high - tolerance


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=50))
def test_any_curve_can_be_drawn_inside_its_frame(values: list[float]) -> None:
    svg = line_chart([Point(step, value) for step, value in enumerate(values)], label="any")
    assert "nan" not in svg
    heights = [y for _, y in places(svg, "raw")] if len(values) > 1 else []
    assert all(9.9 <= y <= 164.1 for y in heights)


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        (0.5, True, "50%"),
        (0.1234, True, "12.3%"),
        (0.0, False, "0"),
        (0.00123456, False, "0.00123"),
        (0.0000123, False, "1.2e-05"),
        (5120.4, False, "5,120"),
        (math.nan, False, "-"),
    ],
)
def test_numbers_are_short(value: float, percent: bool, text: str) -> None:
    assert number(value, percent) == text


def test_values_that_differ_by_rounding_alone_are_a_flat_line() -> None:
    svg = line_chart([Point(1, 1.0), Point(2, 1.0000012)], label="ratio")
    assert re.findall(r">([\d.]+)</text>", svg)[:5] == ["0", "0.5", "1", "1.5", "2"]


def test_neighbouring_ticks_never_read_the_same() -> None:
    svg = line_chart([Point(1, 1.0001), Point(2, 1.0009)], label="ratio")
    labels = re.findall(r">([\d.]+)</text>", svg)
    assert labels == ["1", "1.0002", "1.0004", "1.0006", "1.0008", "1.001"]
