"""Metric lines become the curves of the report: which there are, and how each is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.reporting.charts import Point, line_chart
from stateset_agents.tracking.run_log import MetricLine

__all__ = ["Curve", "learning_curves", "other_curves", "reward_terms"]

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A drawn chart with its words."""

    title: str
    note: str
    svg: Markup


@dataclass(frozen=True, slots=True)
class _Kind:
    """A chart of the report: the metrics it adds up, and how it is drawn."""

    title: str
    note: str
    metrics: tuple[str, ...]
    percent: bool = False


_SUCCESS = "success/rate"
_VALIDATION = "eval/success"

_LEARNING = (
    _Kind("Reward", "mean of the step's conversations", ("reward/mean",)),
    _Kind("Success", "of the step's conversations; band: 95 % interval", (_SUCCESS,), percent=True),
    _Kind("Validation success", "of held-out scenarios; band: 95 % interval", (_VALIDATION,), percent=True),
    _Kind("KL to the reference", "nats per token", ("kl/reference",)),
    _Kind("Entropy", "nats per token", ("policy/entropy",)),
    _Kind(
        "Clip fraction",
        "share of tokens; 0 with one pass per batch",
        ("policy/clip_fraction_low", "policy/clip_fraction_high"),
        percent=True,
    ),
    _Kind("Value function", "share of the returns' variance it explains", ("value/explained_variance",)),
    _Kind("Value loss", "of the step's returns", ("loss/value",)),
    _Kind("Speed", "sampled tokens per second, update included", ("tokens/per_second",)),
)


def learning_curves(lines: Sequence[MetricLine]) -> list[Curve]:
    """The curves everyone looks at first; those whose metrics were logged."""
    return [curve for kind in _LEARNING if (curve := _draw(kind, lines))]


def reward_terms(lines: Sequence[MetricLine]) -> list[Curve]:
    """One curve for each term of the rewards' breakdowns, by name."""
    return _curves([name for name in _names(lines) if _is_term(name)], lines)


def other_curves(lines: Sequence[MetricLine]) -> list[tuple[str, list[Curve]]]:
    """One curve for each metric that has none yet, under the stage with which its name begins."""
    names = [name for name in _names(lines) if not _is_term(name)]
    stages = sorted({name.partition("/")[0] for name in names})
    grouped = [
        (stage, _curves([name for name in names if name.partition("/")[0] == stage], lines))
        for stage in stages
    ]
    return [(stage, curves) for stage, curves in grouped if curves]


def _names(lines: Sequence[MetricLine]) -> list[str]:
    """Of the metrics that are no learning curve."""
    shown = {name for kind in _LEARNING for name in kind.metrics}
    return sorted({name for line in lines for name in line.values} - shown)


def _is_term(name: str) -> bool:
    return name.startswith("reward/") and name != "reward/std"


def _curves(names: Sequence[str], lines: Sequence[MetricLine]) -> list[Curve]:
    return [curve for name in names if (curve := _draw(_Kind(name, "", (name,)), lines))]


def _draw(kind: _Kind, lines: Sequence[MetricLine]) -> Curve | None:
    points = [
        Point(line.step, sum(line.values[name] for name in kind.metrics), _interval(kind, line.values))
        for line in lines
        if all(name in line.values for name in kind.metrics)
    ]
    if not any(math.isfinite(point.value) for point in points):
        return None
    bounds = (0.0, 1.0) if kind.metrics[0] in (_SUCCESS, _VALIDATION) else None
    svg = line_chart(points, label=kind.title, percent=kind.percent, bounds=bounds)
    return Curve(kind.title, kind.note, svg)


def _interval(kind: _Kind, values: Values) -> tuple[float, float] | None:
    """Of a share of successes; conversations of one group are taken as independent."""
    if kind.metrics == (_SUCCESS,) and "rollout/conversations" in values:
        n = round(values["rollout/conversations"] - values.get("rollout/failed", 0.0))
        rate = values[_SUCCESS]
        return wilson(round(rate * n), n) if math.isfinite(rate) else None
    if kind.metrics == (_VALIDATION,) and "eval/success_low" in values:
        return values["eval/success_low"], values["eval/success_high"]
    return None
