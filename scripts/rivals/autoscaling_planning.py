"""Planning a cluster's replicas: a plan for a known load, a forecast of the load, and control by both.

`clairvoyant` plans for the load that really comes; `Mpc` forecasts it from its past, plans, does the plan's
first step and begins again. `scripts/autoscaling_seeds.py` has both as rivals, beside the autoscalers of
`HPA_GRID` and `static_replicas`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np

from stateset_agents.numeric.autoscaling.baselines import Hpa, ReplicaRule
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.queueing import Array
from stateset_agents.numeric.autoscaling.rewards import MoneyReward
from stateset_agents.numeric.autoscaling.simulator import Cluster, Simulator
from stateset_agents.numeric.autoscaling.workload import Workload
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.types.settings import expect_that

# ------------------------------------------------------------------------------------------ rules

HPA_GRID = tuple(
    Hpa(target=target, window_seconds=window)
    for target in (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
    for window in (0.0, 60.0, 300.0)
)
"""24 settings, from spacious to tight, from quick to patient."""


def static_replicas(number: int) -> ReplicaRule:
    """Always `number`, of which the cluster's bounds are applied."""
    expect_that(number >= 1, "number", "be at least 1", number)

    def begin(environment: InfrastructureEnv) -> Callable[[], IntArray]:
        wished = np.full(len(environment.observed().ready), number, dtype=np.int64)
        return lambda: wished

    return begin


# ------------------------------------------------------------------------------------------ plan
#
# The n-th replica is worth what lateness it takes away from n - 1, and costs its price; while it starts it
# only costs. Under a known load each replica is then a question of its own, on or off in each step, and a
# dynamic program over two states answers it:
#
#     on(t)  = max(worth(t) - price + on(t + 1), off(t))
#     off(t) = max(off(t + 1), -start-up price + on(t + start-up))
#
# This is exact where lateness is convex in the number of replicas and a step leaves no queue to the next one;
# lateness is therefore replaced by its convex hull, and queues by the stationary ones of each step.


_NUM_RATES = 384
_LEAST_LOAD = 0.01
"""Lowest load of the table, as a share of one replica's capacity."""


@dataclass(frozen=True, slots=True, eq=False)
class Worth:
    """Worth of each further replica by load: the price of the lateness that it takes away."""

    table: Array  # [loads, replicas], falling along both ends
    _log_first: float
    _log_step: float

    def __call__(self, rates: Array) -> Array:
        """[..., replicas] of requests per second [...]; entry n - 1 is the n-th replica's, per step."""
        place = (np.log(np.maximum(rates, 1e-9)) - self._log_first) / self._log_step
        return self.table[np.clip(np.rint(place), 0, len(self.table) - 1).astype(np.int64)]


@lru_cache(maxsize=64)
def worth(cluster: Cluster, money: MoneyReward, errors: tuple[float, ...] = ()) -> Worth:
    """The worth of every number of replicas under every load, from the simulator, without an earlier queue.

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
    means: Array = (values[left] * (1 - share) + values[left + 1] * share).mean(axis=1)
    return means


def _convex_hull(values: Array) -> Array:
    """The largest convex function below each row, at whole numbers."""
    hull = np.empty_like(values)
    places = np.arange(values.shape[1])
    for row, heights in enumerate(values):
        corners: list[int] = []
        for place in places:
            while len(corners) > 1:
                first, second = corners[-2:]
                slope = (heights[second] - heights[first]) / (second - first)
                if heights[place] - heights[second] > slope * (place - second):
                    break
                corners.pop()
            corners.append(int(place))
        hull[row] = np.interp(places, corners, heights[corners])
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


_ROWS_AT_ONCE = 64


def clairvoyant(environment: InfrastructureEnv) -> Callable[[], IntArray]:
    """Begin an episode with its whole load: a `ReplicaRule`, optimal in the model of `planning`."""
    cluster, money = environment.cluster, environment.money
    view = environment.observed()
    rates = environment.rates_to_come(environment.spec.horizon)
    mean = (rates.sum(axis=0) + view.arrival_rates[-1]) / (len(rates) + 1)
    price = money.ideal_utilization * cluster.replica_capacity / np.maximum(mean, 1e-6)
    table = worth(cluster, money)
    plans = [
        whole_plan(table(rates[:, rows]), price[rows], cluster.startup_steps, view.ready[rows])
        for rows in np.array_split(np.arange(len(mean)), max(1, len(mean) // _ROWS_AT_ONCE))
    ]
    steps = iter(np.concatenate(plans, axis=1))
    return lambda: next(steps)


# ------------------------------------------------------------------------------------------ forecast
#
# A line through the logarithms of the last steps, by least squares.
#
# For h steps ahead
#
#     log rate(t + h) = log rate(t) + c0 + sum_i c_i (log rate(t - i) - log rate(t))
#
# with coefficients of each h fitted on training workloads, so that it has learned how bursts rise and fade.
# It does not depend on the level. A season of a day is not in it: within the minutes that are planned a
# day's wave moves by less than a hundredth, and an episode has no yesterday.


_LEAST = 1e-3
_SHARES = (np.arange(128) + 0.5) / 128


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Fitted."""

    coefficients: Array  # [lags, steps ahead]; the first is the constant
    errors: Array  # [steps ahead, Q]
    """Equally likely errors of the logarithm, on what it was fitted to, rising."""

    @classmethod
    def fit(
        cls,
        workload: Workload,
        seeds: Sequence[int],
        *,
        num_steps: int,
        step_seconds: float,
        ahead: int,
        lags: int = 24,
    ) -> Self:
        """Fit to episodes of `num_steps` with these seeds. `ahead`, `lags`: steps.

        Raises ConfigurationError where an episode is too short for one window.
        """
        expect_that(
            num_steps >= lags + ahead, "num_steps", f"be at least lags + ahead ({lags + ahead})", num_steps
        )
        traces = np.stack([workload.draw(seed, num_steps, step_seconds) for seed in seeds])
        logs = np.log(np.maximum(traces, _LEAST))
        windows = np.lib.stride_tricks.sliding_window_view(logs, lags + ahead, axis=1)
        windows = windows.reshape(-1, lags + ahead)
        features, newest = _features(windows[:, :lags].T)
        aims = windows[:, lags:] - newest[:, None]
        coefficients = np.linalg.lstsq(features, aims, rcond=None)[0]
        missed = aims - features @ coefficients
        errors: Array = np.quantile(missed, _SHARES, axis=0).T
        return cls(np.asarray(coefficients, dtype=np.float64), errors)

    @property
    def lags(self) -> int:
        """Steps of the past that it reads."""
        return len(self.coefficients)

    def __call__(self, rates: Array) -> Array:
        """[steps ahead, B] requests per second from [H, B], the newest last; the first of a shorter past is
        repeated."""
        past = np.log(np.maximum(rates[-self.lags :], _LEAST))
        if len(past) < self.lags:
            past = np.concatenate([past[:1].repeat(self.lags - len(past), axis=0), past])
        features, newest = _features(past)
        return np.exp(newest + (features @ self.coefficients).T)


def _features(past: Array) -> tuple[Array, Array]:
    """[N, lags] a constant and the distances of older steps from the newest one, and [N] the newest."""
    newest = past[-1]
    return np.concatenate([np.ones((1, past.shape[1])), past[:-1] - newest]).T, newest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mpc:
    """A `ReplicaRule`. It knows the cluster, the queue and the prices as they are, and the past alone."""

    forecast: Forecast
    caution: float = 1.0
    """Factor of the forecast's errors: 0 takes the forecast as certain."""

    def __post_init__(self) -> None:
        expect_that(self.caution >= 0, "caution", "not be negative", self.caution)

    @classmethod
    def fit(
        cls,
        environment: InfrastructureEnv,
        seeds: Sequence[int],
        *,
        caution: float = 1.0,
        start_ups: int = 4,
        lags: int = 24,
    ) -> Self:
        """A controller with a forecast from the training workloads of `seeds`, for `start_ups` start-ups
        ahead.

        Raises ConfigurationError for fewer than 2: within one a replica that is started pays for nothing.
        """
        expect_that(start_ups >= 2, "start_ups", "be at least 2", start_ups)
        cluster = environment.cluster
        forecast = Forecast.fit(
            environment.workload,
            seeds,
            num_steps=environment.spec.horizon + 1,
            step_seconds=cluster.step_seconds,
            ahead=max(start_ups * cluster.startup_steps, 1),
            lags=lags,
        )
        return cls(forecast=forecast, caution=caution)

    def __call__(self, environment: InfrastructureEnv) -> Callable[[], IntArray]:
        """Begin an episode."""
        cluster, money = environment.cluster, environment.money
        errors = self.caution * self.forecast.errors
        worths = [worth(cluster, money, tuple(step.tolist())) for step in errors]
        total, count = np.zeros(1), 0

        def choose() -> IntArray:
            nonlocal total, count
            view = environment.observed(self.forecast.lags)
            total, count = total + view.arrival_rates[-1], count + 1
            ideal = total / count / (money.ideal_utilization * cluster.replica_capacity)  # so far
            gains = np.stack(
                [table(rates) for table, rates in zip(worths, self.forecast(view.arrival_rates), strict=True)]
            )
            return first_wish(
                gains,
                1.0 / np.maximum(ideal, 1e-6),
                cluster.startup_steps,
                view.ready,
                environment.fleet.starting.sum(axis=1)[:-1],
            )

        return choose
