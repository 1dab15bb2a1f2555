"""Does the document's network learn to scale a cluster? One GRPOTrainer against doing nothing.

    PYTHONPATH=. python scripts/infrastructure_network.py --steps 40000

The network is the document's in the small: two LSTM layers, attention and a transformer over a window.
Rewards are money. It prints the mean difference of returns from the same held-out workloads, policy less
MAINTAIN, with its 95 % interval, and CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

import torch
from torch import Tensor, nn

from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.grpo.config import GRPOConfig
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork
from stateset_agents.numeric.autoscaling.grpo.trainer import GRPOTrainer
from stateset_agents.numeric.evaluation import evaluate, paired_difference

SPACE = InfrastructureActionSpace(config_actions=[ConfigAction.NO_CHANGE], enable_traffic_actions=False)
MAINTAIN = SPACE.encode_action({"scaling": ScalingAction.MAINTAIN, "config": ConfigAction.NO_CHANGE})


class Always(nn.Module):
    """One action, whatever is observed."""

    def __init__(self, action: int) -> None:
        super().__init__()
        self.action = action

    def forward(self, observations: Tensor) -> Tensor:
        """[B, A] logits; the action is never forbidden."""
        return torch.eye(SPACE.total_actions)[self.action].expand(len(observations), -1) * 100


def environment(horizon: int) -> InfrastructureEnv:
    """Clusters whose replicas alone are moved, paid by money."""
    return InfrastructureEnv(actions=SPACE, horizon=horizon)


async def main() -> None:
    """Train once, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40_000, help="environment steps of the training")
    parser.add_argument("--horizon", type=int, default=120, help="steps of an episode, 15 s each")
    parser.add_argument("--window", type=int, default=8, help="steps that the network sees")
    parser.add_argument("--episodes", type=int, default=128, help="held-out workloads")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    cluster = environment(chosen.horizon)
    shape = cluster.spec.observation_shape
    assert isinstance(shape, tuple)
    network = GRPOPolicyNetwork(
        state_dim=32,
        hidden_dim=64,
        num_heads=4,
        num_layers=1,
        action_space=SPACE,
        num_metrics=shape[0],
        history_length=chosen.window,
        seed=chosen.seed,
    )
    config = GRPOConfig(
        seed=chosen.seed,
        total_steps=chosen.steps,
        num_groups=4,
        num_iterations=2,
        minibatch_size=960,
        learning_rate=2e-3,
        gamma=0.95,
        beta=0.0,
        advantage_estimator="step_group",  # the document's whole returns say little of a step
        advantage_normalization="batch",
        eval_steps=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(network, config.model_copy(update={"output_dir": folder}), SPACE, device="cpu")
        started = time.process_time()
        await trainer.train(cluster)
        spent = time.process_time() - started
    for update in list(trainer.metrics_history)[:: max(1, len(trainer.metrics_history) // 8)]:
        print(
            f"step {update['step']:>8,.0f}  return {update['mean_reward']:8.2f}  "
            f"entropy {update['entropy']:.2f}"
        )
    started = time.process_time()
    learned = await trainer.evaluate(environment(chosen.horizon), chosen.episodes)
    idle = evaluate(Always(MAINTAIN), environment(chosen.horizon), learned.seeds)
    mean, interval = paired_difference(learned, idle)
    assert interval is not None
    print(
        f"{len(learned.seeds)} held-out workloads of {chosen.horizon} steps, return per step: policy "
        f"{learned.mean / chosen.horizon:.3f}, MAINTAIN {idle.mean / chosen.horizon:.3f}, difference "
        f"{mean / chosen.horizon:+.3f} [{interval[0] / chosen.horizon:+.3f}, "
        f"{interval[1] / chosen.horizon:+.3f}]"
    )
    print(
        f"{trainer.training.step_number:,} steps in {spent:.1f} CPU s of training, "
        f"{time.process_time() - started:.1f} CPU s of comparing"
    )


if __name__ == "__main__":
    asyncio.run(main())
