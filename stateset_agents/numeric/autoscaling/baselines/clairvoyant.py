"""The plan of one who knows every request to come: a bound that nobody reaches who does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stateset_agents.numeric.autoscaling.baselines.planning import whole_plan, worth
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import IntArray

_ROWS_AT_ONCE = 64


def clairvoyant(environment: InfrastructureEnv) -> Callable[[], IntArray]:
    """Begin an episode with its whole load: a `ReplicaRule`, optimal in the model of `planning`."""
    cluster, money = environment.cluster, environment.money
    view = environment.observed()
    rates = environment.rates_to_come(environment.spec.horizon)
    mean = (rates.sum(axis=0) + view.arrival_rates[-1]) / (len(rates) + 1)
    price = money.ideal_utilization * cluster.replica_capacity / np.maximum(mean, 1e-6)
    found = worth(cluster, money)
    plans = [
        whole_plan(found(rates[:, rows]), price[rows], cluster.startup_steps, view.ready[rows])
        for rows in np.array_split(np.arange(len(mean)), max(1, len(mean) // _ROWS_AT_ONCE))
    ]
    steps = iter(np.concatenate(plans, axis=1))
    return lambda: next(steps)
