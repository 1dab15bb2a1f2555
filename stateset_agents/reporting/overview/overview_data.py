"""The data of the page of many runs, from their folders alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from stateset_agents.algorithms.paired import paired_rewards, paired_shares
from stateset_agents.reporting.curves import captions
from stateset_agents.reporting.overview.experiments import difference, experiments, score
from stateset_agents.reporting.overview.run_results import HeldOut, RunResults, read_run
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.run_settings import differing_settings
from stateset_agents.tracking.units import CONVERSATIONS, NUMERIC, units_of
from stateset_agents.types.errors import ConfigurationError

Read = Callable[[RunLog, int], RunResults]
"""(run, points of each curve) -> what the page has of it."""

_MAX_POINTS, _MIN_POINTS, _ALL_POINTS = 400, 40, 8000
"""Of one curve, at most and at least; of one metric's curves of all runs."""


def run_folders(root: str | Path) -> list[RunFolder]:
    """The runs in a folder, by name; `latest` and other links are left out.

    Raises ConfigurationError if there is none.
    """
    path = Path(root).resolve()
    if not path.is_dir():
        raise ConfigurationError(f"run folder {str(root)!r} does not exist: give one such as runs/latest")
    found = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and not entry.is_symlink()]
    folders = [RunFolder(entry) for entry in found if (entry / "metrics.jsonl").exists()]
    if not folders:
        raise ConfigurationError(
            f"{str(root)!r} is no run folder and holds none: give one such as runs/latest, or runs"
        )
    return folders


def has_runs(root: str | Path) -> bool:
    """Does the folder hold a run?"""
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
    found = experiments(runs)
    number = {run.name: at for at, experiment in enumerate(found) for run in experiment.runs}
    scores = [score(experiment) for experiment in found]
    pairs = [(a, b, difference(found[a], found[b])) for a, b in combinations(range(len(found)), 2)]
    constant, names = _metrics(runs)
    return {
        "name": Path(root).resolve().name,
        "damaged": damaged,
        "runs": [row | {"experiment": number[row["name"]]} for row in rows],
        "experiments": [
            {"label": experiment.label, "score": one and asdict(one)}
            for experiment, one in zip(found, scores, strict=True)
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
