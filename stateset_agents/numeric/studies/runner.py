"""Runs a study: arms on suites with seeds, one cell after the other, into a folder that `analysis` reads.

A cell is written when it is finished; one that a kill cut off is begun anew and gives the same numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml
from pydantic import Field, field_validator, model_validator

from stateset_agents.grouping.partitioner import GROUP_STRATEGIES
from stateset_agents.grouping.partitions import STRATEGIES
from stateset_agents.grouping.weights import group_fairness
from stateset_agents.numeric.environments.suites import (
    NAMED,
    SUITES,
    Suite,
    TaskMix,
    add_suite,
    is_id,
    make_suite,
)
from stateset_agents.numeric.evaluation import ControlEvaluation, evaluation_seeds
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.partitioned import GRPO, PPO_DEFAULTS
from stateset_agents.numeric.studies.study import Cell, StudyFolder, combinations
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.tracking.jsonl import JsonlWriter
from stateset_agents.tracking.run_folder import RunLock, replace_file
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings

NAMED_ARMS: Mapping[str, Mapping[str, Any]] = {
    "PPO": {"group_strategy": "none"},
    **{name: {"group_strategy": name} for name in GROUP_STRATEGIES if name != "none"},
}
"""PPO, and each way of making parts."""
ARMS = {name: NAMED_ARMS[name] for name in ("PPO", "auto", "task", "difficulty", "random")}
"""Arms by default: PPO, parts by starts and by task, and, to diagnose, by return
and by chance."""

_NEED_TASKS = ("task", "hierarchical")
_POINTS = 200
_COSINES_EVERY = 10
_OWN = frozenset({"seed", "total_steps", "output_dir", "run_name"})
"""Settings that the study sets itself."""


class StudySettings(Settings):
    """Settings of a study: its arms, suites and seeds."""

    name: str = "study"
    """For people."""
    suites: tuple[str, ...]
    """Names of SUITES, and Gymnasium ids."""
    arms: Mapping[str, Mapping[str, Any]] = ARMS
    """Name -> settings; the first is what the others are compared with."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Of the trainings."""
    total_steps: int = Field(default=150_000, ge=1)
    """Environment steps of each."""
    settings: Mapping[str, Any] = {}
    """Of all arms, fields of ControlConfig."""
    episodes: int = Field(default=20, ge=1)
    """Of each task, after the training."""
    axes: Mapping[str, Sequence[Any]] = {}
    """Settings of a grid with their values, where the arms are one."""

    @field_validator("suites")
    @classmethod
    def _are_suites(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(add_suite(name) for name in value)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        for kind, entries in (("suite", self.suites), ("arm", self.arms), ("seed", self.seeds)):
            if not entries:
                raise ValueError(f"a study needs at least one {kind}, got none")
        for name, arm in self.arms.items():
            settings = {**self.settings, **arm}
            if reserved := sorted(_OWN & settings.keys()):
                raise ValueError(f"{name}: {reserved[0]} is the study's own: leave it out of the settings")
            ControlConfig(**{**PPO_DEFAULTS, **_without(settings, {"value_normalization"})})
        return self

    def cells(self) -> list[tuple[str, str, int]]:
        """Suite, arm, seed: seed by seed, so that a study that was ended early has whole seeds. Parts by task
        on a suite of one task would be PPO, and are left out."""
        alone = {name for name in self.suites if not isinstance(SUITES[name](), TaskMix)}
        return [
            (suite, arm, seed)
            for seed, suite, arm in itertools.product(self.seeds, self.suites, self.arms)
            if not (suite in alone and self.arms[arm].get("group_strategy") in _NEED_TASKS)
        ]

    def to_yaml(self) -> str:
        """study.yaml."""
        references = {
            task: list(pair) for name in self.suites for task, pair in make_suite(name).references.items()
        }
        data = {"schema_version": 1, **self.model_dump(mode="json"), "references": references}
        return yaml.safe_dump({**data, "num_cells": len(self.cells())}, sort_keys=False)


def arms_of_grid(base: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> dict[str, Mapping[str, Any]]:
    """One arm for each combination of the axes' values: `n_groups 2, learning_rate 0.001`."""
    return {
        ", ".join(f"{name} {value}" for name, value in settings.items()): {**base, **settings}
        for settings in combinations(axes)
    }


def open_study(path: str | Path, settings: StudySettings | None = None) -> tuple[StudyFolder, StudySettings]:
    """The folder of a study: made from `settings`, or found, then with more seeds where `settings` has them.

    Raises ConfigurationError where the folder has a study with other settings, and without settings where it
    has none.
    """
    folder = StudyFolder(Path(path))
    if folder.study.is_file():
        fields = {
            name: value
            for name, value in folder.settings().items()
            if name not in ("schema_version", "references", "num_cells")
        }
        recorded = StudySettings(**fields)
        if settings is None:
            settings = recorded
        ours, theirs = settings.model_dump(mode="json"), recorded.model_dump(mode="json")
        differing = next((name for name in ours if name != "seeds" and ours[name] != theirs[name]), None)
        if differing or not set(recorded.seeds) <= set(settings.seeds):
            name = differing or "seeds"
            raise ConfigurationError(
                f"{folder.path} has {name} {theirs[name]!r:.60}, got {ours[name]!r:.60}: give another folder"
            )
    if settings is None:
        raise ConfigurationError(
            f"{folder.path} has no study.yaml: say what to run, such as --suite mix_cart_pole_large"
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    replace_file(folder.study, settings.to_yaml())
    return folder, settings


async def run_study(
    path: str | Path,
    settings: StudySettings | None = None,
    *,
    on_cell: Callable[[Cell, int, int], None] | None = None,
) -> StudyFolder:
    """Run the cells that the folder lacks; `on_cell` hears of each with its number and how many there are.

    Raises ConfigurationError as `open_study` does, and where another process runs the same study.
    """
    lock = await in_thread(_locked, Path(path))
    try:
        folder, settings = open_study(path, settings)
        cells = settings.cells()
        # The writer cuts off what a kill left of a line, so that the cells can be read.
        with contextlib.closing(JsonlWriter(folder.cells_file)) as writer:
            done = {cell.key for cell in folder.cells()}
            for number, key in enumerate(cells, start=1):
                if key in done:
                    continue
                cell = await run_cell(settings, *key)
                writer.write([cell.to_json()])
                writer.sync()
                if on_cell is not None:
                    on_cell(cell, number, len(cells))
    finally:
        lock.release()
    return folder


def _locked(path: Path) -> RunLock:
    path.mkdir(parents=True, exist_ok=True)
    return RunLock(path, writer="study")


async def run_cell(settings: StudySettings, suite_name: str, arm: str, seed: int) -> Cell:
    """One training of a study, and how it ended."""
    suite = make_suite(suite_name)
    arm_settings = {**settings.settings, **settings.arms[arm]}
    watch = MetricsWatch(suite)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as runs:
        fixed = {
            "progress": False,
            "log_episodes": False,
            "save_steps": 0,
            "output_dir": runs,
            "report_to": (),
        }
        if isinstance(suite.environment, TaskMix):
            fixed["gradient_cosines_every"] = _COSINES_EVERY
        cell_settings = {"seed": seed, "total_steps": settings.total_steps, **fixed}
        async with GRPO(
            environment=suite.environment, callbacks=[watch], **{**cell_settings, **arm_settings}
        ) as grpo:
            await grpo.train()
            spent = time.process_time() - started
            seeds = evaluation_seeds(seed, settings.episodes)
            result = await grpo.trainer.evaluate(_seeds_of_tasks(suite, seeds), deterministic=False)
            steps = grpo.trainer.step_number
    returns, scores = _final(suite, result)
    strategy = arm_settings.get("group_strategy", "auto")
    return Cell(
        suite=suite.name,
        tasks=suite.tasks,
        arm=arm,
        seed=seed,
        steps=steps,
        curve=watch.curve(),
        final={"returns": returns, "scores": scores},
        worst_task=min(scores),
        fairness=group_fairness(scores),
        sign_flips=watch.mean("partition/sign_flips"),
        absolute_shares=[watch.mean(f"absolute_share/{task}") for task in suite.tasks],
        weights=watch.weights(),
        gradient_cosines=watch.gradient_cosines(),
        parts={"key": strategy, "outcome": strategy in STRATEGIES and STRATEGIES[strategy].outcome},
        settings=arm_settings,
        cpu_seconds=round(spent, 3),
        command=_command(settings, suite.name, arm, seed),
    )


class MetricsWatch:
    """Keeps the metrics of the updates that a cell is made of."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.steps: list[int] = []
        self.metrics: list[Mapping[str, float]] = []

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.metrics.append(metrics)

    def mean(self, name: str) -> float | None:
        values = [metrics[name] for metrics in self.metrics if name in metrics]
        return round(float(np.mean(values)), 6) if values else None

    def gradient_cosines(self) -> list[list[float | None]]:
        """Task by task, means over the updates that compared them; empty where none did."""
        if not any(name.startswith("gradient_cosine/") for each in self.metrics for name in each):
            return []

        def mean(one: str, other: str) -> float | None:
            cosine = self.mean(f"gradient_cosine/{one}+{other}")
            return self.mean(f"gradient_cosine/{other}+{one}") if cosine is None else cosine

        tasks = self.suite.tasks
        return [[1.0 if one == other else mean(one, other) for other in tasks] for one in tasks]

    def curve(self) -> dict[str, list[Any]]:
        rows = _thinned(len(self.steps))
        scores = [[self._score(self.metrics[index], task) for task in self.suite.tasks] for index in rows]
        returns = [
            [
                None if score is None else round(_return(self.suite, task, score), 3)
                for task, score in zip(self.suite.tasks, point, strict=True)
            ]
            for point in scores
        ]
        rounded = [[None if score is None else round(score, 4) for score in point] for point in scores]
        return {"steps": [self.steps[index] for index in rows], "returns": returns, "scores": rounded}

    def weights(self) -> dict[str, list[Any]]:
        prefix = "part_weight/"
        names = sorted(
            {name.removeprefix(prefix) for each in self.metrics for name in each if name.startswith(prefix)}
        )
        rows = _thinned(len(self.steps)) if names else []
        values = [[round(self.metrics[index].get(prefix + name, 0.0), 4) for name in names] for index in rows]
        return {"names": names, "steps": [self.steps[index] for index in rows], "values": values}

    def _score(self, metrics: Mapping[str, float], task: str) -> float | None:
        if len(self.suite.tasks) > 1:
            return metrics.get(f"score/{task}")
        low, high = self.suite.references[task]
        return (metrics["reward/mean"] - low) / (high - low) if "reward/mean" in metrics else None


def _thinned(number: int) -> list[int]:
    """Places of at most 200 points, evenly spaced, the last one among them."""
    if number <= _POINTS:
        return list(range(number))
    places: list[int] = np.unique(np.linspace(0, number - 1, _POINTS).round().astype(int)).tolist()
    return places


def _return(suite: Suite, task: str, score: float) -> float:
    low, high = suite.references[task]
    return low + score * (high - low)


def _seeds_of_tasks(suite: Suite, seeds: Sequence[int]) -> list[int]:
    """The same number of starts for each task."""
    if not isinstance(suite.environment, TaskMix):
        return list(seeds)
    return [start for task in range(len(suite.tasks)) for start in suite.environment.seeds_of(task, seeds)]


def _final(suite: Suite, result: ControlEvaluation) -> tuple[list[float], list[float]]:
    """Mean returns, in the tasks' own rewards, and scores."""
    returns = np.array([np.nan if value is None else value for value in result.returns])
    tasks = result.rollout.tasks
    if tasks is None:
        low, high = suite.references[suite.tasks[0]]
        scores, ids = (returns - low) / (high - low), np.zeros(len(returns), dtype=np.int64)
    else:
        scores, ids = tasks.scores(returns), tasks.ids
    means = [float(np.nanmean(scores[ids == task])) for task in range(len(suite.tasks))]
    task_returns = [_return(suite, task, score) for task, score in zip(suite.tasks, means, strict=True)]
    return [round(value, 4) for value in task_returns], [round(value, 6) for value in means]


def _without(settings: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _command(settings: StudySettings, suite: str, arm: str, seed: int) -> str:
    """The command that runs the cell alone, in a folder of its own."""
    if suite not in NAMED and not is_id(suite):
        return "GRPOvsPPOAnalyzer, in the program that made the environment"
    words = ["stateset-agents", "study", "run", "cell", "--suite", suite]
    arm_settings = dict(settings.settings)
    strategy = settings.arms[arm].get("group_strategy", "auto")
    words += ["--arm", "PPO" if strategy == "none" else strategy]
    arm_settings |= _without(settings.arms[arm], {"group_strategy"})
    for name, value in arm_settings.items():
        words += ["--set", f"{name}={value}"]
    words += ["--first-seed", str(seed), "--seeds", "1", "--steps", str(settings.total_steps)]
    return shlex.join([*words, "--episodes", str(settings.episodes)])
