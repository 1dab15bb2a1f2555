"""A study's arms side by side: measures, differences paired by seed, and sentences made of intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from stateset_agents.algorithms.intervals import mean_interval, stratified_interval
from stateset_agents.numeric.studies.measures import (
    area_under_curve,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    worst_drawdown,
)
from stateset_agents.numeric.studies.study_folder import Cell, StudyFolder
from stateset_agents.types.errors import ConfigurationError

THRESHOLDS = tuple(index / 20 for index in range(21))
"""Of a performance profile."""
SEEDS_FOR_RIVALS = 10
"""Below so many seeds two ways of making parts are not compared with each other in words: on tasks such as
Acrobot a seed either finds the solution or does not."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number of a cell that arms are compared by."""

    words: str
    of: Callable[[Cell, float], float]
    """(cell, steps that the study asked for)"""


def _efficiency(cell: Cell, length: float) -> float:
    steps, scores = _mean_curve(cell)
    return area_under_curve(steps, scores, length=length)


MEASURES: Mapping[str, Measure] = {
    "final_performance": Measure("final score", lambda cell, length: cell.score),
    "worst_task": Measure("worst task's final score", lambda cell, length: cell.worst_task),
    "sample_efficiency": Measure("area under the training curve", _efficiency),
    "group_fairness": Measure("fairness (worst by mean score)", lambda cell, length: cell.fairness),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An arm less another one on a suite, from the seeds that both have."""

    suite: str
    arm: str
    than: str
    measure: str
    num_seeds: int
    mean: float | None
    interval: tuple[float, float] | None
    """95 %; None for fewer than two seeds, and where all differ by the same."""

    @property
    def verdict(self) -> str:
        """better, worse, or none shown."""
        if self.interval is None:
            return "none shown"
        low, high = self.interval
        return "better" if low > 0 else "worse" if high < 0 else "none shown"


def sentence(difference: Difference) -> str:
    """What the interval allows to say, and no more."""
    words, n = MEASURES[difference.measure].words, difference.num_seeds
    head = f"{difference.suite}: {words} of {difference.arm} against {difference.than}"
    seeds = f"{n} seed{'s' * (n != 1)}"
    if difference.mean is None:
        return f"{head}: no seed has both, nothing can be said."
    if difference.interval is None:
        return f"{head}: {difference.mean:+.3f}, {seeds}, no interval: no difference shown."
    low, high = difference.interval
    found = {
        "better": f"{difference.arm} is better",
        "worse": f"{difference.arm} is worse",
        "none shown": "no difference shown",
    }[difference.verdict]
    return f"{head}: {difference.mean:+.3f} [{low:+.3f}, {high:+.3f}], {seeds}: {found}."


def analyse(folder: StudyFolder) -> dict[str, Any]:
    """Everything that a report shows, as JSON; a study under way gives what its finished cells allow.

    The first arm of study.yaml is what the others are compared with. Raises ConfigurationError where no cell
    is finished.
    """
    settings, cells = folder.settings(), folder.cells()
    if not cells:
        raise ConfigurationError(f"{folder.path} has no finished cell yet: run stateset-agents study run")
    suites, arms = list(settings["suites"]), list(settings["arms"])
    length = float(settings["total_steps"])
    by_arm = {arm: [cell for cell in cells if cell.arm == arm] for arm in arms}
    present = [arm for arm in arms if by_arm[arm]]
    reference, *others = present
    differences = [
        _difference(cells, suite, arm, reference, name, length)
        for suite in suites
        for arm in others
        if any(cell.suite == suite and cell.arm == arm for cell in cells)
        for name, _ in _measures(cells, suite)
    ]
    rivals = [arm for arm in others if arm not in ("random",)]
    return {
        "name": settings["name"],
        "reference": reference,
        "num_cells": len(cells),
        "missing": _missing(settings, cells),
        "arms": {arm: _of_arm(by_arm[arm], length) for arm in present},
        "suites": {
            suite: {
                arm: _of_arm(own, length)
                for arm in present
                if (own := [cell for cell in by_arm[arm] if cell.suite == suite])
            }
            for suite in suites
        },
        "thresholds": list(THRESHOLDS),
        "improvement": {arm: _improvement(by_arm[arm], by_arm[reference]) for arm in others},
        "differences": [
            {
                "suite": each.suite,
                "arm": each.arm,
                "than": each.than,
                "measure": each.measure,
                "num_seeds": each.num_seeds,
                "mean": each.mean,
                "interval": each.interval,
                "verdict": each.verdict,
            }
            for each in differences
        ],
        "verdict": [sentence(each) for each in differences] + _rivals(cells, suites, rivals, length),
    }


def _measures(cells: Sequence[Cell], suite: str) -> list[tuple[str, Measure]]:
    """With a single task the worst is the only one, and fairness says nothing."""
    several = any(len(cell.tasks) > 1 for cell in cells if cell.suite == suite)
    return [
        (name, measure)
        for name, measure in MEASURES.items()
        if several or name not in ("worst_task", "group_fairness")
    ]


def _difference(
    cells: Sequence[Cell], suite: str, arm: str, than: str, measure: str, length: float
) -> Difference:
    of = MEASURES[measure].of
    sides = [
        {cell.seed: of(cell, length) for cell in cells if cell.suite == suite and cell.arm == name}
        for name in (arm, than)
    ]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    pairs = [sides[0][seed] - sides[1][seed] for seed in seeds]
    return Difference(
        suite=suite,
        arm=arm,
        than=than,
        measure=measure,
        num_seeds=len(pairs),
        mean=mean(pairs) if pairs else None,
        interval=mean_interval(pairs) if pairs else None,
    )


def _rivals(cells: Sequence[Cell], suites: Sequence[str], arms: Sequence[str], length: float) -> list[str]:
    """Of ways of making parts, in pairs, where there are seeds enough to say something."""
    found = []
    for place, arm in enumerate(arms):
        for than in arms[place + 1 :]:
            for suite in suites:
                each = _difference(cells, suite, arm, than, "final_performance", length)
                if each.num_seeds >= SEEDS_FOR_RIVALS:
                    found.append(sentence(each))
                elif each.num_seeds:
                    found.append(
                        f"{suite}: {arm} and {than} are not compared with {each.num_seeds} seeds, "
                        f"{SEEDS_FOR_RIVALS} are needed."
                    )
    return found


def _of_arm(cells: Sequence[Cell], length: float) -> dict[str, Any]:
    strata: dict[str, list[list[float]]] = {}
    for cell in cells:
        strata.setdefault(cell.suite, []).append(list(cell.final["scores"]))
    scores = [score for runs in strata.values() for run in runs for score in run]
    iqm, interval = stratified_interval(strata)
    flips = [cell.sign_flips for cell in cells if cell.sign_flips is not None]
    return {
        "num_cells": len(cells),
        "iqm": iqm,
        "interval": interval,
        **{name: mean(measure.of(cell, length) for cell in cells) for name, measure in MEASURES.items()},
        "training_stability": {
            "std_over_seeds": _spread(strata),
            "worst_drawdown": max(worst_drawdown(_mean_curve(cell)[1]) for cell in cells),
        },
        "optimality_gap": optimality_gap(scores),
        "profile": performance_profile(scores, THRESHOLDS),
        "sign_flips": mean(flips) if flips else None,
        "outcome": any(cell.parts.get("outcome") for cell in cells),
        "cpu_seconds": math.fsum(cell.cpu_seconds for cell in cells),
    }


def _spread(strata: Mapping[str, Sequence[Sequence[float]]]) -> float | None:
    """The deviation over seeds of a run's mean score, mean over the suites; None for single seeds."""
    spreads = [stdev(mean(run) for run in runs) for runs in strata.values() if len(runs) > 1]
    return mean(spreads) if spreads else None


def _improvement(ours: Sequence[Cell], theirs: Sequence[Cell]) -> dict[str, Any] | None:
    sides: list[dict[str, list[float]]] = []
    for cells in (ours, theirs):
        side: dict[str, list[float]] = {}
        for cell in cells:
            side.setdefault(cell.suite, []).append(cell.score)
        sides.append(side)
    if not sides[0].keys() & sides[1].keys():
        return None
    probability, interval = probability_of_improvement(sides[0], sides[1])
    return {"probability": probability, "interval": interval}


def _mean_curve(cell: Cell) -> tuple[list[float], list[float]]:
    """The mean score over the tasks at each point; a task keeps its last score where it had no episode, and
    counts as 0 before its first."""
    last = [0.0] * len(cell.tasks)
    scores = []
    for point in cell.curve["scores"]:
        last = [before if now is None else now for now, before in zip(point, last, strict=True)]
        scores.append(mean(last))
    return list(cell.curve["steps"]), scores


def _missing(settings: Mapping[str, Any], cells: Sequence[Cell]) -> int:
    return max(0, int(settings["num_cells"]) - len(cells))
