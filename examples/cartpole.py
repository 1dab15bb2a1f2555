"""A numeric policy learns CartPole in seconds; put another Gymnasium id in its place.

pip install "gymnasium>=1"
python examples/cartpole.py
"""

import asyncio

from stateset_agents.numeric.environments.gymnasium_batch import GymnasiumBatch
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer


async def main() -> None:
    """Measure, train, measure again, from the same twenty starts."""
    environment = GymnasiumBatch("CartPole-v1")
    config = ControlConfig(total_steps=40_000, steps_per_rollout=4096, learning_rate=5e-3)
    async with ControlTrainer(MlpPolicy(environment.spec), environment, config) as trainer:
        before = await trainer.evaluate(range(20))
        await trainer.train()
        after = await trainer.evaluate(range(20))
    print(f"return before {before.mean:.0f}, after {after.mean:.0f} of 500")


if __name__ == "__main__":
    asyncio.run(main())
