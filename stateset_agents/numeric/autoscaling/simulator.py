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

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.cluster import Cluster
from stateset_agents.numeric.autoscaling.queueing import RatioTable, WaitingTime, waiting_time

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

_START_UTILIZATION = 0.6
_TABLE_SERVERS = 256
_LEAST_CAPACITY = 1e-6
"""1/s, of a pool without replicas, so that nothing is divided by 0."""
_LEAST_DISTANCE = 1e-5
"""Of the two rates of a response, by the service's: nearer they count as this far apart (0/0)."""
_MOST_EXPONENT = 100.0
"""Beyond exp of it all wait as long as they may."""
_NUM_TIMES = 24
_FIRST_TIME, _LAST_TIME = 1 / 16, 32.0
"""Of the times at which the tail is read, by the SLA."""
_P99 = 0.01
_LEAST_CHANGE = 1e-4
"""Seconds by which a backlog's delay changes in a step before it is looked at on its way."""
_PLACES = (0.125, 0.375, 0.625, 0.875)
"""Of a backlog on its way through a step, at which answers are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fleet:
    """The replicas of every row, their queues, and how they are set."""

    ready: IntArray  # [P, B]
    starting: IntArray  # [steps of the start-up, P, B]
    """By the steps that are left: entry 0 is ready when the next step is over."""
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

    def rows(self, rows: IntArray) -> Self:
        """A copy of these rows."""
        return replace(
            self,
            ready=self.ready[:, rows],
            starting=self.starting[:, :, rows],
            backlog=self.backlog[:, rows],
            batch=self.batch[rows],
            timeout=self.timeout[rows],
            concurrency=self.concurrency[rows],
            weight=self.weight[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """What one step did. Requests are counts [P, B]; backlog + arrived = served + dropped + queued."""

    arrived: Array
    served: Array
    dropped: Array
    queued: Array
    capacity: Array  # [P, B] requests per second that could be served
    late_share: Array  # [B]
    """Of the requests that left: dropped, or answered after the SLA."""
    p99: Array  # [B] seconds, of the answered
    cost_per_hour: Array  # [B] $

    @property
    def dropped_share(self) -> Array:
        """[B] of the requests that left."""
        dropped, served = self.dropped.sum(axis=0), self.served.sum(axis=0)
        share: Array = dropped / np.maximum(dropped + served, _LEAST_CAPACITY)
        return share


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
        """Within what the cluster may have; two at least where a canary runs."""
        least = max(self.cluster.min_replicas, self.num_pools)
        return np.minimum(np.maximum(replicas, least), self.cluster.max_replicas)

    def capacity(self, fleet: Fleet) -> Array:
        """[P, B] requests per second that one ready replica can answer."""
        pair = self._pair(fleet)
        found: Array = self._rates[:, pair] * (self._sizes[pair] * self._workers[pair])
        return found

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
        """[B] as [P, B]."""
        if self.num_pools == 1:
            return replicas[None]
        share = np.round(self.cluster.canary_share * replicas).astype(np.int64)
        canary = np.minimum(np.maximum(share, 1), replicas - 1)
        return np.stack([replicas - canary, canary])

    def _pair(self, fleet: Fleet) -> IntArray:
        return fleet.batch * len(self.cluster.concurrencies) + fleet.concurrency

    def _ratio(self, servers: IntArray, rho: Array) -> Array:
        """`waiting_ratio` by table; for more servers by the square-root law of Halfin and Whitt (1981):
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
        """After a step, those whose start-up has ended are ready."""
        if not self.cluster.startup_steps:
            return fleet
        starting = np.concatenate([fleet.starting[1:], np.zeros_like(fleet.starting[:1])])
        return replace(fleet, ready=fleet.ready + fleet.starting[0], starting=starting)
