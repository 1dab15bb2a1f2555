"""A policy against a rule on load that was measured: each window of it is played by both in the simulator.

A deployment in shadow executes the rule's actions, so it cannot see what the policy's would have earned. The
simulator can: both meet the same load from the same state, and the difference is due to their actions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.actions import ConfigAction
from stateset_agents.numeric.autoscaling.baselines import InReplicas, ReplicaRule, exactly
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.simulator import Cluster
from stateset_agents.numeric.environments.base import FloatArray
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule
from stateset_agents.numeric.policy import NumericPolicy, logits_of, sample_actions
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLoad:
    """A `Workload` of what was measured in every step; the episode of seed n is the n-th window, as it was.

    >>> RecordedLoad(np.arange(7.0)).draw(1, 3, 15.0).tolist()
    [2.0, 3.0, 4.0]
    """

    rates: NDArray[np.float64]  # [steps] requests per second

    def __post_init__(self) -> None:
        if self.rates.ndim != 1:
            raise ConfigurationError(f"a recorded load must be [steps], got the shape {self.rates.shape}")
        usable = np.isfinite(self.rates) & (self.rates >= 0)
        if not usable.all():
            step = int((~usable).argmax())
            raise ConfigurationError(
                f"a recorded load must be requests/second, 0 or more, got {self.rates[step]} in step {step}"
            )
        if not self.rates.any():
            raise ConfigurationError("a recorded load must have a request in some step, got 0 in all")

    @property
    def mean_rate(self) -> float:
        """Requests per second, over all of it."""
        return float(self.rates.mean())

    def num_windows(self, horizon: int) -> int:
        """Windows of so many steps; each begins with the last step of the one before."""
        return (len(self.rates) - 1) // horizon

    def draw(self, seed: int, num_steps: int, step_seconds: float) -> NDArray[np.float64]:
        """[num_steps] requests per second. Raises ConfigurationError for a window that is not there."""
        begin = seed * (num_steps - 1)
        if not 0 <= begin <= len(self.rates) - num_steps:
            raise ConfigurationError(
                f"the record has {len(self.rates)} steps and no window {seed} of {num_steps - 1}: record more"
            )
        return self.rates[begin : begin + num_steps]


class Replay(NamedTuple):
    """Mean rewards of a step that both earned in one window."""

    candidate: float
    baseline: float


def replayed(
    policy: NumericPolicy,
    rule: ReplicaRule,
    load: RecordedLoad,
    *,
    cluster: Cluster | None = None,
    horizon: int = 120,
) -> list[Replay]:
    """Each window of `horizon` steps by the policy's likeliest actions and by the rule. Blocking.

    Raises ConfigurationError for a record that is shorter than one window.
    """
    number = load.num_windows(horizon)
    if number < 1:
        raise ConfigurationError(
            f"the record has {len(load.rates)} steps, and a window {horizon}: record more"
        )
    environment = InfrastructureEnv(load, cluster, horizon=horizon)
    windows = range(number)
    candidate = evaluate(policy, environment, windows)
    baseline = evaluate_rule(exactly(rule), InReplicas(environment), windows)
    return [
        Replay(ours / horizon, theirs / horizon)
        for ours, theirs in zip(candidate.scored, baseline.scored, strict=True)
    ]


# --- one cluster, for `deployment.numeric.SafeGRPODeployment` ------------------------------------


_NAMES = {-1: "SCALE_DOWN_SMALL", 0: "MAINTAIN", 1: "SCALE_UP_SMALL"}


class ReplicaChange(int):
    """Change of the number of replicas, with the name that a safe deployment looks for."""

    @property
    def name(self) -> str:
        return _NAMES.get(self, f"SCALE_BY_{int(self)}")


class ReplicaChanges:
    """Replicas more or less by any number up to `most`: the action space of policies and rules that think in
    replicas.

    >>> ReplicaChanges(60).decode_action(62)["scaling"]
    2
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.scaling_actions = tuple(ReplicaChange(change) for change in range(-most, most + 1))
        self.config_actions = (ConfigAction.NO_CHANGE,)

    def action(self, change: int) -> dict[str, Any]:
        """The action that adds so many replicas."""
        return {"scaling": ReplicaChange(change), "config": ConfigAction.NO_CHANGE}

    def encode_action(self, scaling: int, config: ConfigAction) -> int:
        """Raises ConfigurationError for more than `most`, and for another configuration."""
        change = int(scaling)
        if abs(change) > self.most or config != ConfigAction.NO_CHANGE:
            raise ConfigurationError(
                f"an action must change {self.most} replicas at most, nothing else, got {change}, {config!r}"
            )
        return change + self.most

    def decode_action(self, action_idx: int) -> dict[str, Any]:
        """The action of an index from 0 to 2 `most`."""
        expect_that(0 <= action_idx <= 2 * self.most, "an action", f"be 0 to {2 * self.most}", action_idx)
        return self.action(action_idx - self.most)


def scaling_state(environment: InfrastructureEnv, observations: FloatArray) -> dict[str, Any]:
    """The state of a single cluster that constraints and a `ScalingPolicy` read."""
    return {"replicas": int(environment.observed().replicas[0]), "observations": observations}


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """A trained policy's likeliest action in a single cluster, as a change of replicas."""

    policy: NumericPolicy
    environment: InfrastructureEnv

    def __call__(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state`: of `scaling_state`."""
        logits = logits_of(self.policy, 1)(state["observations"])
        actions, _ = sample_actions(logits, self.environment.action_mask(), None)
        after = int(self.environment.replicas_after(actions)[0])
        return ReplicaChanges(self.environment.cluster.max_replicas).action(after - state["replicas"])
