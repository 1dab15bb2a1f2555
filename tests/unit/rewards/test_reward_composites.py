"""Products and gates: what they pay, what they refuse, whom they ask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from builders import trajectory

from stateset_agents.core.reward import CompositeReward, EnvironmentReward, RewardFunction, reward_function
from stateset_agents.core.scoring.base import RewardResult
from stateset_agents.rewards.composites import GatedReward, ProductReward
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.trajectory import Outcome, Trajectory

TALK = trajectory("Hi", "Hello.")


def giving(name: str, *values: float | None) -> RewardFunction:
    """Member m gets values[m]."""

    @reward_function(name=name)
    def give(trajectory: Trajectory) -> float | None:
        return values[trajectory.member]

    return give


def members(number: int) -> list[Trajectory]:
    return [trajectory("Hi", "Hello.", member=member) for member in range(number)]


def scores(results: Sequence[RewardResult | RewardFailure]) -> list[float | None]:
    return [result.score for result in results if isinstance(result, RewardResult)]


async def test_a_product_multiplies_powers_and_a_zero_takes_everything():
    reward = ProductReward([(giving("a", 0.5, 0.0, 1.0), 1.0), (giving("b", 0.5, 1.0, 0.25), 2.0)])
    results = await reward.score_group(members(3))
    assert scores(results) == [0.125, 0.0, 0.0625]
    assert results[0] == RewardResult(score=0.125, breakdown={"a": 0.5, "b": 0.5})


async def test_a_product_leaves_out_what_does_not_apply():
    reward = ProductReward([(giving("a", None, None), 1.0), (giving("b", 0.5, None), 1.0)])
    assert scores(await reward.score_group(members(2))) == [0.5, None]


async def test_a_product_and_a_gate_leave_unscored_what_is_not_between_0_and_1():
    low = giving("low", -0.5, 1.5)
    for reward in (ProductReward([(low, 1.0)]), GatedReward([(low, 1.0)], then=giving("b", 1, 1))):
        first, second = await reward.score_group(members(2))
        assert str(first) == (
            f"reward {reward.name}: low gave -0.5, which is not between 0 and 1: scale it first"
        )
        assert "low gave 1.5" in str(second)
        with pytest.raises(RewardFailure, match=r"low gave -0\.5"):
            await reward.score(TALK)


async def test_a_gate_is_worth_more_than_all_that_lies_behind_it():
    #                  fails at once  fails the first, just  passes one  passes both, worst and best
    right = giving("right", 0.0, 0.49, 0.5, 1.0, 1.0)
    safe = giving("safe", 1.0, 1.0, 0.99, 1.0, 1.0)
    brief = giving("brief", 1.0, 1.0, 1.0, 0.0, 1.0)
    reward = GatedReward([(right, 0.5), (safe, 1.0)], then=brief)
    paid = scores(await reward.score_group(members(5)))
    assert paid == pytest.approx([0.0, 0.49 / 3, 1.99 / 3, 2 / 3, 1.0])
    assert paid == sorted(paid)


async def test_later_rewards_are_asked_only_about_those_who_reached_them():
    asked: list[int] = []

    @reward_function
    async def judge(trajectory):
        asked.append(trajectory.member)
        return 0.5

    reward = GatedReward([(giving("right", 1.0, 0.0, 1.0, None), 1.0)], then=judge)
    results = await reward.score_group(members(4))
    assert sorted(asked) == [0, 2]
    assert scores(results) == [0.75, 0.0, 0.75, None]
    assert results[1] == RewardResult(score=0.0, breakdown={"right": 0.0})
    assert not reward.local


async def test_a_last_reward_that_does_not_apply_adds_nothing():
    reward = GatedReward([(giving("right", 1.0), 1.0)], then=giving("brief", None))
    assert scores(await reward.score_group(members(1))) == [0.5]


async def test_a_failing_gate_leaves_its_member_unscored_and_the_others_scored():
    @reward_function
    def fragile(trajectory):
        return 1.0 / trajectory.member

    first, second = await GatedReward([(fragile, 1.0)], then=lambda: 1.0).score_group(members(2))
    assert isinstance(first, RewardFailure)
    assert (second.score if isinstance(second, RewardResult) else None) == 1.0


async def test_all_of_a_product_or_gate_is_for_the_conversation_as_a_whole():
    talk = trajectory("Hi", "a", "b", "c", turn_rewards=[0.5, 0.5], outcome=Outcome(reward=None))
    for reward in (
        ProductReward([(EnvironmentReward(), 1.0)]),
        GatedReward([(EnvironmentReward(), 1.0)], then=lambda: 1.0),
    ):
        assert await reward.score(talk) == RewardResult(
            score=1.0, breakdown={"environment": 1.0} | ({"<lambda>": 1.0} if reward.name == "gated" else {})
        )


@pytest.mark.parametrize("number", [0, -1.0, math.nan, math.inf, True, "1"])
def test_weights_and_thresholds_that_cannot_work_are_refused(number: object):
    reward = giving("a", 1.0)
    with pytest.raises(ConfigurationError, match="the weight of reward 'a' must be positive"):
        ProductReward([(reward, number)])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ConfigurationError, match="the threshold of reward 'a' must be positive"):
        GatedReward([(reward, number)], then=reward)  # type: ignore[list-item]  # the mistake under test


def test_terms_that_cannot_work_are_refused():
    reward = giving("a", 1.0)
    with pytest.raises(ConfigurationError, match=r"threshold of reward 'a' must be at most 1, got 1\.5"):
        GatedReward([(reward, 1.5)], then=reward)
    with pytest.raises(ConfigurationError, match="'a' stands twice: name the gates"):
        GatedReward([(reward, 1.0)], then=giving("a", 0.0))
    with pytest.raises(ConfigurationError, match=r"at least one \(reward, threshold\)"):
        GatedReward([], then=reward)
    with pytest.raises(
        ConfigurationError, match=r"takes \(reward, weight\) pairs, got a alone: write \[\(a, 1\.0\)\]"
    ):
        CompositeReward([reward])  # type: ignore[list-item]  # the mistake under test


async def test_group_rewards_in_a_gate_see_those_who_reached_them():
    @reward_function(scope="group")
    def share(trajectories):
        return [1 / len(trajectories)] * len(trajectories)

    reward = GatedReward([(giving("right", 1.0, 0.0, 1.0), 1.0)], then=share)
    assert reward.scope == "group"
    assert scores(await reward.score_group(members(3))) == [0.75, 0.0, 0.75]
