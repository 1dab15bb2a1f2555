"""Runs that differ in nothing but their seed are one experiment; two experiments are compared pair by pair.

A pair is one scenario that both played after training, with several seeds also one seed that both have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from stateset_agents.algorithms.intervals import crossed_interval, stratified_interval
from stateset_agents.algorithms.paired import Verdict, paired_rewards, paired_shares
from stateset_agents.reporting.overview.run_results import RunResults
from stateset_agents.tracking.run_settings import differing_settings, flat_settings, is_identity

Measure = Literal["success", "reward"]
_MAX_LABEL = 60  # characters


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs with the same settings and, if all is well, different seeds."""

    label: str
    """What sets it apart from the others, such as `beta=0.01`."""
    runs: Sequence[RunResults]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an experiment's runs got on held-out scenarios."""

    measure: Measure
    iqm: float
    """Interquartile mean of `runs`."""
    interval: tuple[float, float] | None
    """95 %, see `stratified_interval`; None for fewer than three runs."""
    runs: Sequence[float]
    """What each run's summary says."""
    num_scenarios: int
    """Of each run; the fewest where one could not play some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
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
    """Of runs."""
    seeds: Sequence[int | None]
    """By which runs are paired; empty where none is in both: then they are paired in their order."""
    wins: int
    """Scenarios with more for B, summed over pairs of runs; the rest are losses and ties."""
    losses: int
    p_value: float | None
    """Of one pair of runs, see `sign_flip_p`."""


def experiments(runs: Sequence[RunResults]) -> list[Experiment]:
    """The runs grouped by their settings, in the order of their first run."""
    groups: dict[tuple[tuple[str, str], ...], list[RunResults]] = {}
    for run in runs:
        key = tuple(item for item in flat_settings(run.config) if not is_identity(item[0]))
        groups.setdefault(key, []).append(run)
    members = list(groups.values())
    labels = _labels([found[0] for found in members])
    return [Experiment(label, found) for label, found in zip(labels, members, strict=True)]


def score(experiment: Experiment) -> Score | None:
    """None where none of the runs was evaluated after training; runs that were not are left out."""
    sides = [run.summary["after"] for run in experiment.runs if run.summary.get("after")]
    measures: dict[Measure, str] = {"success": "success", "reward": "mean_reward"}
    for measure, field in measures.items():
        runs = [side[field] for side in sides if side.get(field) is not None]
        if runs and len(runs) == len(sides):
            iqm, interval = stratified_interval({"": [[value] for value in runs]})
            num_scenarios = min(round(side["n"] / side.get("tries", 1)) for side in sides)
            return Score(measure=measure, iqm=iqm, interval=interval, runs=runs, num_scenarios=num_scenarios)
    return None


def difference(a: Experiment, b: Experiment) -> Difference | None:
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
    return Difference(
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


def _played(sides: Sequence[Experiment]) -> list[RunResults]:
    """The runs that kept results of scenarios."""
    return [run for side in sides for run in side.runs if run.after.reward or run.after.success]


def _table(run: RunResults, measure: Measure) -> Mapping[str, float]:
    return run.after.success if measure == "success" else run.after.reward


def _labels(firsts: Sequence[RunResults]) -> list[str]:
    """What sets each apart: the name the user gave, else the settings that differ, else the folder."""
    slugs = [run.name.partition("-")[2] or run.name for run in firsts]
    if len(firsts) == 1 or len(set(slugs)) == len(slugs):
        return slugs
    differing = differing_settings([run.config for run in firsts])
    shown = {name: values for name, values in differing.items() if not is_identity(name)}
    short = _short_names(shown)
    labels = [
        ", ".join(f"{short[name]}={values[at]}" for name, values in shown.items() if values[at] is not None)
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
