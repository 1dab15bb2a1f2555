"""Rules that say how many replicas there shall be, played exactly or by the nearest actions.

The autoscaler of Kubernetes may double a deployment, an action space perhaps not: a rule is measured on
`InReplicas`, where it gets what it asks for, and cloned on the environment itself, by actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.environments.base import BoolArray, FloatArray, IntArray, Rule, Transition

ReplicaRule = Callable[[InfrastructureEnv], Callable[[], IntArray]]
"""A `Rule` whose numbers are replicas in all, [B]: called after a reset, what it gives is called before each
step."""


class InReplicas:
    """The same clusters; an action is the number of replicas in all, bounded by the cluster."""

    def __init__(self, environment: InfrastructureEnv) -> None:
        self.clusters = environment
        self.spec = replace(environment.spec, num_actions=environment.cluster.max_replicas + 1)

    def reset(self, seeds: Sequence[int]) -> FloatArray:
        """As the clusters'."""
        return self.clusters.reset(seeds)

    def step(self, actions: IntArray) -> Transition:
        """[B] replicas from now on."""
        return self.clusters.step_to(actions)

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows."""
        return type(self)(self.clusters.fork(rows))

    def action_mask(self) -> BoolArray | None:
        """Every number is allowed, and bounded."""
        return None


def exactly(rule: ReplicaRule) -> Rule:
    """For `InReplicas`: what the rule wishes, to the replica."""

    def begin(environment: InReplicas) -> Callable[[], IntArray]:
        return rule(environment.clusters)

    return begin


def in_actions(rule: ReplicaRule) -> Rule:
    """For `InfrastructureEnv`: the actions that come nearest."""

    def begin(environment: InfrastructureEnv) -> Callable[[], IntArray]:
        wish = rule(environment)
        return lambda: environment.actions_for(wish())

    return begin
