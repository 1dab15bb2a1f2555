"""As many replicas in every step: what a deployment without an autoscaler does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stateset_agents.numeric.autoscaling.baselines.replicas import ReplicaRule
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import IntArray
from stateset_agents.types.errors import ConfigurationError


def static_replicas(number: int) -> ReplicaRule:
    """Always `number`, of which the cluster's bounds are applied."""
    if number < 1:
        raise ConfigurationError(f"number must be at least 1, got {number!r}")

    def begin(environment: InfrastructureEnv) -> Callable[[], IntArray]:
        wished = np.full(len(environment.observed().ready), number, dtype=np.int64)
        return lambda: wished

    return begin
