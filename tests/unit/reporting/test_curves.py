"""The charts of a report: which there are, their values and intervals, how far their axes go."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.reporting.curves import (
    Chart,
    axis,
    captions,
    learning_curves,
    numeric_curves,
    other_curves,
    reward_terms,
)
from stateset_agents.tracking.diagnostics import CONVERSATIONS, NUMERIC
from stateset_agents.tracking.run_log import MetricLine


def lines(**metrics: list[float]) -> list[MetricLine]:
    """Metric lines of steps 1, 2, ...; `reward__mean` stands for reward/mean."""
    names = [name.replace("__", "/") for name in metrics]
    rows = zip(*metrics.values(), strict=True)
    return [
        MetricLine(step, 0.0, dict(zip(names, row, strict=True))) for step, row in enumerate(rows, start=1)
    ]


def only(charts: list[Chart]) -> Chart:
    (chart,) = charts
    return chart


def test_values_stand_over_their_steps_and_gaps_are_none() -> None:
    chart = only(learning_curves(lines(reward__mean=[0.5, math.nan, 0.7])))
    assert (chart.title, chart.series[0].steps, chart.series[0].values) == (
        "Reward",
        [1, 2, 3],
        [0.5, None, 0.7],
    )


def test_a_metric_without_a_finite_value_has_no_chart() -> None:
    assert learning_curves(lines(reward__mean=[math.nan])) == []


def test_a_step_s_band_is_the_interval_that_was_logged() -> None:
    values = lines(reward__mean=[0.5], rollout__reward_low=[0.3], rollout__reward_high=[0.8])
    series = only(learning_curves(values)).series[0]
    assert (series.low, series.high) == ([0.3], [0.8])
    assert other_curves(values, CONVERSATIONS) == []  # no charts of their own
    assert (
        only(learning_curves(lines(success__rate=[0.5], rollout__conversations=[70.0]))).series[0].low is None
    )


def test_maxima_and_counts_are_not_averaged() -> None:
    rough = [float(step % 2) for step in range(4001)]
    [peak] = learning_curves(lines(memory__peak_mib=rough))
    assert (peak.smoothed, set(peak.series[0].values[:-1])) == (False, {1.0})
    ((_, [failed, share]),) = other_curves(
        lines(rollout__failed=rough, rollout__malformed=[0.25] * 4001), CONVERSATIONS
    )
    assert (failed.smoothed, share.smoothed) == (False, True)
    assert only(learning_curves(lines(success__rate=[0.0, 1.0]))).smoothed  # one conversation a step


def test_rounding_is_no_reward() -> None:
    assert only(learning_curves(lines(reward__mean=[1.4e-17, 0.5]))).series[0].values == [0.0, 0.5]


def test_a_critic_that_was_once_far_off_does_not_stretch_its_axis() -> None:
    chart = only(learning_curves(lines(value__explained_variance=[-14.0, 0.1, 0.2])))
    assert chart.range == (-1.0, 1.0)
    assert chart.series[0].values[0] == -14.0


def test_families_share_a_chart_and_so_do_the_parts_of_a_step() -> None:
    charts = learning_curves(
        lines(
            success__refund=[0.5],
            success__cancel=[0.2],
            time__rollout=[1.0],
            time__update=[2.0],
            tokens__agent=[9.0],
        )
    )
    assert [(chart.title, [line.name for line in chart.series], chart.stacked) for chart in charts] == [
        ("Success by family", ["cancel", "refund"], False),
        ("Time", ["rollout", "update"], True),
        ("Tokens", ["agent, trained"], True),
    ]


def test_the_parts_of_a_step_have_an_axis_for_their_sum_without_its_outliers() -> None:
    chart = only(learning_curves(lines(time__rollout=[1.0, 1.5] * 5 + [90.0], time__update=[0.5] * 11)))
    assert chart.range == (0.0, pytest.approx(2.025))


def test_staleness_is_shown_where_it_is_logged() -> None:
    assert only(learning_curves(lines(staleness__mean=[0.5]))).title == "Staleness"


def test_rows_have_a_chart_where_a_conversation_had_several() -> None:
    several = only(learning_curves(lines(rollout__rows=[1.0, 1.5], rollout__rows_max=[1.0, 3.0])))
    assert (several.title, [series.values for series in several.series]) == ("Rows", [[1.0, 1.5], [1.0, 3.0]])
    always_one = lines(rollout__rows=[1.0], rollout__rows_max=[1.0])
    assert learning_curves(always_one) == []
    ((stage, charts),) = other_curves(always_one, CONVERSATIONS)
    assert (stage, len(charts)) == ("rollout", 2)


def test_terms_of_the_reward_and_other_metrics_stand_apart() -> None:
    values = lines(reward__mean=[1.0], reward__told=[0.5], reward__std=[0.1], time__step=[1.0], kl__old=[0.0])
    assert [chart.title for chart in reward_terms(values)] == ["told"]
    assert [
        (stage, [chart.title for chart in charts]) for stage, charts in other_curves(values, CONVERSATIONS)
    ] == [
        ("kl", ["kl/old"]),
        ("reward", ["reward/std"]),
        ("time", ["time/step"]),
    ]


def test_a_chart_has_the_units_of_its_kind_of_run() -> None:
    values = lines(policy__entropy=[0.5], loss__value=[0.1], time__rollout=[1.0])
    notes = [(chart.note, chart.along) for chart in learning_curves(values)]
    assert notes == [
        ("nats per token", "step"),
        ("of the step's returns", "step"),
        ("seconds of each step", "step"),
    ]
    notes = [(chart.note, chart.along) for chart in numeric_curves(values)]
    assert notes == [
        ("nats per step", "environment step"),
        ("of the update's returns", "environment step"),
        ("seconds of each update", "environment step"),
    ]
    of_talk, of_numbers = captions(CONVERSATIONS), captions(NUMERIC)
    assert (of_talk["reward/mean"]["title"], of_numbers["reward/mean"]["title"]) == ("Reward", "Return")
    assert (of_talk["kl/reference"]["note"], of_numbers["kl/reference"]["note"]) == (
        "nats per token",
        "nats per step",
    )


def test_a_long_curve_is_averaged_in_bins_and_says_so() -> None:
    chart = only(learning_curves(lines(loss__value=[float(step % 2) for step in range(10_001)])))
    assert len(chart.series[0].values) == 1667  # bins of 6 steps, the last of 5
    assert set(chart.series[0].values) == {0.5, 0.4}
    assert chart.note == "of the step's returns; each point the mean of 6 steps"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([3.0], (0.0, 6.0)),
        ([-3.0, -3.0], (-6.0, 0.0)),
        ([0.0, 0.0], (0.0, 1.0)),
        ([1.0, 1.0000012], (0.0, 2.0000024)),
        ([5.0, 10.0], (0.0, 10.5)),
        ([9.0, 10.0], (8.95, 10.05)),
        ([-1.0, 1.0], (-1.1, 1.1)),
    ],
)
def test_an_axis_holds_its_values(values: list[float], expected: tuple[float, float] | None) -> None:
    vertical = axis(values)
    assert vertical == (expected and pytest.approx(expected))


def test_a_step_that_stands_alone_far_outside_is_left_out_of_the_axis() -> None:
    curve = [1.0, 2.0] * 5
    assert axis([*curve, 900.0, *curve]) == (0.0, 2.1)
    assert axis([900.0, *curve]) == (0.0, 2.1)


def test_a_curve_that_moves_for_several_steps_is_shown_whole() -> None:
    assert axis([9.0, 5.0, 3.0] + [1.0, 1.1] * 20) == (0.0, pytest.approx(9.45))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_an_axis_is_a_range_and_holds_most_values(values: list[float]) -> None:
    vertical = axis(values)
    assert vertical is not None
    low, high = vertical
    assert low < high
    assert sum(low <= value <= high for value in values) >= len(values) / 2
