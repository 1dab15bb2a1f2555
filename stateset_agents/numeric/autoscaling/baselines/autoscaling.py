"""`environment: autoscaling` of a YAML file: clusters, rules beside them, and what happened to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.baselines.hpa import Hpa
from stateset_agents.numeric.autoscaling.baselines.replicas import in_actions
from stateset_agents.numeric.autoscaling.cluster import Cluster
from stateset_agents.numeric.autoscaling.environment import REPLICA_FACTORS, InfrastructureEnv
from stateset_agents.numeric.autoscaling.trace import TraceLoad
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad, Workload
from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Rule, Transition
from stateset_agents.tracking.windows import Panel, Trace
from stateset_agents.types.errors import ConfigurationError

AUTOSCALERS = (Hpa(target=0.6, window_seconds=0.0), Hpa())
"""The best of 24 settings for generated load (docs/control.md), and Kubernetes' defaults."""


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
        if not isinstance(rates, Sequence) or len(rates) != 2 or not all(map(_is_number, rates)):
            raise ConfigurationError(f"rates must be two that rise from above 0, got {rates!r}")
        settings["rates"] = (float(rates[0]), float(rates[1]))
    if not _is_number(settings.get("severity", 1.0)):
        raise ConfigurationError(f"severity must be a number, got {settings['severity']!r}")
    return GeneratedLoad(**settings)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        """As the clusters'."""
        self._seen: list[dict[str, NDArray[np.float64]]] = []
        return self.clusters.reset(seeds)

    def step(self, actions: IntArray) -> Transition:
        """As the clusters'."""
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
        fork._seen = [{name: values[rows] for name, values in seen.items()} for seen in self._seen]
        return fork

    def action_mask(self) -> BoolArray:
        """As the clusters'."""
        return self.clusters.action_mask()

    def rules(self) -> Mapping[str, Rule]:
        """Kubernetes' autoscaler by the nearest actions, from close to patient."""

        def played(hpa: Hpa) -> Rule:
            def begin(environment: Autoscaling) -> Callable[[], IntArray]:
                return in_actions(hpa)(environment.clusters)

            return begin

        return {hpa.name: played(hpa) for hpa in AUTOSCALERS}

    def trace(self, row: int) -> Trace:
        """Load, replicas, p99 and the share of late requests of a row, step by step."""

        def of(name: str) -> list[float]:
            return [float(seen[name][row]) for seen in self._seen]

        return Trace(
            panels=[
                Panel(title="Load", unit="requests/s", series={"load": of("load")}),
                Panel(title="Replicas", series={"replicas": of("replicas")}),
                Panel(title="p99", unit="ms", series={"p99": of("p99")}),
                Panel(title="Late requests", unit="%", series={"late": of("late")}),
            ],
            seconds_per_step=self.clusters.cluster.step_seconds,
        )
