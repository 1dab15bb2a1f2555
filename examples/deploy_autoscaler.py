"""A trained policy takes a cluster over from Kubernetes' autoscaler by itself; half a minute of one core.

Shadow: the autoscaler scales, what the policy would do is checked, and both are replayed on recorded load
in the simulator. Where the policy earns no less, it gets a tenth of the actions, and a tenth more after each
hour without a violation. A policy with the opposite logits is kept in shadow.

python examples/deploy_autoscaler.py
python examples/deploy_autoscaler.py --steps 2600000  # a whole training
"""

import argparse
import asyncio
import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stateset_agents.deployment.guards import min_replicas_constraint
from stateset_agents.deployment.numeric import SafeGRPODeployment
from stateset_agents.deployment.sequential import PairedEvidence
from stateset_agents.numeric.autoscaling.actions import ConfigAction
from stateset_agents.numeric.autoscaling.baselines import Hpa, InReplicas, ReplicaRule, exactly, in_actions
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.simulator import Cluster
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad, Workload
from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.environments.base import FloatArray
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule
from stateset_agents.numeric.policy import MlpPolicy, NumericPolicy, logits_of, sample_actions
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

BASELINE = Hpa()
WINDOW = 120
"""Steps of a replayed window: half an hour."""
SETTINGS = {"gamma": 0.95, "learning_rate": 2e-3, "minibatch_size": 4096}


# --- a policy against a rule on load that was measured -------------------------------------------
#
# A deployment in shadow executes the rule's actions, so it cannot see what the policy's would have earned.
# The simulator can: both meet the same load from the same state, and the difference is due to their actions
# alone.


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


# --- one cluster, whose actions are changes of replicas ------------------------------------------


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


# --- training and deployment ---------------------------------------------------------------------


def at_most_doubled(state: dict[str, Any], action: dict[str, Any]) -> bool:
    """No action halves or doubles by more than that."""
    after = state["replicas"] + int(action["scaling"])
    return bool(state["replicas"] <= 2 * after and after <= 2 * state["replicas"])


async def trained(steps: int, workload: Workload | None = None, *, passes: int = 20) -> MlpPolicy:
    """A policy that begins as the autoscaler and is trained on this load."""
    environment = InfrastructureEnv(workload)
    policy = MlpPolicy(environment.spec)
    clone(policy, in_actions(Hpa(target=0.6, window_seconds=0.0)), environment, num_passes=passes)
    config = ControlConfig(**SETTINGS, total_steps=steps, progress=False, save_steps=0)
    async with ControlTrainer(policy, environment, config) as trainer:
        await trainer.train()
    return policy


def ruined(policy: MlpPolicy) -> MlpPolicy:
    """The same network with the opposite logits: it takes what the trained one likes least."""
    copied = copy.deepcopy(policy)
    last = copied.actor[-1]
    with torch.no_grad():
        for weight in last.parameters():
            weight.neg_()
    return copied


def recorded(workload: Workload, windows: int, seed: int = 10**6) -> RecordedLoad:
    """So many half hours of a workload, as a monitoring system would have kept them."""
    parts = [workload.draw(seed + number, WINDOW, 15.0) for number in range(windows)]
    return RecordedLoad(np.concatenate([*parts, parts[-1][-1:]]))


@dataclass
class Scaled:
    """One cluster that a deployment scales, with a clock of its own."""

    environment: InfrastructureEnv
    policy: MlpPolicy
    step_seconds: float = 15.0
    """Of the clock."""
    now: float = 1_000_000.0
    alerts: list[str] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    """Of every step whose action was taken: policy, alternative, fallback, maintain."""

    def __post_init__(self) -> None:
        self.deployment = SafeGRPODeployment(
            ScalingPolicy(self.policy, self.environment),
            ReplicaChanges(self.environment.cluster.max_replicas),
            {"replicas": min_replicas_constraint, "doubled": at_most_doubled},
            clock=lambda: self.now,
            salt="of the example",
            on_alert=lambda alert: self.alerts.append(alert.message),
            replays=PairedEvidence(),
        )

    def replay(self, load: RecordedLoad) -> int:
        """Report replays until they decide; gives how many it took."""
        played = replayed(self.policy, BASELINE, load, cluster=self.environment.cluster, horizon=WINDOW)
        for number, replay in enumerate(played, start=1):
            self.deployment.report_replay(replay.candidate, replay.baseline)
            evidence = self.deployment.replays
            if evidence is not None and (evidence.is_as_good or evidence.is_worse):
                return number
        return len(played)

    def scale(self, seed: int) -> list[tuple[str, float]]:
        """An episode of the cluster; gives the modes and shares that it went through."""
        environment, space = self.environment, ReplicaChanges(self.environment.cluster.max_replicas)
        observations = environment.reset([seed])
        autoscaler = BASELINE(environment)
        moves = [(self.deployment.mode, self.deployment.rollout_percentage)]
        for _ in range(environment.spec.horizon):
            state = scaling_state(environment, observations)
            fallback = space.action(int(autoscaler()[0]) - state["replicas"])
            action = self.deployment.get_action(state, fallback).executed
            self.executed.append(self.deployment.action_history[-1].source)
            after = np.array([state["replicas"] + int(action["scaling"])])
            observations = environment.step_to(after).observations
            self.now += self.step_seconds
            at = (self.deployment.mode, self.deployment.rollout_percentage)
            if at != moves[-1]:
                moves.append(at)
        return moves


async def main() -> None:
    """Train, replay, deploy; then the same with ruined weights."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=150_000)
    arguments.add_argument("--windows", type=int, default=300)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    policy = await trained(chosen.steps)
    load = recorded(GeneratedLoad(), chosen.windows)
    for name, candidate, hours in (("trained", policy, 12), ("ruined", ruined(policy), 2)):
        cluster = Scaled(InfrastructureEnv(horizon=hours * 240), candidate)
        number = cluster.replay(load)
        evidence = cluster.deployment.replays
        assert evidence is not None
        print(f"{name}: {evidence.mean:+.3f} a step against {BASELINE.name}, in {number} replays")
        moves = cluster.scale(seed=5)
        print(f"{name}: {' -> '.join(f'{mode} {share:.0%}' for mode, share in moves)}")
        unsafe = cluster.deployment.violations.total()
        print(f"{name}: {unsafe} unsafe actions; {'; '.join(cluster.alerts) or 'no alert'}")


if __name__ == "__main__":
    asyncio.run(main())
