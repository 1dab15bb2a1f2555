"""Environments by name for studies: single tasks, mixes whose rewards have scales far apart, a curriculum.

References are what an unclipped score counts from and to: the mean return of uniform actions, and what
Gymnasium calls solved (CartPole-v1: 500 of 500 steps here) or a good policy gets (Acrobot-v1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stateset_agents.numeric.environments.base import BatchedEnvironment
from stateset_agents.numeric.environments.classic import BatchedAcrobot, BatchedCartPole
from stateset_agents.numeric.environments.gymnasium_batch import GymnasiumBatch
from stateset_agents.numeric.environments.mix import Task, TaskMix
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

REFERENCES: Mapping[str, tuple[float, float]] = {
    "cart_pole": (22.0, 500.0),
    "acrobot": (-500.0, -80.0),
    "lunar_lander": (-170.0, 200.0),
}
"""Task -> return of uniform actions, and of a solved task."""

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
    if name not in _CLASSIC:
        raise ConfigurationError(
            f"task must be one of {', '.join(_CLASSIC)}, got {name!r}{nearest(name, _CLASSIC)}"
        )
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


SUITES: Mapping[str, Callable[[], BatchedEnvironment]] = {
    "cart_pole": _CLASSIC["cart_pole"],
    "acrobot": _CLASSIC["acrobot"],
    "lunar_lander": _CLASSIC["lunar_lander"],
    "mix": lambda: mix({"cart_pole": 1.0, "acrobot": 1.0}),
    "mix_cart_pole_large": lambda: mix({"cart_pole": 1.0, "acrobot": 0.01}),
    "mix_acrobot_large": lambda: mix({"cart_pole": 0.01, "acrobot": 1.0}),
    "curriculum": _curriculum,
}
"""Name -> a new environment; a new suite is a line here."""


def make_suite(name: str) -> Suite:
    """Raises ConfigurationError for an unknown name, and for lunar_lander where Box2D is missing."""
    if name not in SUITES:
        raise ConfigurationError(
            f"suite must be one of {', '.join(SUITES)}, got {name!r}{nearest(name, SUITES)}"
        )
    environment = SUITES[name]()
    if isinstance(environment, TaskMix):
        rows = environment.task_rows()
        pairs = zip(rows.names, rows.references.tolist(), strict=True)
        return Suite(name, environment, rows.names, {task: (low, high) for task, (low, high) in pairs})
    return Suite(name, environment, (name,), {name: REFERENCES[name]})
