"""How many replicas to have when the load to come is known, or believed to be.

The n-th replica is worth what lateness it takes away from n - 1, and costs its price; while it starts it only
costs. Under a known load each replica is then a question of its own, on or off in each step, and a dynamic
program over two states answers it:

    on(t)  = max(worth(t) - price + on(t + 1), off(t))
    off(t) = max(off(t + 1), -start-up price + on(t + start-up))

This is exact where lateness is convex in the number of replicas and a step leaves no queue to the next one;
lateness is therefore replaced by its convex hull, and queues by the stationary ones of each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.cluster import Cluster
from stateset_agents.numeric.autoscaling.money import MoneyReward
from stateset_agents.numeric.autoscaling.simulator import Simulator

Array = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NUM_RATES = 384
_LEAST_LOAD = 0.01
"""Of one replica's capacity: the lowest load of the table."""


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """What each further replica takes away from the price of lateness, by load."""

    table: Array  # [loads, replicas], falling along both ends
    _log_first: float
    _log_step: float

    def __call__(self, rates: Array) -> Array:
        """[..., replicas] of requests per second [...]; entry n - 1 is the n-th replica's, per step."""
        place = (np.log(np.maximum(rates, 1e-9)) - self._log_first) / self._log_step
        return self.table[np.clip(np.rint(place), 0, len(self.table) - 1).astype(np.int64)]


@lru_cache(maxsize=64)
def worth(cluster: Cluster, money: MoneyReward, errors: tuple[float, ...] = ()) -> Worth:
    """From the simulator itself: every number of replicas under every load, without a queue from before.

    `errors`: of the logarithm of the load, equally likely, where the load is a belief; the worth is then the
    mean over them.
    """
    logs, penalty = _penalty(cluster, money)
    step = float(logs[1] - logs[0])
    if errors:
        penalty = _expected(penalty, np.array(errors) / step)
    return Worth(-np.diff(_convex_hull(penalty), axis=1), float(logs[0]), step)


@lru_cache(maxsize=4)
def _penalty(cluster: Cluster, money: MoneyReward) -> tuple[Array, Array]:
    """[loads] logarithms of loads, and [loads, 1 + replicas] what lateness costs in a step."""
    simulator, capacity = Simulator(cluster), cluster.replica_capacity
    first, last = _LEAST_LOAD * capacity, 2 * cluster.max_replicas * capacity
    logs = np.linspace(np.log(first), np.log(last), _NUM_RATES)
    late = np.ones((_NUM_RATES, cluster.max_replicas + 1))
    idle = simulator.start(np.exp(logs))
    for count in range(1, cluster.max_replicas + 1):
        fleet = replace(idle, ready=np.full_like(idle.ready, count))
        late[:, count] = simulator.serve(fleet, np.exp(logs))[1].late_share
    return logs, money.late_weight * np.maximum(late - money.allowed_late, 0.0)


def _expected(values: Array, distances: Array) -> Array:
    """The mean over distances, in places of the first axis; beyond an end its value stands."""
    places = np.clip(np.arange(len(values))[:, None] + distances, 0, len(values) - 1)
    left = np.minimum(places.astype(np.int64), len(values) - 2)
    share = (places - left)[:, :, None]
    found: Array = (values[left] * (1 - share) + values[left + 1] * share).mean(axis=1)
    return found


def _convex_hull(values: Array) -> Array:
    """The largest convex function below each row, at whole numbers."""
    hull = np.empty_like(values)
    places = np.arange(values.shape[1])
    for row, given in enumerate(values):
        corners: list[int] = []
        for place in places:
            while len(corners) > 1:
                first, second = corners[-2:]
                slope = (given[second] - given[first]) / (second - first)
                if given[place] - given[second] > slope * (place - second):
                    break
                corners.pop()
            corners.append(int(place))
        hull[row] = np.interp(places, corners, given[corners])
    return hull


def on_and_off(gains: Array, price: Array, startup: int, *, goes_on: bool) -> tuple[Array, Array]:
    """[T + 1, B, N] the values of having each replica and of not having it before each step, and at the end.

    `gains`: [T, B, N] worth of each; `price`: [B] of a replica's step. Where it `goes_on` after the end, a
    replica that was worth its price in the last step is worth its start-up.
    """
    steps, num_rows, number = gains.shape
    each = price[:, None]
    on, off = np.zeros((2, steps + 1, num_rows, number))
    if goes_on:
        on[steps] = np.where(gains[-1] > each, startup * each, 0.0)
    for step in range(steps - 1, -1, -1):
        later = min(step + startup, steps)
        stay = gains[step] - each + on[step + 1]
        new = on[later] - (later - step) * each if startup else stay
        off[step] = np.maximum(off[step + 1], new)
        on[step] = np.maximum(stay, off[step])
    return on, off


def first_wish(gains: Array, price: Array, startup: int, ready: IntArray, starting: IntArray) -> IntArray:
    """[B] replicas to have from now on. `starting`: [S, B] those that serve 1, 2, ... S steps from now."""
    on, off = on_and_off(gains, price, startup, goes_on=True)
    steps, _, number = gains.shape
    each = price[:, None]
    places = np.arange(number)
    keep = gains[0] - each + on[1] >= off[0]
    new = on[min(startup, steps)] - min(startup, steps) * each > off[1]
    have = ready[:, None] > places
    wanted = np.where(have, keep, new)
    before = ready.copy()
    for left, count in enumerate(starting, start=1):
        left = min(left, steps)
        is_such = (places >= before[:, None]) & (places < (before + count)[:, None])
        wanted = np.where(is_such, on[left] - left * each >= off[0], wanted)
        before = before + count
    total: IntArray = wanted.sum(axis=1)
    return total


def whole_plan(gains: Array, price: Array, startup: int, ready: IntArray) -> IntArray:
    """[T, B] replicas to have from each step on, for a load that is known to the end; all `ready` at the
    start."""
    steps, num_rows, number = gains.shape
    each = price[:, None]
    on, off = on_and_off(gains, price, startup, goes_on=False)
    left = np.where(ready[:, None] > np.arange(number), 0, -1)  # -1 off, 0 on, else steps of start-up left
    wishes = np.empty((steps, num_rows), dtype=np.int64)
    for step in range(steps):
        later = min(step + startup, steps)
        starts = (left == -1) & (on[later] - (later - step) * each > off[step + 1])
        stops = (left == 0) & (gains[step] - each + on[step + 1] < off[step])
        left = np.where(starts, startup, np.where(stops, -1, left))
        wishes[step] = (left >= 0).sum(axis=1)
        left = np.where(left > 0, left - 1, left)
    return wishes
