"""Autoscaling as a `BatchedEnvironment`: B clusters under drawn load, scaled and configured as it comes.

For rules (a HPA, a forecast, a static count) the interface is in replicas, and stays as it is:

    environment.reset(seeds)
    while not over:
        view = environment.observed(history=20)      # Observed: what a rule may read, arrays [B]
        wished = rule(view)                          # [B] replicas in all, ready and starting
        transition = environment.step_to(wished)     # exactly so many, within the cluster's bounds
        over = transition.truncated.all()            # every row at once, after `spec.horizon` steps

`environment.actions_for(wished)` gives the nearest actions [B] of the action space instead, for `step` and
for cloning. `environment.outcome` is the last step in full; `environment.rates_to_come(steps)` is for
clairvoyant bounds only: nothing else may read it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.numeric.autoscaling.queueing import Array
from stateset_agents.numeric.autoscaling.rewards import InfrastructureRewardFunction, MoneyReward
from stateset_agents.numeric.autoscaling.simulator import Cluster, Fleet, Simulator, rows_of
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad, Workload
from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Spec, Transition
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)


REPLICA_FACTORS = (0.5, 0.75, 0.9, 0.96, 1.0, 1.04, 1.1, 1.25, 1.5, 2.0)
"""The small action space: replicas by those of now. Each but 1 moves by one at least."""
_COMPONENTS = (
    "money",
    "money_cost",
    "money_late",
    "document",
    "document_cost",
    "document_performance",
    "document_reliability",
    "document_efficiency",
)
_PACES = np.exp(-np.array([[0.25], [0.05], [0.0125]]))
"""Share of a running mean of the load that stays in a step: they forget in 4, 20 and 80 steps."""
_UNITS_WRONG = 10
_PROGRAM_MEMORY = 0.4
"""Share of a replica's memory that the program takes; its workers' largest batches take the rest."""
_LEAST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observed:
    """Information that a rule may use between two steps. Arrays are [B]; pools are taken together."""

    step: int
    """Steps that were made."""
    arrival_rates: Array  # [H, B]
    """Requests per second of the last H steps, the newest last; one step before the start is among them."""
    ready: IntArray
    """Replicas that serve in the next step."""
    starting: IntArray
    """Replicas that do not yet."""
    utilization: Array
    """Busy share of the replicas that were ready in the last step, 0 to 1."""
    late_share: Array
    """Share of late requests among those that left in the last step: dropped, or answered after the SLA."""
    dropped_share: Array
    backlog: Array
    """Requests that wait beyond what a steady queue holds."""
    p99_seconds: Array
    cost_per_hour: Array
    """$, of the last step."""
    replica_capacity: Array
    """Requests per second of one ready replica, at utilization 1, as it is configured now."""
    cluster: Cluster
    """Bounds on replicas, start-up, prices, promise."""

    @property
    def replicas(self) -> IntArray:
        """[B] ready and starting."""
        return self.ready + self.starting


class InfrastructureEnv:
    """Clusters that are scaled under load; a `BatchedEnvironment`, see the module for rules.

    >>> InfrastructureEnv().spec.num_actions, len(REPLICA_FACTORS)
    (10, 10)

    Without `actions` an action is one of `REPLICA_FACTORS`. With an `InfrastructureActionSpace` it changes
    the number of replicas, one setting by a level, and, where traffic is offered, sets the canary's share of
    the requests; the canary then has replicas of its own, `canary_share` of all.

    Observations, float32, are ratios, so that a policy reads ten times the load as the same picture; one
    feature alone is the logarithm of the number of replicas.
    """

    def __init__(
        self,
        workload: Workload | None = None,
        cluster: Cluster | None = None,
        *,
        actions: InfrastructureActionSpace | None = None,
        reward: Literal["money", "document"] = "money",
        money: MoneyReward | None = None,
        document: InfrastructureRewardFunction | None = None,
        horizon: int = 480,
    ) -> None:
        """`reward`: which of the two is paid; every step's components have both. `document`: by default with
        the cluster's SLA, and with the ideal cost of the workload's typical load as the baseline.

        Raises ConfigurationError for an unknown reward, and for actions that offer no way to do nothing.
        """
        if reward not in ("money", "document"):
            raise ConfigurationError(f"reward must be money or document, got {reward!r}")
        self.workload: Workload = workload or GeneratedLoad()
        self.cluster = cluster or Cluster()
        self.money = money or MoneyReward()
        self._document = document or InfrastructureRewardFunction(
            sla={"latency_p99_ms": 1000 * self.cluster.sla_seconds},
            cost_baseline=self._ideal_cost(np.array(self.workload.mean_rate)).item(),
        )
        self._is_money = reward == "money"
        self._actions = _Actions(actions)
        self._simulator = Simulator(self.cluster, canary=self._actions.has_traffic)
        self.spec = Spec(
            name="autoscaling",
            observation_shape=(self._actions.num_features,),
            num_actions=self._actions.number,
            horizon=horizon,
            components=_COMPONENTS,
        )
        self._has_warned = False

    # -------------------------------------------------------------------------------------- the protocol

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """[B, features]; one step at the first load is made beforehand, so that there is a last one."""
        places: dict[int, int] = {}
        self._rows: IntArray = np.array([places.setdefault(int(seed), len(places)) for seed in seeds])
        drawn = [
            self.workload.draw(seed, self.spec.horizon + 1, self.cluster.step_seconds) for seed in places
        ]
        self._traces = np.stack(drawn, axis=1)  # [horizon + 1, different seeds]
        self._warn_of_units()
        self._ideal = self._ideal_cost(np.maximum(self._traces.mean(axis=0), _LEAST))
        self._time = 0
        rates = self._rates()
        self._means = np.repeat(np.log(np.maximum(rates, _LEAST))[None], len(_PACES), axis=0)  # [3, B]
        self.fleet, self.outcome = self._simulator.serve(self._simulator.start(rates), rates)
        self._state = self._document_state(rates)
        return self._observations(rates)

    def step(self, actions: IntArray) -> Transition:
        """One action per row, then `step_seconds` of load."""
        actions = np.asarray(actions)
        if actions.min() < 0 or actions.max() >= self.spec.num_actions:
            wrong = actions[(actions < 0) | (actions >= self.spec.num_actions)][0]
            raise ConfigurationError(f"an action must be 0 to {self.spec.num_actions - 1}, got {wrong}")
        return self._advance(self._actions.apply(actions, self.fleet, self._simulator))

    def step_to(self, replicas: IntArray) -> Transition:
        """A step with [B] replicas in all from now on, within the bounds; the configuration stays."""
        wished = self._simulator.bounded(np.asarray(replicas).astype(np.int64))
        return self._advance(self._simulator.scale(self.fleet, wished))

    def actions_for(self, replicas: IntArray) -> IntArray:
        """[B] the actions that come nearest to so many replicas, and leave the configuration; of two the one
        with more."""
        return self._actions.nearest(np.asarray(replicas), self.fleet, self._simulator)

    def replicas_after(self, actions: IntArray) -> IntArray:
        """[B] replicas in all that these actions would lead to; nothing is changed."""
        return self._actions.apply(np.asarray(actions), self.fleet, self._simulator).replicas

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows, with the same load to come: traces are shared."""
        fork = copy.copy(self)
        fork._rows, fork._means = self._rows[rows], self._means[:, rows]
        fork.fleet, fork.outcome = rows_of(self.fleet, rows), rows_of(self.outcome, rows)
        fork._state = {name: value[rows] for name, value in self._state.items()}
        return fork

    def action_mask(self) -> BoolArray:
        """[B, num_actions] False where an action would pass a bound of replicas or of a setting."""
        return self._actions.mask(self.fleet, self._simulator)

    # -------------------------------------------------------------------------------------- for rules

    def observed(self, history: int = 1) -> Observed:
        """Information for a rule, with the arrivals of the last `history` steps, or of all there were."""
        fleet, outcome = self.fleet, self.outcome
        begin = max(self._time + 1 - history, 0)
        ready, starting = fleet.ready.sum(axis=0), fleet.starting.sum(axis=1)
        possible = fleet.ready * self._simulator.capacity(fleet)
        return Observed(
            step=self._time,
            arrival_rates=self._traces[begin : self._time + 1, self._rows],
            ready=ready,
            starting=starting.sum(axis=0),
            utilization=self._utilization(),
            late_share=outcome.late_share,
            dropped_share=outcome.dropped_share,
            backlog=outcome.queued.sum(axis=0),
            p99_seconds=outcome.p99,
            cost_per_hour=outcome.cost_per_hour,
            replica_capacity=possible.sum(axis=0) / np.maximum(ready, 1),
            cluster=self.cluster,
        )

    def rates_to_come(self, steps: int) -> Array:
        """[at most `steps`, B] requests per second of the next steps: for clairvoyant bounds alone."""
        return self._traces[self._time + 1 : self._time + 1 + steps, self._rows]

    def document_state(self, row: int) -> dict[str, float]:
        """The row's last step as `InfrastructureRewardFunction` reads it."""
        return {name: float(values[row]) for name, values in self._state.items()}

    # -------------------------------------------------------------------------------------- a step

    def _advance(self, fleet: Fleet) -> Transition:
        if self._time >= self.spec.horizon:
            raise ConfigurationError(f"the episode is over after {self.spec.horizon} steps: call reset")
        self._time += 1
        rates = self._rates()
        self.fleet, self.outcome = self._simulator.serve(fleet, rates)
        newest = np.log(np.maximum(rates, _LEAST))
        self._means = newest + _PACES * (self._means - newest)
        before, self._state = self._state, self._document_state(rates)
        document, parts = self._document.compute_reward(self._state, before)
        cost, late = self.money.parts(
            self.outcome.cost_per_hour, self._ideal[self._rows], self.outcome.late_share
        )
        components = {"money": cost + late, "money_cost": cost, "money_late": late, "document": document}
        components |= {f"document_{name}": part for name, part in parts.items()}
        return Transition(
            observations=self._observations(rates),
            rewards=components["money"] if self._is_money else document,
            terminated=np.zeros(len(rates), dtype=np.bool_),
            truncated=np.full(len(rates), self._time >= self.spec.horizon),
            components=components,
        )

    def _rates(self) -> Array:
        rates: Array = self._traces[self._time].take(self._rows)
        return rates

    def _ideal_cost(self, rates: Array) -> Array:
        replicas = rates / (self.money.ideal_utilization * self.cluster.replica_capacity)
        return replicas * self.cluster.price_per_replica_hour

    def _utilization(self) -> Array:
        possible = self.outcome.capacity.sum(axis=0) * self.cluster.step_seconds
        busy: Array = np.minimum(self.outcome.served.sum(axis=0) / np.maximum(possible, _LEAST), 1.0)
        return busy

    def _document_state(self, rates: Array) -> Mapping[str, Array]:
        """The state that the document's reward reads, [B] each. A request that is served counts as
        available."""
        outcome, fleet, cluster = self.outcome, self.fleet, self.cluster
        failed = 100 * outcome.dropped_share
        slots = (
            np.array(cluster.batch_sizes)[fleet.batch] * np.array(cluster.concurrencies)[fleet.concurrency]
        )
        most = cluster.batch_sizes[-1] * cluster.concurrencies[-1]
        return {
            "cost_per_hour": outcome.cost_per_hour,
            "latency_p99_ms": 1000 * outcome.p99,
            "throughput_rps": outcome.served.sum(axis=0) / cluster.step_seconds,
            "target_throughput": rates,
            "error_rate_percent": failed,
            "availability_percent": 100 - failed,
            "cpu_percent": 100 * self._utilization(),
            "memory_percent": 100 * (_PROGRAM_MEMORY + (1 - _PROGRAM_MEMORY) * slots / most),
        }

    def _observations(self, rates: Array) -> FloatArray:
        fleet, outcome, cluster = self.fleet, self.outcome, self.cluster
        ready, replicas = fleet.ready.sum(axis=0), fleet.replicas
        capacity = self._simulator.capacity(fleet)
        possible = np.maximum((fleet.ready * capacity).sum(axis=0), _LEAST)
        each = np.maximum(possible / np.maximum(ready, 1), _LEAST)
        newest = np.log(np.maximum(rates, _LEAST))
        starting = fleet.starting.sum(axis=1)
        left = np.arange(1, len(starting) + 1)[:, None] / max(len(starting), 1)
        timeouts = np.array(cluster.timeouts)[fleet.timeout]
        features = [
            np.clip(newest - np.log(possible), -4, 4),
            np.clip(newest - np.log(replicas * each), -4, 4),
            *np.clip(newest - self._means, -3, 3),
            starting.sum(axis=0) / replicas,
            (starting * left).sum(axis=0) / replicas,
            outcome.late_share,
            outcome.dropped_share,
            np.minimum(outcome.queued.sum(axis=0) / possible / timeouts, 2.0),
            np.clip(np.log(outcome.p99 / cluster.sla_seconds), -3, 3),
            np.log(replicas) / 4,
            np.log(cluster.max_replicas / replicas) / 4,
        ]
        if self._actions.has_config:
            features += [
                fleet.batch / len(cluster.batch_sizes),
                fleet.timeout / len(cluster.timeouts),
                fleet.concurrency / len(cluster.concurrencies),
            ]
        if self._actions.has_traffic:
            canary = fleet.ready[1] * capacity[1] / possible
            features += [fleet.weight, fleet.weight - canary]
        return np.stack(features, axis=1).astype(np.float32)

    def _warn_of_units(self) -> None:
        most = self.cluster.max_replicas * self.cluster.replica_capacity
        peak = float(self._traces.max())
        if peak > _UNITS_WRONG * most and not self._has_warned:
            self._has_warned = True
            _log.warning(
                f"the load reaches {peak:,.0f} requests/s and max_replicas {self.cluster.max_replicas} can "
                f"answer {most:,.0f}: are the rates in requests per second?"
            )


_NUM_FEATURES, _CONFIG_FEATURES, _TRAFFIC_FEATURES = 13, 3, 2


class _Actions:
    """Translation of an action's number into a change of a fleet."""

    def __init__(self, space: InfrastructureActionSpace | None) -> None:
        self.has_config = space is not None
        self.has_traffic = space is not None and None not in space.traffic_weights
        self._moves = np.array(REPLICA_FACTORS)
        settings: Sequence[ConfigAction] = (ConfigAction.NO_CHANGE,)
        weights: Sequence[int | None] = (None,)
        if space is not None:
            settings, weights = space.config_actions, space.traffic_weights
            if ScalingAction.MAINTAIN not in space.scaling_actions or ConfigAction.NO_CHANGE not in settings:
                raise ConfigurationError(
                    "the action space must offer MAINTAIN and NO_CHANGE: else nothing is allowed at a bound"
                )
            self._moves = np.array([int(action) for action in space.scaling_actions])
        self._settings = np.array([int(action) for action in settings])
        self._weights = np.array([(weight or 0) / 100 for weight in weights])
        self.number = len(self._moves) * len(self._settings) * len(self._weights)
        self.num_features = (
            _NUM_FEATURES + _CONFIG_FEATURES * self.has_config + _TRAFFIC_FEATURES * self.has_traffic
        )
        # [3 settings, kinds of ConfigAction] levels by which each is moved
        self._shifts = np.zeros((3, len(ConfigAction)), dtype=np.int64)
        for setting in range(3):
            self._shifts[setting, 2 * setting : 2 * setting + 2] = (-1, 1)

    def apply(self, actions: IntArray, fleet: Fleet, simulator: Simulator) -> Fleet:
        """The fleet as it is from the beginning of the step."""
        rest, traffic = np.divmod(actions, len(self._weights))
        scaling, config = np.divmod(rest, len(self._settings))
        setting = self._settings[config]
        levels = [
            np.clip(level + shift[setting], 0, number - 1)
            for (level, number), shift in zip(self._levels(fleet, simulator), self._shifts, strict=True)
        ]
        fleet = replace(
            fleet,
            batch=levels[0],
            timeout=levels[1],
            concurrency=levels[2],
            weight=self._weights[traffic],
        )
        return simulator.scale(fleet, self._moved(fleet, simulator, self._moves[scaling]))

    def nearest(self, replicas: IntArray, fleet: Fleet, simulator: Simulator) -> IntArray:
        """[B] actions towards so many replicas."""
        backwards = self._moves[::-1, None]
        reached = self._moved(fleet, simulator, backwards)  # [moves, B], the largest first: it wins a tie
        is_vain = (reached == fleet.replicas) & (backwards != (0 if self.has_config else 1))  # at a bound
        distance = 2 * np.abs(reached - replicas) + is_vain
        chosen: IntArray = np.int64(len(self._moves) - 1) - distance.argmin(axis=0)
        idle = int(np.flatnonzero(self._settings == ConfigAction.NO_CHANGE)[0])
        traffic = np.abs(self._weights[:, None] - fleet.weight).argmin(axis=0)
        actions: IntArray = (chosen * len(self._settings) + idle) * len(self._weights) + traffic
        return actions

    def mask(self, fleet: Fleet, simulator: Simulator) -> BoolArray:
        """[B, number] what passes no bound."""
        replicas = fleet.replicas
        idle = 0 if self.has_config else 1
        least, most = (simulator.bounded(np.array(bound)) for bound in (0, np.iinfo(np.int64).max))
        sign = np.sign(self._moves - idle)
        scaling: BoolArray  # [B, moves]
        scaling = (sign == 0) | np.where(sign < 0, replicas[:, None] > least, replicas[:, None] < most)
        setting = np.ones((len(replicas), len(ConfigAction)), dtype=np.bool_)
        for index, (level, number) in enumerate(self._levels(fleet, simulator)):
            setting[:, 2 * index] = level > 0
            setting[:, 2 * index + 1] = level < number - 1
        both = scaling[:, :, None] & setting[:, None, self._settings]
        return np.repeat(both.reshape(len(replicas), -1), len(self._weights), axis=1)

    def _moved(self, fleet: Fleet, simulator: Simulator, moves: NDArray[Any]) -> IntArray:
        """Replicas after moves, by factors or by counts; of a factor one replica at least."""
        replicas = fleet.replicas
        if self.has_config:
            return simulator.bounded(replicas + moves)
        scaled = np.rint(replicas * moves).astype(np.int64)
        moved = np.where(moves > 1, np.maximum(scaled, replicas + 1), np.minimum(scaled, replicas - 1))
        return simulator.bounded(np.where(moves == 1, replicas, moved))

    @staticmethod
    def _levels(fleet: Fleet, simulator: Simulator) -> tuple[tuple[IntArray, int], ...]:
        cluster = simulator.cluster
        return (
            (fleet.batch, len(cluster.batch_sizes)),
            (fleet.timeout, len(cluster.timeouts)),
            (fleet.concurrency, len(cluster.concurrencies)),
        )
