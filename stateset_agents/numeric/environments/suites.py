"""Environments by name for studies: single tasks, mixes whose rewards have scales far apart, a curriculum.

References are what an unclipped score counts from and to: the mean return of uniform actions, and what
Gymnasium calls solved (CartPole-v1: 500 of 500 steps here) or a good policy gets (Acrobot-v1).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.environments.base import (
    BatchedEnvironment,
    BoolArray,
    FloatArray,
    IntArray,
    Spec,
    TaskRows,
    Transition,
)
from stateset_agents.numeric.environments.classic import BatchedAcrobot, BatchedCartPole
from stateset_agents.numeric.environments.gymnasium_batch import GymnasiumBatch
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect, expect_one_of, expect_that

# ------------------------------------------------------------------------------------------ mixes of tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a mix."""

    name: str
    environment: BatchedEnvironment
    random: float
    """The return of a random policy, in the environment's own rewards."""
    solved: float
    """The return of a solved task."""
    scale: float = 1.0
    """Factor of its rewards."""


class TaskMix:
    """Rows of several tasks, stepped together; a row's task is its seed modulo their number.

    An observation is the task's own, each task's in columns of its own, and an indicator of the task at the
    end. Actions beyond a task's own are masked. The tasks' rewards may have scales of their own, which
    `task_rows` takes out again.
    """

    def __init__(self, tasks: Sequence[Task], *, name: str = "") -> None:
        """Raises ConfigurationError for fewer than two tasks, a scale that is not positive, a solved return
        that is not above the random one, and observations that are not one flat array."""
        if len(tasks) < 2:
            raise ConfigurationError(f"a mix needs at least two tasks, got {len(tasks)}")
        for task in tasks:
            _check(task)
        self.tasks = tuple(tasks)
        widths = [_width(task) for task in tasks]
        self._columns = np.cumsum([0, *widths])
        self._rows = {task: np.zeros(0, dtype=np.int64) for task in range(len(tasks))}
        self._ids = np.zeros(0, dtype=np.int64)
        self.spec = Spec(
            name=name or " + ".join(f"{task.name} x{task.scale:g}" for task in tasks),
            observation_shape=(sum(widths) + len(tasks),),
            num_actions=max(task.environment.spec.num_actions for task in tasks),
            horizon=max(task.environment.spec.horizon for task in tasks),
        )

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """[B, width], each row as its task's own `reset` with its seed."""
        self._ids = np.array([seed % len(self.tasks) for seed in seeds], dtype=np.int64)
        self._rows = {task: np.flatnonzero(self._ids == task) for task in range(len(self.tasks))}
        self._seen = np.zeros((len(seeds), *self._shape), dtype=np.float32)
        self._seen[np.arange(len(seeds)), self._columns[-1] + self._ids] = 1.0
        for task, environment, rows in self._present():
            self._put(task, rows, environment.reset([seeds[row] for row in rows]))
        return self._seen.copy()

    def step(self, actions: IntArray) -> Transition:
        """Each row takes its action in its own task."""
        rewards = np.zeros(len(actions), dtype=np.float32)
        terminated, truncated = np.zeros((2, len(actions)), dtype=np.bool_)
        for task, environment, rows in self._present():
            # a row that has ended takes any action, and may not have an own one any more
            task_actions = np.minimum(actions[rows], environment.spec.num_actions - 1)
            transition = environment.step(task_actions)
            self._put(task, rows, transition.observations)
            rewards[rows] = transition.rewards * self.tasks[task].scale
            terminated[rows], truncated[rows] = transition.terminated, transition.truncated
        return Transition(
            observations=self._seen.copy(), rewards=rewards, terminated=terminated, truncated=truncated
        )

    def fork(self, rows: IntArray) -> Self:
        """A new batch with copies of these episodes; see `BatchedEnvironment`."""
        fork = copy.copy(self)
        fork._ids, fork._seen = self._ids[rows], self._seen[rows].copy()
        fork._rows = {task: np.flatnonzero(fork._ids == task) for task in range(len(self.tasks))}
        places = np.zeros(len(self._ids), dtype=np.int64)  # of a row among those of its task
        for rows_of_task in self._rows.values():
            places[rows_of_task] = np.arange(len(rows_of_task))
        forked = []
        for number, task in enumerate(self.tasks):
            inside = places[rows[fork._rows[number]]]
            environment = task.environment.fork(inside) if len(inside) else task.environment
            forked.append(replace(task, environment=environment))
        fork.tasks = tuple(forked)
        return fork

    def action_mask(self) -> BoolArray:
        """[B, num_actions] True for the actions of the row's task that it allows now."""
        mask = np.zeros((len(self._ids), self.spec.num_actions), dtype=np.bool_)
        for _, environment, rows in self._present():
            task_mask = environment.action_mask()
            mask[rows, : environment.spec.num_actions] = True if task_mask is None else task_mask
        return mask

    def task_rows(self) -> TaskRows:
        """The task of each row, and what its returns mean."""
        return TaskRows(
            names=tuple(task.name for task in self.tasks),
            ids=self._ids,
            references=np.array([[task.random, task.solved] for task in self.tasks]),
            scales=np.array([task.scale for task in self.tasks]),
        )

    def seeds_of(self, task: int, seeds: Sequence[int]) -> list[int]:
        """The same number of seeds, each the next one up whose row has this task."""
        return [seed + (task - seed) % len(self.tasks) for seed in seeds]

    @property
    def _shape(self) -> tuple[int, ...]:
        shape = self.spec.observation_shape
        assert not isinstance(shape, Mapping)  # as __init__ made it
        return shape

    def _present(self) -> list[tuple[int, BatchedEnvironment, NDArray[np.int64]]]:
        """Tasks with a row: number, environment, rows."""
        return [
            (number, task.environment, self._rows[number])
            for number, task in enumerate(self.tasks)
            if len(self._rows[number])
        ]

    def _put(self, task: int, rows: NDArray[np.int64], observations: object) -> None:
        assert isinstance(observations, np.ndarray)  # as _check found
        self._seen[rows, self._columns[task] : self._columns[task + 1]] = observations


def _check(task: Task) -> None:
    expect_that(task.scale > 0, f"{task.name}: scale", "be positive", task.scale)
    if not task.solved > task.random:
        raise ConfigurationError(
            f"{task.name}: solved must be above random, got {task.solved!r} and {task.random!r}"
        )


def _width(task: Task) -> int:
    shape = task.environment.spec.observation_shape
    if isinstance(shape, Mapping) or len(shape) != 1:
        raise ConfigurationError(
            f"{task.name}: observations must be one flat array to be mixed, got the shape {shape!r}"
        )
    return int(shape[0])


REFERENCES: dict[str, tuple[float, float]] = {
    "cart_pole": (22.0, 500.0),
    "acrobot": (-500.0, -80.0),
    "lunar_lander": (-170.0, 200.0),
}
"""Task -> return of uniform actions, and of a solved task; `make_suite` measures what is not there."""

_CLASSIC: Mapping[str, Callable[[], BatchedEnvironment]] = {
    "cart_pole": BatchedCartPole,
    "acrobot": BatchedAcrobot,
    "lunar_lander": lambda: GymnasiumBatch("LunarLander-v3"),
}


@dataclass(frozen=True, slots=True)
class Suite:
    """An environment, and what its tasks' returns mean."""

    name: str
    environment: BatchedEnvironment
    tasks: tuple[str, ...]
    references: Mapping[str, tuple[float, float]]


def mix(scales: Mapping[str, float], *, name: str = "") -> TaskMix:
    """Tasks of REFERENCES as one environment; `scales`: task -> what its rewards are multiplied by.

    >>> mix({"cart_pole": 1.0, "acrobot": 0.01})
    """
    return TaskMix([_task(task, scale) for task, scale in scales.items()], name=name)


def _task(name: str, scale: float = 1.0) -> Task:
    expect_one_of("task", name, _CLASSIC)
    random, solved = REFERENCES[name]
    return Task(name=name, environment=_CLASSIC[name](), random=random, solved=solved, scale=scale)


def _curriculum() -> TaskMix:
    """CartPole with horizons of 50, 200 and 500 steps, as three tasks."""
    return TaskMix(
        [
            replace(
                _task("cart_pole"),
                name=f"cart_pole_{horizon}",
                environment=BatchedCartPole(horizon),
                solved=float(horizon),
            )
            for horizon in (50, 200, 500)
        ],
        name="curriculum",
    )


SUITES: dict[str, Callable[[], BatchedEnvironment]] = {
    **_CLASSIC,
    "mix": lambda: mix({"cart_pole": 1.0, "acrobot": 1.0}),
    "mix_cart_pole_large": lambda: mix({"cart_pole": 1.0, "acrobot": 0.01}),
    "mix_acrobot_large": lambda: mix({"cart_pole": 0.01, "acrobot": 1.0}),
    "curriculum": _curriculum,
}
"""Name -> a new environment; a new suite is a line here."""


_ATARI_STEPS = 27_000
"""Half an hour of play, 108,000 frames, as the learning environment's own limit was."""
NAMED = tuple(SUITES)
"""Suites that a command can name; programs add others."""


def is_id(suite: str) -> bool:
    """True for what looks like a Gymnasium id."""
    return re.fullmatch(r"\S+-v\d+", suite) is not None


def add_suite(suite: str | BatchedEnvironment) -> str:
    """The name of a suite, which is then in SUITES: an entry's, a Gymnasium id, or an environment's own.

    An id that is stepped by continuous actions gets three levels of each; Atari is seen as the console's 128
    bytes. Raises ConfigurationError for an unknown name and for an object that is no environment.
    """
    if not isinstance(suite, str):
        expect("a suite", suite, BatchedEnvironment, "wrap one of Gymnasium in GymnasiumBatch")
        SUITES[suite.spec.name] = lambda: suite
        return suite.spec.name
    if suite not in SUITES and is_id(suite):
        is_atari = suite.startswith("ALE/")
        options: dict[str, Any] = {"obs_type": "ram", "horizon": _ATARI_STEPS} if is_atari else {}
        SUITES[suite] = partial(GymnasiumBatch, suite, levels=3, **options)
    if suite not in SUITES:
        expect_one_of("suite", suite, [*NAMED, "a Gymnasium id such as CartPole-v1"])
    return suite


_REFERENCE_EPISODES = 20


def measured_references(environment: BatchedEnvironment) -> tuple[float, float]:
    """0 is the mean return of 20 episodes of uniform actions, 1 what Gymnasium calls solved, or their best.

    Raises ConfigurationError where that is no more than the mean.
    """
    draw = np.random.default_rng(0)
    environment.reset([derive(0, "reference", index) for index in range(_REFERENCE_EPISODES)])
    returns, live = np.zeros(_REFERENCE_EPISODES), np.ones(_REFERENCE_EPISODES, dtype=np.bool_)
    while live.any():
        wishes, mask = draw.random((len(live), environment.spec.num_actions)), environment.action_mask()
        step = environment.step((wishes if mask is None else wishes * mask).argmax(axis=1))
        returns += np.where(live, step.rewards, 0.0)
        live &= ~(step.terminated | step.truncated)
    solved = getattr(environment, "solved", None)
    low, high = float(returns.mean()), float(returns.max() if solved is None else solved)
    if not high > low:
        name = environment.spec.name
        raise ConfigurationError(
            f"{name}: uniform actions return {low:g} and 1 would be {high:g}: say what counts as 0 and 1, "
            f"REFERENCES[{name!r}] = (random, solved)"
        )
    return low, high


def make_suite(name: str) -> Suite:
    """Raises ConfigurationError for an unknown name, and where a package that it needs is missing."""
    environment = SUITES[add_suite(name)]()
    if isinstance(environment, TaskMix):
        rows = environment.task_rows()
        pairs = zip(rows.names, rows.references.tolist(), strict=True)
        return Suite(name, environment, rows.names, {task: (low, high) for task, (low, high) in pairs})
    if name not in REFERENCES:
        REFERENCES[name] = measured_references(environment)
    return Suite(name, environment, (name,), {name: REFERENCES[name]})
