"""Your own rewards: a function, an async judge, one score per turn, and what they come to together.

    .venv/bin/python examples/custom_reward.py

No model is needed to try a reward: scripted agents hold the conversations here. Do this before you train:
what a reward pays, training finds.
"""

from __future__ import annotations

import asyncio

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import CompositeReward, create_customer_service_reward, reward_function
from stateset_agents.evaluation.evaluator import evaluate


@reward_function
def brief(replies) -> float:
    """1 for up to ten words a reply, down to 0 at thirty. It asks for what it wants to see by name."""
    longest = max(len(message.content.split()) for message in replies)
    return min(1.0, max(0.0, (30 - longest) / 20))


@reward_function(local=True)  # async ones count as remote: say so where they wait on nothing outside
async def judge(messages, context) -> float | None:
    """A stand-in for a judge behind a network: is a refund promised in the days that policy gives?"""
    await asyncio.sleep(0.01)
    if "days" not in context:
        return None  # not applicable: the other terms share its weight
    said = " ".join(message.content for message in messages if message.role == "assistant")
    return float(f"{context['days']} days" in said)


@reward_function(scope="turn")
def no_shouting(reply) -> float:
    """Called for every turn."""
    return float("!" not in reply.content)


REWARD = CompositeReward(
    [(create_customer_service_reward(), 0.6), (judge, 0.2), (brief, 0.1), (no_shouting, 0.1)]
)

AGENTS = {
    "helps": "I am sorry about that. Your refund of $40 arrives within 5 days.",
    "promises": "I am sorry about that. Your refund arrives soon.",
    "refuses": "I cannot help with that!",
    "stuffs": "refund $40 5 days sorry refund help order refund 5 days",
}


async def main() -> None:
    """What each scripted agent earns, term by term."""
    environment = ConversationEnvironment(
        [
            {
                "topic": "refund",
                "context": {"text": "My order K27 is late.", "expected_facts": ["$40", "5 days"], "days": 5},
            }
        ],
        max_turns=3,
    )
    for name, says in AGENTS.items():
        backend = ScriptedBackend(lambda request, says=says: says)
        async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
            result = await evaluate(agent, environment, REWARD, environment.scenarios("train"))
        [trajectory] = result.groups[0].trajectories
        terms = {name: value for name, value in trajectory.breakdown.items() if "/" not in name}
        print(f"{name:9} {trajectory.reward:.2f} ", {name: round(value, 2) for name, value in terms.items()})


if __name__ == "__main__":
    asyncio.run(main())
