"""Negative controls."""

from __future__ import annotations

from builders import trajectory

from stateset_agents.core.reward import EnvironmentReward, reward_function
from stateset_agents.evaluation.controls import ShuffledReward
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory


@reward_function
def own_number(trajectory: Trajectory) -> float:
    return float(trajectory.member)


def group(size: int, seed: int) -> list[Trajectory]:
    return [Trajectory(scenario=Scenario(id="s"), member=member, seed=seed) for member in range(size)]


async def test_shuffled_rewards_are_the_same_numbers_in_another_order():
    results = await ShuffledReward(own_number).score_group(group(8, seed=1))
    scores = [result.score for result in results]
    assert sorted(scores) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert scores != sorted(scores)


async def test_each_group_is_dealt_its_own_order_and_always_the_same_one():
    reward = ShuffledReward(own_number)
    first, again, other = [
        [result.score for result in await reward.score_group(group(8, seed=seed))] for seed in (1, 1, 2)
    ]
    assert first == again
    assert first != other


async def test_members_of_different_lengths_are_all_scored_by_the_scores_alone():
    """What single turns earned stays behind: the conversation that gets the score has other turns."""
    talks = [
        trajectory(
            *["hi", "a"] * turns,
            turn_rewards=[0.1] * turns,
            outcome=Outcome(reward=float(turns)),
            member=turns,
        )
        for turns in (1, 2, 3, 4)
    ]
    own = [await EnvironmentReward().score(talk) for talk in talks]
    assert [len(result.turn_rewards) for result in own] == [1, 2, 3, 4]
    dealt = await ShuffledReward().score_group(talks)
    assert sorted(result.score for result in dealt) == sorted(result.score for result in own)
    assert [result.turn_rewards for result in dealt] == [(), (), (), ()]
