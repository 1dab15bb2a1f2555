"""A study read from its folder: its arms side by side, in measures, paired differences and sentences."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from stateset_agents.algorithms.intervals import interval_text, mean_interval, stratified_interval
from stateset_agents.runtime.yaml_files import read_sections
from stateset_agents.tracking.jsonl import damage_named, read_lines
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

# ------------------------------------------------------------------------------------------ folder
#
# study.yaml    what is compared, with which settings and seeds, and each task's references
# cells.jsonl   a header, then one record per finished cell: a suite, an arm, a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training: an arm on a suite with a seed. Scores are 0 for a random policy, 1 for a solved task."""

    suite: str
    tasks: Sequence[str]
    arm: str
    seed: int
    steps: int
    """Environment steps that it took."""
    curve: Mapping[str, Sequence[Any]]
    """steps, and per step returns and scores by task, null where one had no episode; at most 200 points."""
    final: Mapping[str, Sequence[float]]
    """returns and scores by task, after the training, from starts that it did not play."""
    worst_task: float
    """The lowest final score."""
    fairness: float
    """The lowest final score by their mean, see `group_fairness`."""
    sign_flips: float | None
    """Mean over the updates of the share of steps pushed the other way."""
    absolute_shares: Sequence[float | None]
    """Per task, mean over the updates of its share of the sum of |advantage|."""
    weights: Mapping[str, Sequence[Any]]
    """names of the parts, steps, and per step values by part; empty with one part."""
    parts: Mapping[str, Any]
    """key, and whether it is an outcome."""
    settings: Mapping[str, Any]
    """Settings of the arm."""
    cpu_seconds: float
    command: str
    """Command that runs the cell again."""
    gradient_cosines: Sequence[Sequence[float | None]] = ()
    """[tasks][tasks] cosines between their gradients, means over the updates that compared them; null where a
    pair never had gradients. Empty for one task, and in cells of versions that did not compare them."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.suite, self.arm, self.seed

    @property
    def score(self) -> float:
        """The mean of the final scores."""
        return sum(self.final["scores"]) / len(self.final["scores"])

    def to_json(self) -> dict[str, Any]:
        """The record of a line in cells.jsonl."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The folder of a study, which is only read here."""

    path: Path

    @property
    def study(self) -> Path:
        return self.path / "study.yaml"

    @property
    def cells_file(self) -> Path:
        return self.path / "cells.jsonl"

    def settings(self) -> dict[str, Any]:
        """The content of study.yaml. Raises ConfigurationError where there is none."""
        if not self.study.is_file():
            raise ConfigurationError(
                f"{self.path} has no study.yaml: write stateset-agents study run {self.path}"
            )
        return read_sections(self.study)

    def cells(self) -> list[Cell]:
        """The finished cells in the order of suite, arm and seed of study.yaml, whatever the order in
        which they were run. Raises ConfigurationError for a line that is no cell, or one that stands twice.
        """
        if not self.cells_file.is_file():
            return []
        cells: dict[tuple[str, str, int], Cell] = {}
        for _, record in read_lines(self.cells_file):
            if "schema_version" in record:
                continue
            with damage_named(self.cells_file):
                cell = Cell(**record)
            if cell.key in cells:
                raise ConfigurationError(f"{self.cells_file} has {cell.key} twice: remove one of the lines")
            cells[cell.key] = cell
        settings = self.settings()
        suites, arms = list(settings["suites"]), list(settings["arms"])

        def place(cell: Cell) -> tuple[int, int, int]:
            try:
                return suites.index(cell.suite), arms.index(cell.arm), cell.seed
            except ValueError as error:
                raise ConfigurationError(
                    f"{self.cells_file} has a cell of {cell.suite} and {cell.arm}, not in {self.study}"
                ) from error

        return sorted(cells.values(), key=place)


@dataclass(frozen=True, slots=True)
class StudyCells:
    """Trainings that a program kept, read as the folder of a study is."""

    results: Sequence[Cell]

    def settings(self) -> dict[str, Any]:
        """What study.yaml would say of them."""
        return {
            "name": "trainings",
            "suites": list(dict.fromkeys(cell.suite for cell in self.results)),
            "arms": dict.fromkeys(cell.arm for cell in self.results),
            "total_steps": max(cell.steps for cell in self.results),
            "num_cells": len(self.results),
        }

    def cells(self) -> list[Cell]:
        return list(self.results)


# ------------------------------------------------------------------------------------------ measures
#
# For runs with few seeds, after rliable (https://arxiv.org/abs/2108.13264), with intervals.

_RESAMPLES = 2000


def probability_of_improvement(
    better: Mapping[str, Sequence[float]],
    than: Mapping[str, Sequence[float]],
    *,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> tuple[float, tuple[float, float] | None]:
    """The probability that a run of the first scores above a run of the second, ties counted half, mean over
    the suites.

    {"mix": [.9, .8]} against {"mix": [.7, .8]} is 3.5 of 4. The interval is as in `stratified_interval`, both
    sides drawn. Raises ConfigurationError where they have no suite in common.
    """
    suites = [name for name in better if better[name] and than.get(name)]
    if not suites:
        raise ConfigurationError("the two arms have no suite in common")

    def mean(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        return sum(_wins(ours, theirs) for ours, theirs in pairs) / len(pairs)

    pairs = [(better[name], than[name]) for name in suites]
    centre = mean(pairs)
    if min(len(side) for pair in pairs for side in pair) < 3:
        return centre, None
    draw = random.Random(derive(seed, "probability_of_improvement"))
    estimates = sorted(
        mean(
            [(draw.choices(ours, k=len(ours)), draw.choices(theirs, k=len(theirs))) for ours, theirs in pairs]
        )
        for _ in range(resamples)
    )
    cut = round(0.025 * resamples)
    return centre, (estimates[cut], estimates[-1 - cut])


def _wins(ours: Sequence[float], theirs: Sequence[float]) -> float:
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in ours for b in theirs)
    return won / (len(ours) * len(theirs))


def area_under_curve(steps: Sequence[float], scores: Sequence[float], *, length: float) -> float:
    """The mean height of a curve from step 0, where the score is 0, to `length`, scores held within 0 and 1.

    A straight line from 0 to 1 has .5; a curve that ends early goes on level. Raises ConfigurationError for
    a curve without a point.
    """
    if not steps or len(steps) != len(scores):
        raise ConfigurationError(f"a curve needs as many scores as steps, got {len(scores)} and {len(steps)}")
    total, before, height = 0.0, 0.0, 0.0
    for step, score in zip([*steps, max(length, steps[-1])], [*scores, scores[-1]], strict=True):
        at, now = min(float(step), length), min(1.0, max(0.0, score))
        total += (at - before) * (height + now) / 2
        before, height = at, now
    return total / length


def worst_drawdown(scores: Sequence[float]) -> float:
    """The furthest that a curve fell below a height that it had reached; 0 for one that only rises."""
    highest, worst = float("-inf"), 0.0
    for score in scores:
        highest = max(highest, score)
        worst = max(worst, highest - score)
    return worst


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
class ArmDifference:
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


def sentence(difference: ArmDifference) -> str:
    """A sentence that says no more than the interval allows."""
    words, n = MEASURES[difference.measure].words, difference.num_seeds
    head = f"{difference.suite}: {words} of {difference.arm} against {difference.than}"
    seeds = f"{n} seed{'s' * (n != 1)}"
    if difference.mean is None:
        return f"{head}: no seed has both, nothing can be said."
    if difference.interval is None:
        return f"{head}: {difference.mean:+.3f}, {seeds}, no interval: no difference shown."
    verdict = difference.verdict
    words = "no difference shown" if verdict == "none shown" else f"{difference.arm} is {verdict}"
    return f"{head}: {difference.mean:+.3f}{interval_text(difference.interval, '+.3f')}, {seeds}: {words}."


def cell_measures(cells: Sequence[Cell], length: float) -> dict[str, list[float]]:
    """Measure -> its value for each cell; `training_stability` is the furthest that the curve fell."""
    values = {name: [measure.of(cell, length) for cell in cells] for name, measure in MEASURES.items()}
    return {**values, "training_stability": [worst_drawdown(_mean_curve(cell)[1]) for cell in cells]}


def analyse(folder: StudyFolder | StudyCells) -> dict[str, Any]:
    """Everything that a report shows, as JSON; a study under way gives what its finished cells allow.

    The first arm of study.yaml is what the others are compared with. Raises ConfigurationError where no cell
    is finished.
    """
    settings, cells = folder.settings(), folder.cells()
    if isinstance(folder, StudyFolder) and not cells:
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
        "missing": max(0, int(settings["num_cells"]) - len(cells)),
        "arms": {arm: _of_arm(by_arm[arm], length) for arm in present},
        "suites": {
            suite: {
                arm: _of_arm(of_suite, length)
                for arm in present
                if (of_suite := [cell for cell in by_arm[arm] if cell.suite == suite])
            }
            for suite in suites
        },
        "improvement": {arm: _improvement(by_arm[arm], by_arm[reference]) for arm in others},
        "differences": [{**asdict(each), "verdict": each.verdict} for each in differences],
        "verdict": [sentence(each) for each in differences] + _rivals(cells, suites, rivals, length),
    }


def _measures(cells: Sequence[Cell], suite: str) -> list[tuple[str, Measure]]:
    """The measures of a suite; with a single task, worst task and fairness are left out."""
    several = any(len(cell.tasks) > 1 for cell in cells if cell.suite == suite)
    return [
        (name, measure)
        for name, measure in MEASURES.items()
        if several or name not in ("worst_task", "group_fairness")
    ]


def _difference(
    cells: Sequence[Cell], suite: str, arm: str, than: str, measure: str, length: float
) -> ArmDifference:
    of = MEASURES[measure].of
    sides = [
        {cell.seed: of(cell, length) for cell in cells if cell.suite == suite and cell.arm == name}
        for name in (arm, than)
    ]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    pairs = [sides[0][seed] - sides[1][seed] for seed in seeds]
    return ArmDifference(
        suite=suite,
        arm=arm,
        than=than,
        measure=measure,
        num_seeds=len(pairs),
        mean=mean(pairs) if pairs else None,
        interval=mean_interval(pairs) if pairs else None,
    )


def _rivals(cells: Sequence[Cell], suites: Sequence[str], arms: Sequence[str], length: float) -> list[str]:
    """Sentences about ways of making parts, in pairs, where there are enough seeds."""
    sentences = []
    for place, arm in enumerate(arms):
        for than in arms[place + 1 :]:
            for suite in suites:
                each = _difference(cells, suite, arm, than, "final_performance", length)
                if each.num_seeds >= SEEDS_FOR_RIVALS:
                    sentences.append(sentence(each))
                elif each.num_seeds:
                    sentences.append(
                        f"{suite}: {arm} and {than} are not compared with {each.num_seeds} seeds, "
                        f"{SEEDS_FOR_RIVALS} are needed."
                    )
    return sentences


def _of_arm(cells: Sequence[Cell], length: float) -> dict[str, Any]:
    strata: dict[str, list[list[float]]] = {}
    for cell in cells:
        strata.setdefault(cell.suite, []).append(list(cell.final["scores"]))
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


# ------------------------------------------------------------------------------------------ grids
#
# A recommendation is one of the measured settings: nothing between two cells is guessed.


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One combination of settings, over its seeds."""

    settings: Mapping[str, Any]
    num_seeds: int
    iqm: float | None
    """Interquartile mean of the scores; None if nothing was measured."""
    interval: tuple[float, float] | None
    cpu_seconds: float
    """Mean CPU time of a run."""


def combinations(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the axes' values, in their order."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def grid(cells: Sequence[Cell], axes: Mapping[str, Sequence[Any]]) -> list[GridCell]:
    """Every combination of the axes' values, in their order, with what its cells measured.

    `axes`: setting -> values; a cell belongs where its arm's settings have those values.
    """
    if not axes:
        raise ConfigurationError("a grid needs at least one setting with its values")
    grid_cells = []
    for settings in combinations(axes):
        members = [
            cell
            for cell in cells
            if all(cell.settings.get(name) == value for name, value in settings.items())
        ]
        scores = [cell.final["scores"] for cell in members]
        iqm, interval = stratified_interval({"": scores}) if members else (None, None)
        grid_cells.append(
            GridCell(
                settings=settings,
                num_seeds=len(members),
                iqm=iqm,
                interval=interval,
                cpu_seconds=sum(cell.cpu_seconds for cell in members) / len(members) if members else 0.0,
            )
        )
    return grid_cells


def recommend(cells: Sequence[GridCell]) -> tuple[GridCell | None, str]:
    """The cheapest combination whose interval overlaps the best one's, and why.

    None where no combination has an interval, and where none is above 0, a random policy's score.
    Combinations without one take no part: fewer than three seeds say too little.
    """
    measured = [cell for cell in cells if cell.interval is not None and cell.iqm is not None]
    left_out = len(cells) - len(measured)
    if not measured:
        return None, "no combination has three seeds or more: nothing is recommended."
    best = max(measured, key=lambda cell: (cell.iqm or 0.0, -cell.cpu_seconds))
    assert best.interval is not None
    low = best.interval[0]
    if low <= 0:
        return None, (
            f"the best has IQM {best.iqm:.3f}{interval_text(best.interval, '.3f')}, not shown above a random "
            "policy's 0: nothing was learned, and nothing is recommended."
        )
    equals = [cell for cell in measured if cell.interval is not None and cell.interval[1] >= low]
    choice = min(equals, key=lambda cell: cell.cpu_seconds)
    words = ", ".join(f"{name} {value}" for name, value in choice.settings.items())
    reason = f"{words}: IQM {choice.iqm:.3f}{interval_text(choice.interval, '.3f')}"
    if choice is best:
        reason += ", the best"
    else:
        reason += (
            f", whose interval overlaps the best one's ({best.iqm:.3f}), at {choice.cpu_seconds:.1f} CPU s "
            f"in place of {best.cpu_seconds:.1f}"
        )
    if left_out:
        reason += f"; {left_out} of {len(cells)} combinations are not measured"
    return choice, reason + "."


# ------------------------------------------------------------------------------------------ report
#
# Words and tables in Markdown; every number is one of `analyse`.


def study_report(folder: StudyFolder | StudyCells) -> str:
    """Tables of the arms, one per suite, then the verdict. Raises ConfigurationError without a cell."""
    result, settings = analyse(folder), folder.settings()
    missing = f", {result['missing']} are missing" if result["missing"] else ""
    lines = [f"# {result['name']}", "", f"{result['num_cells']} cells of {settings['num_cells']}{missing}."]
    for suite, arms in result["suites"].items():
        if arms:
            lines += ["", f"## {suite}", "", *_table(arms)]
    if result["improvement"]:
        lines += ["", f"## Probability of a run above one of {result['reference']}", ""]
        lines += [f"- {arm}: {_probability(each)}" for arm, each in result["improvement"].items()]
    lines += ["", "## Verdict", "", *(f"- {sentence}" for sentence in result["verdict"])]
    axes = settings.get("axes") or {}
    if axes:
        lines += ["", "## Sensitivity", "", *_sensitivity(folder, axes)]
    return "\n".join(lines) + "\n"


def _table(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    head = (
        "arm",
        "seeds",
        "IQM of final scores",
        "worst task",
        "area under curve",
        "fairness",
        "std over seeds",
        "sign flips",
    )
    rows = [
        (
            f"{arm} (outcome: diagnostic)" if each["outcome"] else arm,
            str(each["num_cells"]),
            _with_interval(each["iqm"], each["interval"]),
            f"{each['worst_task']:.3f}",
            f"{each['sample_efficiency']:.3f}",
            f"{each['group_fairness']:.3f}",
            _or_dash(each["training_stability"]["std_over_seeds"], ".3f"),
            _or_dash(each["sign_flips"], ".1%"),
        )
        for arm, each in arms.items()
    ]
    return _markdown(head, rows)


def _sensitivity(folder: StudyFolder | StudyCells, axes: Mapping[str, Sequence[Any]]) -> list[str]:
    lines = []
    for suite in folder.settings()["suites"]:
        cells = grid([cell for cell in folder.cells() if cell.suite == suite], axes)
        rows = [
            (
                *(str(cell.settings[name]) for name in axes),
                str(cell.num_seeds),
                "not measured" if cell.iqm is None else _with_interval(cell.iqm, cell.interval),
                _or_dash(cell.cpu_seconds or None, ".1f"),
            )
            for cell in cells
        ]
        table = _markdown((*axes, "seeds", "IQM of final scores", "CPU s a run"), rows)
        lines += [f"{suite}:", "", *table, "", f"Recommended: {recommend(cells)[1]}", ""]
    return lines[:-1]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _with_interval(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.3f}{interval_text(interval, '.3f') or ' (no interval)'}"


def _probability(share: Mapping[str, Any] | None) -> str:
    return "no suite in common" if share is None else _with_interval(share["probability"], share["interval"])


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
