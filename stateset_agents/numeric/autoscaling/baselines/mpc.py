"""Model-predictive control: forecast the load from its past, plan, do the plan's first step, begin again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from stateset_agents.numeric.autoscaling.baselines.forecast import Forecast
from stateset_agents.numeric.autoscaling.baselines.planning import first_wish, worth
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mpc:
    """A `ReplicaRule`. It knows the cluster, the queue and the prices as they are, and the past alone."""

    forecast: Forecast
    caution: float = 1.0
    """By which the forecast's errors are multiplied: 0 believes it to the letter."""

    def __post_init__(self) -> None:
        if not self.caution >= 0:
            raise ConfigurationError(f"caution must not be negative, got {self.caution!r}")

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
        """With a forecast from the training workloads of `seeds`, for `start_ups` start-ups ahead.

        Raises ConfigurationError for fewer than 2: within one a replica that is started pays for nothing.
        """
        if start_ups < 2:
            raise ConfigurationError(f"start_ups must be at least 2, got {start_ups!r}")
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
                [found(rates) for found, rates in zip(worths, self.forecast(view.arrival_rates), strict=True)]
            )
            return first_wish(
                gains,
                1.0 / np.maximum(ideal, 1e-6),
                cluster.startup_steps,
                view.ready,
                np.diff(view.ready_by_step, axis=0),
            )

        return choose
