"""What a cluster is: its replicas, how fast they answer in each configuration, and what they cost.

A replica has `concurrency` workers, and a worker answers a whole batch at once:

    a batch of b requests on one of w workers takes
        (overhead + b * request) * (1 + contention (w - 1) + coherency w (w - 1))      seconds

The first factor makes large batches cheap for each request and slow for all; the second is Gunther's law of
scalability (Guerrilla Capacity Planning, 2007): workers queue for what they share, and wait for one another's
changes, so that from about sqrt((1 - contention) / coherency) workers on a replica answers less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives

_SERVICES_IN_SLA = 8
"""exp(-8) of exponential services take longer than eight times their mean: .03 %, far below 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One deployment, its replicas and its promise. Times are in seconds."""

    step_seconds: float = 15.0
    """Between two decisions."""
    startup_seconds: float = 60.0
    """From the wish for a replica to its first request, in whole steps, rounded up."""
    min_replicas: int = 1
    max_replicas: int = 60
    price_per_replica_hour: float = 0.1
    """$; a replica that starts is paid for, too."""
    sla_seconds: float = 0.2
    """An answer that takes longer is late."""

    overhead_seconds: float = 0.010
    """Of a batch, however many requests it has."""
    request_seconds: float = 0.005
    """Of each request in a batch."""
    contention: float = 0.02
    coherency: float = 0.01
    """Of Gunther's law; 0 and 0 are workers that do not disturb each other."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_size: int = 2
    """At the start, as the two below."""
    linger_seconds: float = 0.05
    """A batch that does not fill leaves after this."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    concurrency: int = 4
    timeouts: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
    """A request that has waited so long is dropped."""
    timeout: float = 2.0

    canary_share: float = 0.2
    """Of the replicas, where traffic is an action: at least one runs the canary."""
    canary_speed: float = 1.0
    """Its services by those of the stable version: 2 takes half the time."""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "price_per_replica_hour", "sla_seconds", "request_seconds"):
            _at_least(self, name, 0, exclusive=True)
        for name in ("startup_seconds", "overhead_seconds", "contention", "coherency", "linger_seconds"):
            _at_least(self, name, 0)
        _at_least(self, "min_replicas", 1)
        if self.min_replicas > self.max_replicas:
            raise ConfigurationError(
                f"min_replicas must be at most max_replicas, got {self.min_replicas} and {self.max_replicas}"
            )
        _at_least(self, "canary_speed", 0, exclusive=True)
        if not 0 < self.canary_share < 1:
            raise ConfigurationError(f"canary_share must lie between 0 and 1, got {self.canary_share!r}")
        for levels, value in (
            ("batch_sizes", "batch_size"),
            ("concurrencies", "concurrency"),
            ("timeouts", "timeout"),
        ):
            _check_levels(self, levels, value)
        if self.service_seconds > self.sla_seconds / _SERVICES_IN_SLA:
            raise ConfigurationError(
                f"a batch takes {1e3 * self.service_seconds:.0f} ms in the configuration of the start: it "
                f"must be at most 1/{_SERVICES_IN_SLA} of sla_seconds ({1e3 * self.sla_seconds:.0f} ms), or "
                "answers are late without a queue"
            )

    @property
    def startup_steps(self) -> int:
        """Whole steps from the wish for a replica to the first one in which it serves."""
        return math.ceil(self.startup_seconds / self.step_seconds - 1e-9)

    @property
    def service_seconds(self) -> float:
        """Of a batch, in the mean, in the configuration of the start."""
        return float(self.services()[self.level(self.batch_size, self.concurrency)])

    @property
    def replica_capacity(self) -> float:
        """Requests per second that one replica can answer, in the configuration of the start."""
        return self.batch_size * self.concurrency / self.service_seconds

    def level(self, batch_size: int, concurrency: int) -> int:
        """The place of a pair in the arrays over pairs."""
        place = self.batch_sizes.index(batch_size) * len(self.concurrencies)
        return place + self.concurrencies.index(concurrency)

    def services(self) -> NDArray[np.float64]:
        """[pairs] seconds of a batch, of every pair of a batch size and a concurrency, the latter faster."""
        batches = np.array(self.batch_sizes, dtype=np.float64)[:, None]
        workers = np.array(self.concurrencies, dtype=np.float64)
        alone = self.overhead_seconds + batches * self.request_seconds
        disturbed = 1 + self.contention * (workers - 1) + self.coherency * workers * (workers - 1)
        return (alone * disturbed).ravel()


def _at_least(cluster: Any, name: str, least: float, *, exclusive: bool = False) -> None:
    value = getattr(cluster, name)
    if not math.isfinite(value) or value < least or (exclusive and value == least):
        bound = f"above {least}" if exclusive else f"at least {least}"
        raise ConfigurationError(f"{name} must be {bound}, got {value!r}")


def _check_levels(cluster: Any, name: str, value_name: str) -> None:
    levels, value = getattr(cluster, name), getattr(cluster, value_name)
    if not levels or any(level <= 0 for level in levels) or list(levels) != sorted(set(levels)):
        raise ConfigurationError(f"{name} must rise from above 0, got {levels!r}")
    if value not in levels:
        raise ConfigurationError(f"{value_name} must be {alternatives(map(str, levels))}, got {value!r}")
