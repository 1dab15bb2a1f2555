"""What the page of many runs has of one run: how it ended, its curves, its results on held-out scenarios."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from stateset_agents.reporting.curves import bin_value, is_smoothed
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_log import MetricLine, RunLog, held_out_returns


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One evaluation, by scenario; tries of one scenario are taken together."""

    success: Mapping[str, float]
    """Scenario -> share of its judged tries that succeeded."""
    reward: Mapping[str, float]
    """Scenario -> mean reward of its scored tries; of a numeric run start -> return."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Metrics over steps, in bins where there are many; [N] values over [N] steps."""

    steps: Sequence[int]
    """Last step of each bin."""
    values: Mapping[str, Sequence[float | None]]
    """Metric -> its values, None where nothing finite was logged."""
    smoothed: frozenset[str] = frozenset()
    """Metrics that a moving average says something of (`is_smoothed`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResults:
    """One run."""

    name: str
    """Of its folder."""
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    """Empty while the run goes on."""
    steps: int
    """The last step that was logged."""
    curves: Curves
    before: HeldOut
    after: HeldOut
    has_report: bool

    @property
    def training(self) -> Mapping[str, Any]:
        """Its settings."""
        training = self.config.get("training")
        return training if isinstance(training, Mapping) else {}

    @property
    def seed(self) -> int | None:
        """Of the training."""
        seeds = (self.training.get("seed"), self.summary.get("seed"))
        return next((seed for seed in seeds if isinstance(seed, int)), None)


def read_run(log: RunLog, max_points: int) -> RunResults:
    """Read a run folder; `max_points` of each curve.

    Raises ConfigurationError on another schema version, and where a file is damaged.
    """
    with damage_named(log.folder.path):
        lines = list(log.metrics())
        before, after = _held_out(log)
        return RunResults(
            name=log.folder.path.name,
            config=log.config(),
            summary=log.summary(),
            steps=max((line.step for line in lines), default=0),
            curves=binned(lines, max_points),
            before=before,
            after=after,
            has_report=log.folder.report.is_file(),
        )


def binned(lines: Sequence[MetricLine], max_points: int) -> Curves:
    """Each metric over bins of equally many steps, at most `max_points`, to five digits (`bin_value`)."""
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:  # a step may have several lines: of the training, and of an evaluation after it
        by_step[line.step].update(line.values)
    steps = sorted(by_step)
    size = max(1, math.ceil(len(steps) / max_points))
    bins = [steps[start : start + size] for start in range(0, len(steps), size)]
    names = sorted({name for values in by_step.values() for name in values})
    return Curves(
        smoothed=frozenset(
            name
            for name in names
            if is_smoothed(name, (values[name] for values in by_step.values() if name in values))
        ),
        steps=[part[-1] for part in bins],
        values={
            name: [bin_value(name, (by_step[step].get(name, math.nan) for step in part), 5) for part in bins]
            for name in names
        },
    )


def _held_out(log: RunLog) -> tuple[HeldOut, HeldOut]:
    """The evaluations before and after training."""
    if log.folder.episodes.exists():
        before, after = held_out_returns(log.episodes("before", "after"))
        return _by_start(before), _by_start(after)
    records: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for record in log.records("before", "after"):
        if record["status"] != "failed" and not record.get("branch_of"):
            records[record["stage"]].append(record)
    return _by_scenario(records["before"]), _by_scenario(records["after"])


def _by_start(returns: Mapping[int, float]) -> HeldOut:
    return HeldOut(success={}, reward={str(seed): value for seed, value in returns.items()})


def _by_scenario(records: Iterable[Mapping[str, Any]]) -> HeldOut:
    verdicts: dict[str, list[float]] = defaultdict(list)
    rewards: dict[str, list[float]] = defaultdict(list)
    for record in records:
        name = str(record["scenario"])
        if record["success"] is not None:
            verdicts[name].append(float(record["success"]))
        if record["reward"] is not None:
            rewards[name].append(record["reward"])
    return HeldOut(
        success={name: fmean(values) for name, values in verdicts.items()},
        reward={name: fmean(values) for name, values in rewards.items()},
    )
