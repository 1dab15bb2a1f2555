"""Kubernetes' horizontal pod autoscaler, as documented and as its controller does it, for all rows at once.

    wish    ceil(replicas * metric / target); none within the tolerance
    limits  up at once, to at most double or 4 more per 15 s; down to the highest wish of a window

https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details
Replicas that are starting count as idle where the wish is to go up, and wishes are remembered as they were,
before limits: without either the autoscaler is another, weaker one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.types.errors import ConfigurationError

_ROUNDING = 1e-9
"""A wish of 60 that floating point makes 60.000000000000007 is 60, as the controller's integers make it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hpa:
    """The autoscaler's settings; Kubernetes' defaults, but for the target, which has none."""

    target: float = 0.7
    """Utilisation of the ready replicas that is aimed at."""
    window_seconds: float = 300.0
    """Down to the highest wish of so long; 0 goes down at once."""
    tolerance: float = 0.1
    """Relative distance from the target within which nothing is done."""
    sync_seconds: float = 15.0
    """From one look to the next."""

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ConfigurationError(f"target must lie above 0 and at most at 1, got {self.target!r}")
        for name in ("window_seconds", "tolerance"):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"{name} must not be negative, got {getattr(self, name)!r}")
        if not self.sync_seconds > 0:
            raise ConfigurationError(f"sync_seconds must be positive, got {self.sync_seconds!r}")

    @property
    def name(self) -> str:
        """ "HPA 70 %, 300 s"."""
        return f"HPA {self.target * 100:g} %, {self.window_seconds:g} s"

    def __call__(self, environment: InfrastructureEnv) -> Callable[[], IntArray]:
        """Begin an episode: a `ReplicaRule`."""
        memory, cluster = HpaEpisode(self), environment.cluster

        def choose() -> IntArray:
            view = environment.observed()
            return memory.replicas(
                view.step * cluster.step_seconds,
                view.replicas,
                view.starting,
                view.utilization,
                (cluster.min_replicas, cluster.max_replicas),
            )

        return choose


HPA_GRID = tuple(
    Hpa(target=target, window_seconds=window)
    for target in (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
    for window in (0.0, 60.0, 300.0)
)
"""24 settings, from spacious to tight, from quick to patient."""


def wished_replicas(
    replicas: IntArray,
    starting: IntArray,
    metric: NDArray[np.float64],
    target: float,
    tolerance: float = 0.1,
) -> IntArray:
    """[B] how many replicas the metric asks for, before any limit.

    `replicas`: [B] those that are starting included; `metric`: [B] the mean over ready ones, in the target's
    unit; where it is no finite number, nothing is asked for. With 50 replicas at 90 % and a target of 75 % it
    is 60.
    """
    is_known = np.isfinite(metric)
    ready = replicas - starting
    ratio = np.where(is_known, metric, target) / target
    has_idle = (starting > 0) & (ratio > 1)
    dampened = np.where(has_idle, ratio * ready / np.maximum(replicas, 1), ratio)
    counted = np.where(has_idle, replicas, ready)
    wish = np.ceil(dampened * counted - _ROUNDING).astype(np.int64)
    is_near = np.abs(1 - dampened) <= tolerance + _ROUNDING
    turns = has_idle & (dampened < 1)  # idle ones would make it go the other way
    return np.where(is_near | turns | (ready == 0), replicas, wish)


@dataclass(slots=True)
class HpaEpisode:
    """One episode of the autoscaler: the wishes of the window."""

    settings: Hpa
    _wishes: deque[tuple[float, IntArray]] = field(default_factory=deque)
    _next: float = -np.inf
    """s: when it looks again."""

    def replicas(
        self,
        seconds: float,
        replicas: IntArray,
        starting: IntArray,
        metric: NDArray[np.float64],
        limits: tuple[int, int],
    ) -> IntArray:
        """[B] how many there shall be at `seconds` since the start. `limits`: the least and the most.

        Where the metric is no finite number the replicas stay, and no wish is remembered.
        """
        settings = self.settings
        if seconds < self._next - _ROUNDING:
            return replicas
        self._next = seconds + settings.sync_seconds
        if not self._wishes:
            self._wishes.append((seconds, replicas))  # the first window holds what was there
        wish = wished_replicas(replicas, starting, metric, settings.target, settings.tolerance)
        is_known = np.isfinite(metric)
        self._wishes.append((seconds, np.where(is_known, wish, 0)))
        while len(self._wishes) > 1 and self._wishes[0][0] <= seconds - settings.window_seconds + _ROUNDING:
            self._wishes.popleft()
        highest = np.maximum.reduce([wish for _, wish in self._wishes])
        settled = np.clip(replicas, wish, highest)
        most = np.maximum(2 * replicas, replicas + 4)
        return np.where(is_known, np.clip(np.minimum(settled, most), *limits), replicas)
