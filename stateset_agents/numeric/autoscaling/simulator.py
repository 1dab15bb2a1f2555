"""A cluster under load, many at once: what one step of given arrivals does to replicas, queues and answers.

Within a step the rate of arrivals is constant. Each pool (stable, canary) is a queue of batches with
c = replicas * workers servers, in one of three states:

    below capacity    the stationary queue with a time limit on the wait (`queueing`)
    above             the same, and a fluid: the backlog grows by what cannot be served, or drains
    full              as many wait as the timeout allows, the rest drops: stationary again, at the true load

An answer takes filling a batch + min(backlog ahead + stationary wait, timeout) + service. A stationary wait
near rho = 1 takes longer to build up than a step lasts: a queue that begins empty reaches about
sqrt(4 D / (pi capacity)) seconds in a step of D (a reflected Brownian motion), so rho keeps a distance of
sqrt(pi / (4 D capacity)) from 1.

Arrays are [P, B]: pools, then rows; nothing here draws a random number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.queueing import Array, RatioTable, WaitingTime, waiting_time
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that

# ------------------------------------------------------------------------------------------ cluster
#
# A replica has `concurrency` workers, and a worker answers a whole batch at once:
#
#     a batch of b requests on one of w workers takes
#         (overhead + b * request) * (1 + contention (w - 1) + coherency w (w - 1))      seconds
#
# The first factor makes large batches cheap for each request and slow for all; the second is Gunther's law
# of scalability (Guerrilla Capacity Planning, 2007): workers queue for what they share, and wait for one
# another's changes, so that from about sqrt((1 - contention) / coherency) workers on a replica answers
# less.

_SERVICES_IN_SLA = 8
"""exp(-8) of exponential services take longer than eight times their mean: .03 %, far below 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One deployment, its replicas and its promise. Times are in seconds."""

    step_seconds: float = 15.0
    """Between two decisions."""
    startup_seconds: float = 60.0
    """Time from the wish for a replica to its first request, rounded up to whole steps."""
    min_replicas: int = 1
    max_replicas: int = 60
    price_per_replica_hour: float = 0.1
    """$; a replica that starts is paid for, too."""
    sla_seconds: float = 0.2
    """An answer that takes longer is late."""

    overhead_seconds: float = 0.010
    """Time of a batch, however many requests it has."""
    request_seconds: float = 0.005
    """Additional time of each request in a batch."""
    contention: float = 0.02
    coherency: float = 0.01
    """Coefficients of Gunther's law; with 0 and 0 workers do not disturb each other."""

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_size: int = 2
    """Batch size at the start, as are the two values below."""
    linger_seconds: float = 0.05
    """A batch that does not fill leaves after this."""
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16)
    concurrency: int = 4
    timeouts: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
    """A request that has waited so long is dropped."""
    timeout: float = 2.0

    canary_share: float = 0.2
    """Share of the replicas that run the canary, at least one, where traffic is an action."""
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
        expect_that(0 < self.canary_share < 1, "canary_share", "lie between 0 and 1", self.canary_share)
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
        """Mean time of a batch in the configuration of the start."""
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
    expect_that(value in levels, value_name, f"be {alternatives(map(str, levels))}", value)


_START_UTILIZATION = 0.6
_TABLE_SERVERS = 256
_LEAST_CAPACITY = 1e-6
"""1/s, of a pool without replicas, so that nothing is divided by 0."""
_LEAST_DISTANCE = 1e-5
"""Least distance of a response's two rates, by the service's rate: nearer ones would divide 0 by 0."""
_MOST_EXPONENT = 100.0
"""Beyond exp of it all wait as long as they may."""
_NUM_TIMES = 24
_FIRST_TIME, _LAST_TIME = 1 / 16, 32.0
"""First and last time at which the tail is read, in units of the SLA."""
_P99 = 0.01
_LEAST_CHANGE = 1e-4
"""Seconds by which a backlog's delay changes in a step before it is looked at on its way."""
_PLACES = (0.125, 0.375, 0.625, 0.875)
"""Shares of a step at which the answers are measured while a backlog changes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fleet:
    """The replicas of every row, their queues, and how they are set."""

    ready: IntArray  # [P, B]
    starting: IntArray  # [steps of the start-up, P, B]
    """Starting replicas by the steps that are left: entry 0 is ready when the next step is over."""
    backlog: Array  # [P, B]
    """Requests that wait beyond a stationary queue, now."""
    batch: IntArray  # [B]
    """Place in the cluster's batch_sizes; the same below."""
    timeout: IntArray  # [B]
    concurrency: IntArray  # [B]
    weight: Array  # [B]
    """Share of the requests that go to the canary; 0 with one pool."""

    @property
    def replicas(self) -> IntArray:
        """[B] ready and starting, of all pools."""
        total: IntArray = self.ready.sum(axis=0) + self.starting.sum(axis=(0, 1))
        return total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """Result of one step. Requests are counts [P, B]; backlog + arrived = served + dropped + queued."""

    arrived: Array
    served: Array
    dropped: Array
    queued: Array
    capacity: Array  # [P, B] requests per second that could be served
    late_share: Array  # [B]
    """Share of late requests among those that left: dropped, or answered after the SLA."""
    p99: Array  # [B] seconds, of the answered
    cost_per_hour: Array  # [B] $

    @property
    def dropped_share(self) -> Array:
        """[B] of the requests that left."""
        dropped, served = self.dropped.sum(axis=0), self.served.sum(axis=0)
        share: Array = dropped / np.maximum(dropped + served, _LEAST_CAPACITY)
        return share


_State = TypeVar("_State", Fleet, Served)


def rows_of(value: _State, rows: IntArray) -> _State:
    """A copy of these rows; in every array rows are the last axis."""
    return replace(value, **{part.name: getattr(value, part.name)[..., rows] for part in fields(value)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Responses:
    """The tail of filling + min(delay + wait, limit) + service. With w the part of t that may be waited it is
    e^(-rate (t - w)) (at_once e^(-rate w) + waited e^(-decay w) - leaving).
    """

    rate: Array  # [P, B], as all of them: of a batch's service, 1/s
    decay: Array
    limit: Array
    filling: Array
    """Seconds until a batch is full."""
    at_once: Array
    waited: Array
    leaving: Array

    @classmethod
    def of(cls, law: WaitingTime, rate: Array, filling: Array) -> Self:
        decay, distance = law.decay, rate - law.decay
        is_near = np.abs(distance) < _LEAST_DISTANCE * rate
        distance = np.where(is_near, _LEAST_DISTANCE * rate, distance)
        answered = 1 - law.dropped
        during, beyond = law.density / distance / answered, law.density / decay / answered
        return cls(
            rate=rate,
            decay=decay,
            limit=np.broadcast_to(law.limit, rate.shape),
            filling=filling,
            at_once=law.at_once / answered - during,
            waited=during + beyond,
            leaving=beyond * np.exp(-decay * law.limit),
        )

    def tail(self, times: Array, delay: Array) -> Array:
        """[times, P, B] the share of the answers that take longer than `times` [times, 1, 1]."""
        delay = np.minimum(delay, self.limit)
        since = np.maximum(times - (delay + self.filling), 0)
        waited = np.minimum(since, self.limit - delay)
        tail = self.at_once * np.exp(-self.rate * waited)
        tail += self.waited * np.exp(-self.decay * waited)
        tail -= self.leaving
        tail *= np.exp(self.rate * (waited - since))
        return tail

    def those(self, places: IntArray) -> Self:
        """[1, N] of these places of the flattened [P, B]."""
        parts = {part.name: getattr(self, part.name).reshape(1, -1)[:, places] for part in fields(self)}
        return type(self)(**parts)


class Simulator:
    """The arithmetic of one cluster, with its tables."""

    def __init__(self, cluster: Cluster, *, canary: bool = False) -> None:
        """`canary`: two pools instead of one."""
        self.cluster = cluster
        self.num_pools = 2 if canary else 1
        speeds = np.array([1.0, cluster.canary_speed][: self.num_pools])[:, None]
        self._rates = speeds / cluster.services()  # [P, pairs] batches per second of one worker
        sizes, workers = np.meshgrid(cluster.batch_sizes, cluster.concurrencies, indexing="ij")
        self._sizes, self._workers = sizes.ravel().astype(np.float64), workers.ravel()
        self._timeouts = np.array(cluster.timeouts)
        self._table = RatioTable.upto(_TABLE_SERVERS)
        times = cluster.sla_seconds * np.geomspace(_FIRST_TIME, _LAST_TIME, _NUM_TIMES - 1)
        self._times = np.sort(np.append(times, cluster.sla_seconds))[:, None, None]
        self._sla = int(np.searchsorted(self._times.ravel(), cluster.sla_seconds))

    def start(self, rates: Array) -> Fleet:
        """Clusters that have long been used to `rates`, [B] requests per second."""
        cluster, num_rows = self.cluster, len(rates)
        wished = np.ceil(rates / (_START_UTILIZATION * cluster.replica_capacity)).astype(np.int64)
        ready = self._pools(self.bounded(wished))
        share = np.round(10 * cluster.canary_share) / 10 if self.num_pools == 2 else 0.0

        def level(levels: tuple[float, ...], value: float) -> IntArray:
            return np.full(num_rows, levels.index(value), dtype=np.int64)

        return Fleet(
            ready=ready,
            starting=np.zeros((cluster.startup_steps, *ready.shape), dtype=np.int64),
            backlog=np.zeros(ready.shape),
            batch=level(cluster.batch_sizes, cluster.batch_size),
            timeout=level(cluster.timeouts, cluster.timeout),
            concurrency=level(cluster.concurrencies, cluster.concurrency),
            weight=np.full(num_rows, share),
        )

    def bounded(self, replicas: IntArray) -> IntArray:
        """Replicas within the cluster's limits; two at least where a canary runs."""
        least = max(self.cluster.min_replicas, self.num_pools)
        return np.minimum(np.maximum(replicas, least), self.cluster.max_replicas)

    def capacity(self, fleet: Fleet) -> Array:
        """[P, B] requests per second that one ready replica can answer."""
        pair = self._pair(fleet)
        rates: Array = self._rates[:, pair] * (self._sizes[pair] * self._workers[pair])
        return rates

    def scale(self, fleet: Fleet, replicas: IntArray) -> Fleet:
        """Wish for [B] replicas in all: the missing start; too many stop at once, the last started first."""
        change = self._pools(replicas) - fleet.ready - fleet.starting.sum(axis=0)
        more, less = np.maximum(change, 0), np.maximum(-change, 0)
        if not self.cluster.startup_steps:
            return replace(fleet, ready=fleet.ready + change)
        starting = fleet.starting.copy()
        if less.any():
            for left in range(len(starting) - 1, -1, -1):
                stopped = np.minimum(starting[left], less)
                starting[left] -= stopped
                less = less - stopped
        starting[-1] += more
        return replace(fleet, ready=fleet.ready - less, starting=starting)

    def serve(self, fleet: Fleet, rates: Array) -> tuple[Fleet, Served]:
        """One step of [B] requests per second; the fleet after it, and what happened."""
        seconds = self.cluster.step_seconds
        pair = self._pair(fleet)
        size, rate = self._sizes[pair], self._rates[:, pair]
        servers = fleet.ready * self._workers[pair]
        limit = self._timeouts[fleet.timeout]
        routed = rates * (
            np.stack([1 - fleet.weight, fleet.weight]) if self.num_pools == 2 else np.ones((1, 1))
        )
        batches = np.maximum(servers * rate, _LEAST_CAPACITY)  # per second
        capacity = batches * size
        arrived, room = routed * seconds, capacity * limit
        is_full = (routed > capacity) & (fleet.backlog + arrived - capacity * seconds > room)
        slack = np.minimum(np.sqrt(np.pi / (4 * seconds) / batches), 0.5)
        load = routed / capacity
        above = np.minimum(np.maximum(load, 1 + slack), 1 + _MOST_EXPONENT / (batches * limit))
        rho = np.where(is_full, above, np.minimum(load, 1 - slack))
        law = waiting_time(self._ratio(servers, rho), batches, rho, limit)

        begun = np.where(is_full, np.minimum(capacity, routed * (1 - law.dropped)), capacity)
        there = fleet.backlog + arrived - begun * seconds
        dropped = np.maximum(np.maximum(there - room, 0), np.where(is_full, 0.0, law.dropped * arrived))
        queued = np.maximum(there - dropped, 0)
        served = np.maximum(fleet.backlog + arrived - dropped - queued, 0)

        filling = (size - 1) / 2 * fleet.ready / np.maximum(routed, _LEAST_CAPACITY)
        responses = _Responses.of(
            law, rate, np.where(size > 1, np.minimum(filling, self.cluster.linger_seconds), 0.0)
        )
        delays = np.where(is_full, 0.0, np.stack([fleet.backlog, queued]) / capacity)
        tail = responses.tail(self._times, delays[1])
        changing = np.flatnonzero(np.abs(delays[0] - delays[1]) > _LEAST_CHANGE)  # of pools and rows
        if changing.size:
            part = np.clip((queued - fleet.backlog) / np.where(load == 1, 1.0, routed - capacity), 0, seconds)
            part = part.reshape(1, -1)[:, changing] / seconds
            several, (before, after) = responses.those(changing), delays.reshape(2, 1, -1)[:, :, changing]
            mean = sum(
                several.tail(self._times, before + place * (after - before)) for place in _PLACES
            ) / len(_PLACES)
            pairs = tail.reshape(len(tail), 1, -1)  # the same memory
            pairs[:, :, changing] = part * mean + (1 - part) * pairs[:, :, changing]

        answered = served.sum(axis=0)
        share = served / np.maximum(answered, _LEAST_CAPACITY)
        tail = (tail * share).sum(axis=1) if self.num_pools == 2 else tail[:, 0]
        lost = dropped.sum(axis=0)
        late = lost + answered * np.clip(tail[self._sla], 0, 1)
        result = Served(
            arrived=arrived,
            served=served,
            dropped=dropped,
            queued=queued,
            capacity=capacity,
            late_share=late / np.maximum(lost + answered, _LEAST_CAPACITY),
            p99=self._quantile(tail),
            cost_per_hour=np.multiply(fleet.replicas, self.cluster.price_per_replica_hour, dtype=np.float64),
        )
        return self._matured(replace(fleet, backlog=queued)), result

    def _pools(self, replicas: IntArray) -> IntArray:
        """[B] replicas divided among the pools, [P, B]: all in one, or the canary's share apart."""
        if self.num_pools == 1:
            return replicas[None]
        share = np.round(self.cluster.canary_share * replicas).astype(np.int64)
        canary = np.minimum(np.maximum(share, 1), replicas - 1)
        return np.stack([replicas - canary, canary])

    def _pair(self, fleet: Fleet) -> IntArray:
        return fleet.batch * len(self.cluster.concurrencies) + fleet.concurrency

    def _ratio(self, servers: IntArray, rho: Array) -> Array:
        """The waiting ratio by table; for more servers by the square-root law of Halfin and Whitt (1981):
        queues with equal (1 - rho) sqrt(c) wait alike."""
        if servers.max() <= _TABLE_SERVERS:
            return self._table(servers, rho)
        stretch = np.sqrt(np.maximum(servers / _TABLE_SERVERS, 1.0))
        alike = np.maximum(1 - (1 - rho) * stretch, 0.0)
        return self._table(np.minimum(servers, _TABLE_SERVERS), alike) / stretch

    def _quantile(self, tail: Array) -> Array:
        """[B] the time that 1 % of the answers exceed, from [times, B] exponentially in between."""
        times = self._times[:, 0, 0]
        right = np.minimum((tail > _P99).sum(axis=0), len(times) - 1)
        left = np.maximum(right - 1, 0)
        columns = np.arange(tail.shape[1])
        high = np.log(np.maximum(tail[left, columns], _P99))
        low = np.log(np.clip(tail[right, columns], 1e-300, _P99))
        share = (high - np.log(_P99)) / np.maximum(high - low, 1e-12)
        quantile: Array = times[left] + np.minimum(share, 1.0) * (times[right] - times[left])
        return quantile

    def _matured(self, fleet: Fleet) -> Fleet:
        """The fleet after a step: replicas whose start-up has ended are ready."""
        if not self.cluster.startup_steps:
            return fleet
        starting = np.concatenate([fleet.starting[1:], np.zeros_like(fleet.starting[:1])])
        return replace(fleet, ready=fleet.ready + fleet.starting[0], starting=starting)
