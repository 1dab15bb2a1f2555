"""Negative controls: what training does when the reward says nothing about the conversation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from stateset_agents.core.reward import EnvironmentReward, RewardFunction, RewardResult, score_trajectories
from stateset_agents.types.errors import RewardFailure
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory


class ShuffledReward(RewardFunction):
    """Another reward's scores, dealt out at random among the members of each group.

    They are of a conversation as a whole: what single turns earned would be another one's turns.
    Same numbers, same spread, no information: an agent trained on it must not get better. If it does,
    something other than the reward is teaching it. In a YAML file:
    `reward: stateset_agents.evaluation.controls:ShuffledReward`.
    """

    name = "shuffled"
    scope = "group"
    local = True

    def __init__(self, reward: RewardFunction | None = None, *, seed: int = 0) -> None:
        """`reward`: whose results are dealt out; the environment's own unless given."""
        self.reward = reward or EnvironmentReward()
        self.seed = seed

    async def score(self, trajectory: Trajectory) -> RewardResult:
        return await self.reward.score(trajectory)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
        results = list(await score_trajectories(self.reward, trajectories))
        key = (trajectories[0].scenario.id, trajectories[0].seed) if trajectories else ("", 0)
        random.Random(derive(self.seed, "shuffle", *key)).shuffle(results)
        return [
            result if isinstance(result, RewardFailure) else replace(result, turn_rewards=())
            for result in results
        ]
