"""The data of the page of many runs, from their folders alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from stateset_agents.algorithms.intervals import crossed_interval, stratified_interval
from stateset_agents.algorithms.paired import Verdict, paired_rewards, paired_shares
from stateset_agents.reporting.curves import bin_value, binned, captions, is_smoothed
from stateset_agents.reporting.html import CHART_SCRIPTS, html_page, shared_plotly
from stateset_agents.tracking.diagnostics import CONVERSATIONS, NUMERIC, units_of
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_folder import RunFolder, replace_file
from stateset_agents.tracking.run_log import (
    HeldOut,
    MetricLine,
    RunLog,
    differing_settings,
    flat_settings,
    held_out_results,
    is_identity,
)
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

# ------------------------------------------------------------------------------ one run


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
    """The configuration and results of one run."""

    name: str
    """The name of its folder."""
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
        """The settings of its training."""
        training = self.config.get("training")
        return training if isinstance(training, Mapping) else {}

    @property
    def seed(self) -> int | None:
        """The seed of its training."""
        seeds = (self.training.get("seed"), self.summary.get("seed"))
        return next((seed for seed in seeds if isinstance(seed, int)), None)


def read_run(log: RunLog, max_points: int) -> RunResults:
    """Read a run folder; `max_points` of each curve.

    Raises ConfigurationError on another schema version, and where a file is damaged.
    """
    with damage_named(log.folder.path):
        lines = list(log.metrics())
        before, after = held_out_results(log)
        return RunResults(
            name=log.folder.path.name,
            config=log.config(),
            summary=log.summary(),
            steps=max((line.step for line in lines), default=0),
            curves=run_curves(lines, max_points),
            before=before,
            after=after,
            has_report=log.folder.report.is_file(),
        )


def run_curves(lines: Sequence[MetricLine], max_points: int) -> Curves:
    """Each metric over bins of equally many steps, at most `max_points`, to five digits (`bin_value`)."""
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for line in lines:  # a step may have several lines: of the training, and of an evaluation after it
        by_step[line.step].update(line.values)
    bins, _ = binned(sorted(by_step), max_points)
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


Read = Callable[[RunLog, int], RunResults]
"""(run, points of each curve) -> what the page has of it."""


# ------------------------------------------------------------------------------ experiments
#
# Runs that differ in nothing but their seed are one experiment; two experiments are compared pair by pair.
#
# A pair is one scenario that both played after training, with several seeds also one seed that both have.

Measure = Literal["success", "reward"]
_MAX_LABEL = 60  # characters


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs with the same settings and, if all is well, different seeds."""

    label: str
    """The settings that set it apart from the others, such as `beta=0.01`."""
    runs: Sequence[RunResults]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """The results of an experiment's runs on held-out scenarios."""

    measure: Measure
    iqm: float
    """Interquartile mean of `runs`."""
    interval: tuple[float, float] | None
    """95 %, see `stratified_interval`; None for fewer than three runs."""
    runs: Sequence[float]
    """The result in each run's summary."""
    num_scenarios: int
    """The scenarios of each run; the fewest where one could not play some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDifference:
    """Experiment B minus experiment A on the scenarios that both played after training."""

    measure: Measure
    mean: float
    interval: tuple[float, float] | None
    """95 %, on one side of 0 where `verdict` says so; None where all pairs differ by the same reward."""
    verdict: Verdict
    reason: str
    """Why it is unclear; else empty."""
    num_scenarios: int
    num_pairs: int
    """The pairs of runs."""
    seeds: Sequence[int | None]
    """The seeds by which runs are paired; empty where no seed is in both: then their order pairs them."""
    wins: int
    """Scenarios with more for B, summed over pairs of runs; the rest are losses and ties."""
    losses: int
    p_value: float | None
    """The p-value of one pair of runs, see `sign_flip_p`; None for several."""


def experiments(runs: Sequence[RunResults]) -> list[RunGroup]:
    """The runs grouped by their settings, in the order of their first run."""
    groups: dict[tuple[tuple[str, str], ...], list[RunResults]] = {}
    for run in runs:
        key = tuple(item for item in flat_settings(run.config) if not is_identity(item[0]))
        groups.setdefault(key, []).append(run)
    members = list(groups.values())
    labels = _labels([group[0] for group in members])
    return [RunGroup(label, group) for label, group in zip(labels, members, strict=True)]


def score(experiment: RunGroup) -> GroupScore | None:
    """The score of the runs that were evaluated after training; None without such a run."""
    sides = [run.summary["after"] for run in experiment.runs if run.summary.get("after")]
    measures: dict[Measure, str] = {"success": "success", "reward": "mean_reward"}
    for measure, field in measures.items():
        runs = [side[field] for side in sides if side.get(field) is not None]
        if runs and len(runs) == len(sides):
            iqm, interval = stratified_interval({"": [[value] for value in runs]})
            num_scenarios = min(round(side["n"] / side.get("tries", 1)) for side in sides)
            return GroupScore(
                measure=measure, iqm=iqm, interval=interval, runs=runs, num_scenarios=num_scenarios
            )
    return None


def difference(a: RunGroup, b: RunGroup) -> GroupDifference | None:
    """B minus A; None where they have no scenario in common.

    Runs are paired by seed, or in their order where no seed is in both, and each pair by scenario; of runs
    with the same seed the last counts. The verdict is that of `paired_shares` (`paired_rewards`) on each
    scenario's mean over the pairs; with several pairs the interval is also over seeds (`crossed_interval`)
    and must confirm it.
    """
    measure: Measure = "success" if all(_table(run, "success") for run in _played((a, b))) else "reward"
    runs_a, runs_b = ({run.seed: run for run in _played([side])} for side in (a, b))
    seeds = [seed for seed in runs_a if seed in runs_b]
    pairs = [(runs_a[seed], runs_b[seed]) for seed in seeds] or list(
        zip(runs_a.values(), runs_b.values(), strict=False)
    )
    tables = [(_table(of_a, measure), _table(of_b, measure)) for of_a, of_b in pairs]
    common = sorted(set.intersection(*(of_a.keys() & of_b.keys() for of_a, of_b in tables))) if tables else []
    if not common:
        return None
    rows = [[of_b[name] - of_a[name] for name in common] for of_a, of_b in tables]
    compare = paired_shares if measure == "success" else paired_rewards
    result = compare([fmean(column) for column in zip(*rows, strict=True)])
    interval, verdict, reason = result.interval, result.verdict, result.reason
    crossed = crossed_interval(rows) if len(rows) > 1 else None
    if crossed is not None:
        ends = [crossed, interval or crossed]
        interval = min(low for low, _ in ends), max(high for _, high in ends)
        if verdict != "unclear" and crossed[0] <= 0 <= crossed[1]:
            verdict, reason = "unclear", "another seed could turn it round"
    differences = [value for row in rows for value in row]
    return GroupDifference(
        measure=measure,
        mean=result.mean,
        interval=interval,
        verdict=verdict,
        reason=reason,
        num_scenarios=len(common),
        num_pairs=len(rows),
        seeds=seeds,
        wins=sum(value > 0 for value in differences),
        losses=sum(value < 0 for value in differences),
        p_value=result.p_value if len(rows) == 1 else None,
    )


def _played(sides: Sequence[RunGroup]) -> list[RunResults]:
    """The runs that kept results of scenarios."""
    return [run for side in sides for run in side.runs if run.after.reward or run.after.success]


def _table(run: RunResults, measure: Measure) -> Mapping[str, float]:
    return run.after.success if measure == "success" else run.after.reward


def _labels(firsts: Sequence[RunResults]) -> list[str]:
    """A label for each: the name the user gave, else the settings that differ, else the folder."""
    slugs = [run.name.partition("-")[2] or run.name for run in firsts]
    if len(firsts) == 1 or len(set(slugs)) == len(slugs):
        return slugs
    differing = differing_settings([run.config for run in firsts])
    table = {name: values for name, values in differing.items() if not is_identity(name)}
    short = _short_names(table)
    labels = [
        ", ".join(f"{short[name]}={values[at]}" for name, values in table.items() if values[at] is not None)
        for at in range(len(firsts))
    ]
    labels = [
        label if 0 < len(label) <= _MAX_LABEL else run.name for label, run in zip(labels, firsts, strict=True)
    ]
    return [
        label if labels.count(label) == 1 else run.name for label, run in zip(labels, firsts, strict=True)
    ]


def _short_names(names: Mapping[str, Any]) -> dict[str, str]:
    """`training.beta` -> `beta`, where no other setting ends so."""
    ends = [name.rpartition(".")[2] for name in names]
    return {
        name: end if ends.count(end) == 1 else name
        for name, end in ((name, name.rpartition(".")[2]) for name in names)
    }


# ------------------------------------------------------------------------------ the page

_MAX_POINTS, _MIN_POINTS, _ALL_POINTS = 400, 40, 8000
"""The most and the fewest points of one curve, and the most of one metric's curves of all runs."""


def run_folders(root: str | Path) -> list[RunFolder]:
    """The runs in a folder, by name; `latest` and other links are left out.

    Raises ConfigurationError if there is none.
    """
    path = Path(root).resolve()
    if not path.is_dir():
        raise ConfigurationError(f"run folder {str(root)!r} does not exist: give one such as runs/latest")
    entries = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.is_symlink()]
    folders = [RunFolder(entry) for entry in entries if (entry / "metrics.jsonl").exists()]
    if not folders:
        raise ConfigurationError(
            f"{str(root)!r} is no run folder and holds none: give one such as runs/latest, or runs"
        )
    return folders


def has_runs(root: str | Path) -> bool:
    """True if the folder holds a run."""
    try:
        return bool(run_folders(root))
    except ConfigurationError:
        return False


def overview_data(root: str | Path, *, read: Read | None = None) -> dict[str, Any]:
    """Runs, experiments, their differences, the settings that differ, the curves, and which runs are damaged.

    `read`: how a run is read, `read_run` if not given.
    Raises ConfigurationError where there is no run, or none that can be read.
    """
    folders = run_folders(root)
    points = max(_MIN_POINTS, min(_MAX_POINTS, _ALL_POINTS // len(folders)))
    runs: list[RunResults] = []
    rows: list[dict[str, Any]] = []
    damaged: list[tuple[str, str]] = []
    for folder in folders:
        try:
            run = (read or read_run)(RunLog(folder), points)
            with damage_named(folder.path):
                rows.append(_run(run))
        except ConfigurationError as error:
            damaged.append((folder.path.name, " ".join(str(error).split())))
        else:
            runs.append(run)
    if not runs:
        raise ConfigurationError(f"no run of {str(root)!r} can be read; the first: {damaged[0][1]}")
    groups = experiments(runs)
    number = {run.name: at for at, experiment in enumerate(groups) for run in experiment.runs}
    scores = [score(experiment) for experiment in groups]
    pairs = [(a, b, difference(groups[a], groups[b])) for a, b in combinations(range(len(groups)), 2)]
    constant, names = _metrics(runs)
    return {
        "name": Path(root).resolve().name,
        "damaged": damaged,
        "runs": [row | {"experiment": number[row["name"]]} for row in rows],
        "experiments": [
            {"label": experiment.label, "score": result and asdict(result)}
            for experiment, result in zip(groups, scores, strict=True)
        ],
        "differences": [[a, b, asdict(result)] for a, b, result in pairs if result is not None],
        "settings": [
            [name, [values[run_at] for run_at in range(len(runs))]]
            for name, values in differing_settings([run.config for run in runs]).items()
        ],
        "constant": constant,
        "unsmoothed": [name for name in names if not any(name in run.curves.smoothed for run in runs)],
        "kinds": {
            units.kind: {**asdict(units), "captions": captions(units)} for units in (CONVERSATIONS, NUMERIC)
        },
        "curves": {name: [run.curves.values.get(name) for run in runs] for name in names},
        "steps": [run.curves.steps for run in runs],
    }


def _run(run: RunResults) -> dict[str, Any]:
    planned = run.summary.get("num_steps")
    reward = [value for value in run.curves.values.get("reward/mean", ()) if value is not None]
    last = reward[-max(1, len(reward) // 10) :]
    return {
        "name": run.name,
        "kind": units_of(run.config).kind,
        "seed": run.seed,
        "ended": run.summary.get("ended"),
        "steps": run.steps,
        "planned": planned or run.training.get("max_steps"),
        "seconds": run.summary.get("train_seconds"),
        "reward": sum(last) / len(last) if last else None,
        "before": _side(run, "before"),
        "after": _side(run, "after"),
        "gain": _gain(run.before, run.after),
        "has_report": run.has_report,
    }


def _side(run: RunResults, which: str) -> dict[str, Any] | None:
    """Success, or the mean reward where nothing was judged."""
    side = run.summary.get(which) or {}
    for measure, field, interval in (
        ("success", "success", "interval"),
        ("reward", "mean_reward", "reward_interval"),
    ):
        if side.get(field) is not None:
            return {
                "measure": measure,
                "value": side[field],
                "interval": side.get(interval),
                "n": side.get("n"),
            }
    return None


def _gain(before: HeldOut, after: HeldOut) -> dict[str, Any] | None:
    """Success after training minus before, on the scenarios of both; the reward where nothing was judged."""
    measure = "success" if before.success and after.success else "reward"
    old, new = getattr(before, measure), getattr(after, measure)
    pairs = [(old[name], new[name]) for name in old if name in new]
    if not pairs:
        return None
    result = (paired_shares if measure == "success" else paired_rewards)([b - a for a, b in pairs])
    return {
        "measure": measure,
        "mean": result.mean,
        "interval": result.interval,
        "n": len(pairs),
        "gained": sum(b > a for a, b in pairs),
        "lost": sum(b < a for a, b in pairs),
    }


def _metrics(runs: Sequence[RunResults]) -> tuple[dict[str, float], list[str]]:
    """Metrics that never change in any run with their value, and the names of the others."""
    names = sorted({name for run in runs for name in run.curves.values})
    constant, others = {}, []
    for name in names:
        values = {v for run in runs for v in run.curves.values.get(name, ()) if v is not None}
        largest = max(map(abs, values), default=0.0)
        if largest < 1e-12:  # rounding is no value
            constant[name] = 0.0
        elif max(values) - min(values) <= 1e-9 * largest:
            constant[name] = max(values)
        else:
            others.append(name)
    return constant, others


_log = get_logger(__name__)

_OWN = (
    "page/conversations/page.search.js",
    *(f"overview/overview.{part}js" for part in ("table.", "held_out.", "curves.", "")),
)


def write_overview(root: str | Path, *, shared_assets: bool = False) -> Path:
    """Write `report.html` into a folder of runs and return its path.

    `shared_assets` keeps plotly.js beside it instead of in the page. Raises ConfigurationError if the folder
    holds no run, or cannot be read or written.
    """
    data = overview_data(root)
    for name, reason in data["damaged"]:
        _log.warning("a run is left out", run=name, reason=reason)
    path = Path(root).resolve() / "report.html"
    plotly = shared_plotly(path.parent) if shared_assets else None
    replace_file(path, render_overview(data, plotly=plotly))
    return path


def render_overview(data: dict[str, Any], *, plotly: str | None, live: bool = False) -> str:
    """The page as HTML. `plotly`: path of plotly.js for the browser; None: inside the page."""
    styles = ["page/shared/page.css", "overview/overview.css"]
    return html_page(
        "overview/overview.html", styles, [*CHART_SCRIPTS, *_OWN], data, plotly=plotly, live=live
    )
