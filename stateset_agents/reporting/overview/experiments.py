"""Runs that differ in nothing but their seed are one experiment; two experiments are compared pair by pair.

A pair is one scenario that both played after training, with several seeds also one seed that both have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from stateset_agents.algorithms.intervals import (
    bootstrapped_iqm,
    crossed_interval,
    exact_mcnemar,
    mean_interval,
    paired_interval,
)
from stateset_agents.reporting.overview.run_results import RunResults
from stateset_agents.tracking.run_settings import differing_settings, flat_settings, is_identity

__all__ = ["Difference", "Experiment", "Score", "difference", "experiments", "score"]

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
    """Interquartile mean over runs and families."""
    interval: tuple[float, float] | None
    """95 %, see `bootstrapped_iqm`; None for fewer than three runs."""
    runs: Sequence[float]
    """Mean over the scenarios of each run."""
    num_scenarios: int
    families: Mapping[str, float]
    """Mean over the runs of each family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Experiment B minus experiment A on the scenarios that both played after training."""

    measure: Measure
    mean: float
    interval: tuple[float, float] | None
    """95 %; None where no two pairs differ."""
    num_scenarios: int
    seeds: Sequence[int | None]
    """That both have, by which they are paired; empty of one run each, paired whatever their seeds."""
    wins: int
    """Scenarios with more for B, summed over seeds; the rest of the pairs are losses and ties."""
    losses: int
    p_value: float | None
    """Of as many wins as losses, where one run each was played once (`exact_mcnemar`)."""


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
    measure = _measure([experiment])
    played = [table for run in experiment.runs if (table := _table(run, measure))]
    common = set.intersection(*map(set, played)) if played else set()
    if not common:
        return None
    family_of = {name: run.after.families[name] for run in experiment.runs for name in run.after.families}
    families: dict[str, list[str]] = {}
    for name in sorted(common):
        families.setdefault(family_of[name], []).append(name)
    rows = [[fmean(table[name] for name in names) for names in families.values()] for table in played]
    iqm, interval = bootstrapped_iqm(rows)
    return Score(
        measure=measure,
        iqm=iqm,
        interval=interval,
        runs=[fmean(table[name] for name in common) for table in played],
        num_scenarios=len(common),
        families={
            family: fmean(column) for family, column in zip(families, zip(*rows, strict=True), strict=True)
        },
    )


def difference(a: Experiment, b: Experiment) -> Difference | None:
    """B minus A; None where they have no seed or no scenario in common.

    One run each: paired by scenario, whatever their seeds (`paired_interval`). Several: paired by seed and
    scenario, and the interval is over both (`crossed_interval`); of runs with the same seed the last counts.
    """
    measure = _measure([a, b])
    runs_a, runs_b = ({run.seed: run for run in side.runs if _table(run, measure)} for side in (a, b))
    seeds: list[int | None] = []
    if len(runs_a) == len(runs_b) == 1:
        pairs = [(*runs_a.values(), *runs_b.values())]
    else:
        seeds = [seed for seed in runs_a if seed in runs_b]
        pairs = [(runs_a[seed], runs_b[seed]) for seed in seeds]
    tables = [(_table(of_a, measure), _table(of_b, measure)) for of_a, of_b in pairs]
    common = sorted(set.intersection(*(of_a.keys() & of_b.keys() for of_a, of_b in tables))) if tables else []
    if not common:
        return None
    rows = [[of_b[name] - of_a[name] for name in common] for of_a, of_b in tables]
    differences = [value for row in rows for value in row]
    wins, losses = sum(value > 0 for value in differences), sum(value < 0 for value in differences)
    p_value = None
    if len(rows) > 1:
        interval = crossed_interval(rows)
    elif measure == "success":
        of_a, of_b = tables[0]
        shares = [(of_a[name], of_b[name]) for name in common]
        interval = paired_interval(shares)
        if all(share in (0, 1) for pair in shares for share in pair):
            p_value = exact_mcnemar(wins, losses)
    else:
        interval = mean_interval(rows[0])
    return Difference(
        measure=measure,
        mean=math.fsum(differences) / len(differences),
        interval=interval,
        num_scenarios=len(common),
        seeds=seeds,
        wins=wins,
        losses=losses,
        p_value=p_value,
    )


def _measure(found: Sequence[Experiment]) -> Measure:
    """Success where all have verdicts, else the reward."""
    runs = [run for experiment in found for run in experiment.runs if run.after.families]
    return "success" if all(run.after.success for run in runs) else "reward"


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
