"""What a reply is paid: .1 for the format and 1 for the answer."""

from __future__ import annotations

from stateset_agents import RewardFunction
from stateset_agents.rewards import create_reasoning_reward


def reward(format: float = 0.1, answer: float = 1.0) -> RewardFunction:
    """The kind of answer is read from each problem: `answer` is compared, `tests` are run in a sandbox."""
    return create_reasoning_reward(format=format, answer=answer)
