"""Rules that scale a cluster without learning, and `environment: autoscaling`, which has some beside it.

`Hpa` is Kubernetes' horizontal pod autoscaler, as documented and as its controller does it, for all rows:

    wish    ceil(replicas * metric / target); none within the tolerance
    limits  up at once, to at most double or 4 more per 15 s; down to the highest wish of a window

https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/#algorithm-details
Replicas that are starting count as idle where the wish is to go up, and wishes are remembered as they were,
before limits: without either the autoscaler is another, weaker one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.environment import REPLICA_FACTORS, InfrastructureEnv
from stateset_agents.numeric.autoscaling.simulator import Cluster
from stateset_agents.numeric.autoscaling.trace import TraceLoad
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad, Workload
from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Rule, Transition
from stateset_agents.tracking.windows import Panel, Trace
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that, is_number

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
    """Time between two readings of the metric."""

    def __post_init__(self) -> None:
        expect_that(0 < self.target <= 1, "target", "lie above 0 and at most at 1", self.target)
        for name in ("window_seconds", "tolerance"):
            expect_that(getattr(self, name) >= 0, name, "not be negative", getattr(self, name))
        expect_that(self.sync_seconds > 0, "sync_seconds", "be positive", self.sync_seconds)

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


# ------------------------------------------------------------------------------------------ rules in replicas
#
# The autoscaler of Kubernetes may double a deployment, an action space perhaps not: a rule is measured on
# `InReplicas`, where it gets what it asks for, and cloned on the environment itself, by actions.

ReplicaRule = Callable[[InfrastructureEnv], Callable[[], IntArray]]
"""A `Rule` whose numbers are replicas in all, [B]: called after a reset, what it gives is called before each
step."""


class InReplicas:
    """The same clusters; an action is the number of replicas in all, bounded by the cluster."""

    def __init__(self, environment: InfrastructureEnv) -> None:
        self.clusters = environment
        self.spec = replace(environment.spec, num_actions=environment.cluster.max_replicas + 1)

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """See `InfrastructureEnv`."""
        return self.clusters.reset(seeds)

    def step(self, actions: IntArray) -> Transition:
        """[B] replicas from now on."""
        return self.clusters.step_to(actions)

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows."""
        return type(self)(self.clusters.fork(rows))

    def action_mask(self) -> BoolArray | None:
        """Every number is allowed, and bounded."""
        return None


def exactly(rule: Rule) -> Rule:
    """A rule of clusters for what is around them, `InReplicas` or `Autoscaling`. A `ReplicaRule` then gets
    exactly the replicas that it wishes."""

    def begin(environment: InReplicas | Autoscaling) -> Callable[[], IntArray]:
        return rule(environment.clusters)

    return begin


def in_actions(rule: ReplicaRule) -> Rule:
    """A rule of `InfrastructureEnv` that plays the actions nearest to the wished number of replicas."""

    def begin(environment: InfrastructureEnv) -> Callable[[], IntArray]:
        wish = rule(environment)
        return lambda: environment.actions_for(wish())

    return begin


# ------------------------------------------------------------------------------------------ environment

AUTOSCALERS = (Hpa(target=0.6, window_seconds=0.0), Hpa())
"""The best of 24 settings for generated load, and Kubernetes' defaults; measured in
docs/evidence/autoscaling-policies.md."""


def autoscaling(
    *,
    load: str | None = None,
    rates: Sequence[float] | None = None,
    severity: float | None = None,
    load_file: str | None = None,
    max_replicas: int = 60,
    startup_seconds: float = 60.0,
    reward: Literal["money", "document"] = "money",
    horizon: int = 480,
) -> Autoscaling:
    """`Autoscaling` from plain numbers.

    `load`, `rates` and `severity`: of a `GeneratedLoad`, mixed where they are absent; `load_file`: a CSV of
    measured load in its place. Raises ConfigurationError for what no cluster, load or file can be.
    """
    generated = {
        name: value
        for name, value in (("kind", load), ("rates", rates), ("severity", severity))
        if value is not None
    }
    workload: Workload
    if load_file is None:
        workload = _generated(generated)
    elif generated:
        raise ConfigurationError(
            f"load_file has the load: leave out {', '.join(generated).replace('kind', 'load')}"
        )
    else:
        workload = TraceLoad.from_csv(load_file)
    cluster = Cluster(max_replicas=max_replicas, startup_seconds=startup_seconds)
    return Autoscaling(InfrastructureEnv(workload, cluster, reward=reward, horizon=horizon))


def _generated(settings: dict[str, Any]) -> GeneratedLoad:
    if "rates" in settings:
        rates = settings["rates"]
        if not isinstance(rates, Sequence) or len(rates) != 2 or not all(map(is_number, rates)):
            raise ConfigurationError(f"rates must be two that rise from above 0, got {rates!r}")
        settings["rates"] = (float(rates[0]), float(rates[1]))
    if not is_number(settings.get("severity", 1.0)):
        raise ConfigurationError(f"severity must be a number, got {settings['severity']!r}")
    return GeneratedLoad(**settings)


class Autoscaling:
    """The same clusters with rules to compare with (`Ruled`) and a trace of each (`Traced`).

    >>> list(autoscaling().rules())
    ['HPA 60 %, 0 s', 'HPA 70 %, 300 s']
    """

    def __init__(self, clusters: InfrastructureEnv) -> None:
        """Raises ConfigurationError for clusters with other actions than `REPLICA_FACTORS`: the trace shows
        replicas alone."""
        if clusters.spec.num_actions != len(REPLICA_FACTORS):
            raise ConfigurationError("Autoscaling is for clusters without `actions`: replicas alone change")
        self.clusters = clusters
        names = tuple(f"replicas x {factor:g}" for factor in REPLICA_FACTORS)
        self.spec = replace(clusters.spec, action_names=names)

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """See `InfrastructureEnv`."""
        self._seen: list[dict[str, NDArray[np.float64]]] = []
        return self.clusters.reset(seeds)

    def step(self, actions: IntArray) -> Transition:
        """See `InfrastructureEnv`."""
        transition = self.clusters.step(actions)
        view = self.clusters.observed()
        self._seen.append(
            {
                "load": view.arrival_rates[-1],
                "replicas": view.replicas.astype(np.float64),
                "p99": 1000 * view.p99_seconds,
                "late": 100 * view.late_share,
            }
        )
        return transition

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows, with what was seen so far."""
        fork = type(self)(self.clusters.fork(rows))
        fork._seen = [{name: values[rows] for name, values in step.items()} for step in self._seen]
        return fork

    def action_mask(self) -> BoolArray:
        """See `InfrastructureEnv`."""
        return self.clusters.action_mask()

    def rules(self) -> Mapping[str, Rule]:
        """Kubernetes' autoscaler by the nearest actions, from close to patient."""
        return {hpa.name: exactly(in_actions(hpa)) for hpa in AUTOSCALERS}

    def trace(self, row: int) -> Trace:
        """Load, replicas, p99 and the share of late requests of a row, step by step."""

        def of(name: str) -> list[float]:
            return [float(step[name][row]) for step in self._seen]

        return Trace(
            panels=[
                Panel(title="Load", unit="requests/s", series={"load": of("load")}),
                Panel(title="Replicas", series={"replicas": of("replicas")}),
                Panel(title="p99", unit="ms", series={"p99": of("p99")}),
                Panel(title="Late requests", unit="%", series={"late": of("late")}),
            ],
            seconds_per_step=self.clusters.cluster.step_seconds,
        )
