"""One policy, two tasks whose rewards are a hundred times apart: PPO drowns one, parts by task keep it.

python examples/multi_task.py [--steps 60000] [--seed 0]
"""

import argparse
import asyncio

from stateset_agents.numeric.environments.suites import mix
from stateset_agents.numeric.studies.partitioned import GRPO


async def scores(strategy: str, steps: int, seed: int) -> dict[str, float]:
    """Train, then each task's normalised return from held-out starts: 0 is random, 1 solved."""
    environment = mix({"cart_pole": 1.0, "acrobot": 0.01})
    grpo = GRPO(strategy, environment=environment, total_steps=steps, seed=seed, log_episodes=False)
    async with grpo:
        await grpo.train()
        found = await grpo.trainer.evaluate(range(40), deterministic=False)
    tasks = found.rollout.tasks
    earned = tasks.scores(found.rollout.returns)
    return {name: earned[tasks.ids == task].mean() for task, name in enumerate(tasks.names)}


async def main() -> None:
    """PPO's one mean and deviation for the batch, then one for each task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for strategy in ("none", "task"):
        found = await scores(strategy, args.steps, args.seed)
        words = ", ".join(f"{name} {score:.2f}" for name, score in found.items())
        print(f"group_strategy {strategy}: {words}")


if __name__ == "__main__":
    asyncio.run(main())
