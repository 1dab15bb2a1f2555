"""The smallest program: an agent, two scenarios, a reward, a few steps of GRPO.

Run it with `.venv/bin/python examples/quickstart.py`. The embedded model only knows the retail desk's few
words, so this shows the parts, not a great talker; `make demo` trains it on what it knows.
"""

from __future__ import annotations

import asyncio

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import create_customer_service_reward
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.trainer import MultiTurnGRPOTrainer


async def main() -> None:
    """Train for three steps, then talk."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=32))
    await agent.initialize()
    environment = ConversationEnvironment(
        scenarios=[
            {"topic": "refund", "context": "Order delayed"},
            {"topic": "shipping", "context": "Parcel not tracked for a week"},
        ],
        max_turns=6,
    )
    config = TrainingConfig.from_profile(
        TrainingProfile.BALANCED, max_steps=3, num_generations=8, run_name="quickstart"
    )
    trainer = MultiTurnGRPOTrainer(agent, environment, create_customer_service_reward(), config)
    await trainer.initialize()
    agent = await trainer.train()
    print(await agent.generate_response([{"role": "user", "content": "where is order K27"}]))
    print(f"run folder: {trainer.run.path}")
    await trainer.close()


if __name__ == "__main__":
    asyncio.run(main())
