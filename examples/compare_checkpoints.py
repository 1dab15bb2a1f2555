"""Is the later checkpoint better? Two models on the same held-out scenarios, pair by pair.

    .venv/bin/python examples/compare_checkpoints.py                        # trains a few steps to have two
    .venv/bin/python examples/compare_checkpoints.py RUN/checkpoints/step-000050 RUN/checkpoints/step-000110

`stateset-agents compare` does the same for a YAML file's environment.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.evaluation.comparison import compare
from stateset_agents.evaluation.evaluator import Evaluation, evaluate
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

DESK, REWARD = RetailDesk(), EnvironmentReward()


async def two_checkpoints(steps: int) -> list[Path]:
    """An early and a late one of a short run."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    config = TrainingConfig(max_steps=steps, save_steps=max(1, steps // 2), run_name="compare")
    async with MultiTurnGRPOTrainer(agent, DESK, REWARD, config) as trainer:
        await trainer.train()
        return sorted(trainer.run.checkpoints.glob("step-*"))


async def measured(checkpoint: Path, episodes: int) -> Evaluation:
    """The model of a checkpoint on the first test scenarios; the same seed meets the same callers."""
    async with await MultiTurnAgent.from_pretrained(checkpoint / "model", max_new_tokens=48) as agent:
        return await evaluate(agent, DESK, REWARD, DESK.scenarios("test")[:episodes], seed=0)


async def main(checkpoints: list[Path], steps: int, episodes: int) -> None:
    """Measure both, then pair them by scenario."""
    early, late = checkpoints or await two_checkpoints(steps)
    result = compare(await measured(early, episodes), await measured(late, episodes))
    assert result.success is not None  # the desk always has a verdict
    success, (low, high) = result.success, result.success.interval
    print(f"{early.name}: {success.a:.1%}   {late.name}: {success.b:.1%}")
    print(f"difference {success.difference:+.1%} [{low:+.1%}, {high:+.1%}], p = {success.p_value:.3g}")
    print(f"{success.wins} won, {success.losses} lost, {success.ties} tied of {success.n}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoints", nargs="*", type=Path, help="two of them")
    parser.add_argument("--steps", type=int, default=10, help="of the run that is made without them")
    parser.add_argument("--episodes", type=int, default=120, help="held-out scenarios")
    asyncio.run(main(**vars(parser.parse_args())))
