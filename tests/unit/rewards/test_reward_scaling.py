"""Bounded and normalised rewards."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from builders import trajectory
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.core.reward import CompositeReward, EnvironmentReward, reward_function
from stateset_agents.core.scoring.base import RewardFunction, RewardResult
from stateset_agents.rewards.composites import (
    NormalizedReward,
    RunningMoments,
    ScaledReward,
    apply_reward_scaling,
)
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Outcome, Trajectory

REWARDS = [-30.0, -1.0, 0.0, 5.0, 30.0]


def test_rewards_are_bent_cut_or_left():
    assert apply_reward_scaling(REWARDS, "clip", 10.0) == [-10.0, -1.0, 0.0, 5.0, 10.0]
    assert apply_reward_scaling(REWARDS, "none", 10.0) == REWARDS
    bent = apply_reward_scaling(REWARDS)
    assert bent == pytest.approx([-9.950548, -0.996680, 0.0, 4.621172, 9.950548], abs=1e-6)


def test_another_scaling_or_bound_is_refused():
    with pytest.raises(ValueError, match="reward_scaling must be one of tanh, clip, none, got 'log'"):
        apply_reward_scaling(REWARDS, "log")  # type: ignore[arg-type]  # the mistake under test
    for bound in (0, -1.0, math.nan, math.inf, True, "10"):
        with pytest.raises(ConfigurationError, match="reward_clip_value must be positive"):
            ScaledReward(EnvironmentReward(), "clip", bound)  # type: ignore[arg-type]  # the mistake under test


async def test_a_scaled_reward_keeps_what_it_was_in_its_breakdown():
    talk = trajectory("Hi", "a", turn_rewards=[20.0], outcome=Outcome(reward=None))
    clipped = await ScaledReward(EnvironmentReward(), "clip").score(talk)
    assert clipped == RewardResult(score=10.0, breakdown={"environment": 20.0})
    left = await ScaledReward(EnvironmentReward(), "none").score(talk)
    assert left == RewardResult(score=20.0, breakdown={"environment": 20.0}, turn_rewards=(20.0,))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_running_statistics_are_those_of_all_values(values: list[float]):
    running = RunningMoments()
    for value in values:
        running = running.with_value(value)
    assert running.mean == pytest.approx(fmean(values), abs=1e-9)
    assert running.std == pytest.approx(pstdev(values), abs=1e-6)


@reward_function
def stars(trajectory: Trajectory) -> float | None:
    return [10.0, 30.0, None][trajectory.member]


def members(number: int) -> list[Trajectory]:
    return [trajectory("Hi", "Hello.", member=member) for member in range(number)]


async def given_by(reward: RewardFunction, number: int) -> list[RewardResult]:
    results = await reward.score_group(members(number))
    return [result for result in results if isinstance(result, RewardResult)]


async def test_scores_pass_as_they_are_until_a_step_is_observed_then_by_its_statistics():
    reward = NormalizedReward(stars)
    before = await given_by(reward, 3)
    assert [result.score for result in before] == [10.0, 30.0, None]
    reward.observe(before)
    assert (reward.running.count, reward.running.mean, reward.running.std) == (2, 20.0, 10.0)
    after = await given_by(reward, 3)
    assert [result.score for result in after] == [-1.0, 1.0, None]
    assert [dict(result.breakdown) for result in after] == [{"stars": 10.0}, {"stars": 30.0}, {}]


async def test_scoring_alone_moves_no_statistics_so_members_of_a_step_are_comparable():
    reward = NormalizedReward(stars)
    reward.observe(await given_by(reward, 3))
    state = reward.state()
    once = await given_by(reward, 2)
    assert [result.score for result in await given_by(reward, 2)] == [result.score for result in once]
    assert reward.state() == state


async def test_normalised_terms_of_a_composite_keep_their_own_statistics_and_their_state():
    @reward_function
    def seconds(trajectory):
        return 1000.0 * trajectory.member

    def make() -> CompositeReward:
        return CompositeReward([(NormalizedReward(stars), 1.0), (NormalizedReward(seconds), 1.0)])

    reward = make()
    reward.observe(await given_by(reward, 2))
    assert [result.score for result in await given_by(reward, 2)] == [-1.0, 1.0]
    assert reward.state() == {
        "normalized stars": {"running": {"count": 2, "mean": 20.0, "squares": 200.0}},
        "normalized seconds": {"running": {"count": 2, "mean": 500.0, "squares": 500000.0}},
    }
    other = make()
    other.restore(reward.state())
    assert other.state() == reward.state()
    assert CompositeReward([(stars, 1.0)]).state() == {}


async def test_turn_rewards_are_divided_by_the_same_deviation():
    reward = NormalizedReward(EnvironmentReward())
    reward.running = RunningMoments(2, 1.0, 8.0)
    talk = trajectory("Hi", "a", "b", "c", turn_rewards=[1.0, None], outcome=Outcome(reward=4.0))
    assert await reward.score(talk) == RewardResult(
        score=2.0, breakdown={"environment": 5.0}, turn_rewards=(0.5, 0.0)
    )
