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
from typing import Any

import numpy as np
import torch

from stateset_agents.deployment.guards import min_replicas_constraint
from stateset_agents.deployment.numeric import SafeGRPODeployment
from stateset_agents.deployment.sequential import PairedEvidence
from stateset_agents.numeric.autoscaling.baselines import Hpa, in_actions
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.replay import (
    RecordedLoad,
    ReplicaChanges,
    ScalingPolicy,
    replayed,
    scaling_state,
)
from stateset_agents.numeric.autoscaling.workload import GeneratedLoad, Workload
from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer

BASELINE = Hpa()
WINDOW = 120
"""Steps of a replayed window: half an hour."""
SETTINGS = {"gamma": 0.95, "learning_rate": 2e-3, "minibatch_size": 4096}


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
