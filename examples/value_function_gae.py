"""A critic: GAE over turns or tokens instead of a group's mean, with the critic's own figures.

    .venv/bin/python examples/value_function_gae.py --steps 10
    .venv/bin/python examples/value_function_gae.py --estimator token_gae --steps 10

The value head reads the policy's hidden states. At first it knows nothing and its explained variance is near
0 or below; it rises as the head learns what the conversations come to.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.runs.callbacks import Callback
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer


class ShowCritic(Callback):
    """One line per step."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the critic expected, how well that fitted, and how the agent did."""
        print(
            f"step {step:3}  success {metrics['success/rate']:5.1%}  "
            f"value mean {metrics['value/mean']:+.3f}  loss {metrics['loss/value']:.4f}  "
            f"explained variance {metrics['value/explained_variance']:+.2f}",
            flush=True,
        )


async def main(estimator: str, steps: int) -> None:
    """Train with the estimator."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    config = TrainingConfig(
        advantage_estimator=estimator,  # hybrid: the group judges the outcome, the critic the turns
        gae_lambda=0.95,
        max_steps=steps,
        run_name=estimator,
        progress=False,  # it shows other numbers
    )
    async with MultiTurnGRPOTrainer(
        agent, RetailDesk(), EnvironmentReward(), config, callbacks=[ShowCritic()]
    ) as trainer:
        await trainer.train()
        print("run folder:", trainer.run.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--estimator", default="turn_gae", choices=["turn_gae", "token_gae", "hybrid"])
    parser.add_argument("--steps", type=int, default=10)
    asyncio.run(main(**vars(parser.parse_args())))
