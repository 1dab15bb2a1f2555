"""The whole path on the retail desk: measure, train, measure again, save, load, talk.

    .venv/bin/python examples/complete_grpo_training.py --steps 30

30 steps take about half a minute on two CPU cores; `make demo` runs 110 of them.
"""

from __future__ import annotations

import argparse
import asyncio

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.evaluation.evaluator import Evaluation
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.trainer import MultiTurnGRPOTrainer


def shown(result: Evaluation) -> str:
    """`16.0% [13.3%, 19.1%] of 600`"""
    low, high = result.interval
    return f"{result.success:.1%} [{low:.1%}, {high:.1%}] of {result.n}"


async def main(steps: int, episodes: int) -> None:
    """Train for `steps` steps, and measure on `episodes` held-out scenarios."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    environment = RetailDesk()
    # The profile gives what is not named here; the model's card (learning rate, batch) stands above it.
    config = TrainingConfig.from_profile(
        TrainingProfile.BALANCED, max_steps=steps, save_steps=10, run_name="complete"
    )
    async with MultiTurnGRPOTrainer(agent, environment, EnvironmentReward(), config) as trainer:
        print("before:", shown(await trainer.evaluate("test", episodes=episodes)))
        agent = await trainer.train()
        print("after: ", shown(await trainer.evaluate("test", episodes=episodes)))
        checkpoint = await trainer.save_checkpoint()
        saved = await agent.save_pretrained(trainer.run.path / "agent")
        print("checkpoint, to go on from:", checkpoint)

    async with await MultiTurnAgent.from_pretrained(saved, max_new_tokens=48, temperature=0) as again:
        scenario = environment.scenarios("test")[0]
        conversation = await environment.start(scenario, seed=0)
        print(f"\nuser:  {scenario.opening}")
        print(f"agent: {await again.generate_response(conversation.opening)}")
    print("\nrun folder:", trainer.run.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="optimiser steps (default 30)")
    parser.add_argument("--episodes", type=int, default=200, help="held-out scenarios (default 200)")
    asyncio.run(main(**vars(parser.parse_args())))
