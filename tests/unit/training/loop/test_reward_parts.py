"""Rewards put together from their parts by other weights."""

from __future__ import annotations

import logging

import pytest
from tiny_training import talk

from stateset_agents.core.reward import CompositeReward, RewardResult, reward_function
from stateset_agents.training.components import check_reward, make_reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.plan import Curriculum, weighted, weighted_score
from stateset_agents.training.loop.curriculum.state import CurriculumState
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import TrajectoryGroup

BY_PARTS = {"multi_objective_aggregation": "normalize_then_sum"}


def group_with(*breakdowns, rewards=None):
    """A group of one-turn, one-token conversations with these breakdowns, each scored 1 unless given."""
    scores = rewards if rewards is not None else [1.0] * len(breakdowns)
    members = [
        talk(([9], [1]), reward=reward, breakdown=parts, member=member, turn_rewards=(0.5,) if reward else ())
        for member, (parts, reward) in enumerate(zip(breakdowns, scores, strict=True))
    ]
    return TrajectoryGroup(key="g", trajectories=tuple(members))


@reward_function(name="format", local=True)
async def in_form(trajectory):
    return 1.0


@reward_function(name="answer", local=True)
async def answered(trajectory):
    return 0.5


@reward_function(name="told", local=True)
async def told(trajectory):
    return RewardResult(score=0.6, breakdown={"format": 1.0, "answer": 0.5})


def test_a_group_is_weighed_anew_and_its_breakdown_stays():
    group = group_with({"format": 1.0, "answer": 0.0}, {"format": 0.0, "answer": 1.0})
    heavy = weighted(group, {"format": 0.5, "answer": 0.1})
    assert heavy.rewards == [0.5, 0.1]
    assert [member.breakdown for member in heavy.trajectories] == [m.breakdown for m in group.trajectories]
    assert [member.turn_rewards for member in heavy.trajectories] == [(), ()]
    assert heavy.reward_weights == {"format": 0.5, "answer": 0.1}


def test_without_weights_it_is_the_very_same_group():
    group = group_with({"format": 1.0})
    assert weighted(group, {}) is group


def test_the_others_share_the_weight_of_a_part_that_does_not_apply():
    weights = {"format": 0.25, "answer": 0.75}
    assert weighted_score({"format": 1.0, "answer": 0.0}, weights) == 0.25
    assert weighted_score({"format": 0.4}, weights) == pytest.approx(0.4)
    assert weighted_score({"other": 1.0}, weights) is None
    assert weighted_score({"answer": 1.0}, {"format": 1.0, "answer": 0.0}) is None


def test_an_unscored_member_stays_unscored():
    group = group_with({"format": 1.0}, {"format": 1.0}, rewards=[1.0, None])
    assert weighted(group, {"format": 2.0}).rewards == [2.0, None]


async def test_a_composite_s_own_weights_give_its_own_score():
    reward = CompositeReward([(in_form, 1.0), (answered, 3.0)])
    [result] = await reward.score_group([talk(([9], [1]))])
    assert reward.part_weights == {"format": 0.25, "answer": 0.75}
    assert weighted_score(result.breakdown, reward.part_weights) == pytest.approx(result.score)


def test_a_made_composite_says_of_what_it_is_made():
    spec = {"name": "composite", "terms": [{"name": "conciseness", "weight": 3}, "helpful"]}
    assert make_reward(spec).part_weights == {"conciseness": 0.75, "helpful": 0.25}
    assert make_reward({"name": "conciseness"}).part_weights == {}


# ------------------------------------------------------------------------------ credit


def test_credit_normalises_each_part_in_its_group_and_the_sum_over_the_step():
    """Two groups of two, as in test_decoupled.py: sums -1, 1, -2, 2 over their deviation 1.5811."""
    weights = {"format": 1.0, "answer": 1.0}
    groups = [
        weighted(group_with({"format": 0.0, "answer": 0.0}, {"format": 1.0, "answer": 0.0}), weights),
        weighted(group_with({"format": 0.0, "answer": 0.0}, {"format": 1.0, "answer": 1.0}), weights),
    ]
    credited = assign_credit(groups, TrainingConfig(**BY_PARTS))
    advantages = [sample.advantages[0] for sample in credited.samples]
    assert advantages == pytest.approx([-0.632456, 0.632456, -1.264911, 1.264911], abs=1e-6)
    assert credited.metrics["advantage/std"] == pytest.approx(0.790569, abs=1e-6)  # of -.5, .5, -1, 1
    summed = assign_credit(groups, TrainingConfig())
    assert [sample.advantages[0] for sample in summed.samples] == pytest.approx([-1, 1, -1, 1])


def test_credit_leaves_unscored_members_and_small_groups_out():
    group = group_with({"format": 1.0}, {"format": 0.0}, {"format": 0.0}, rewards=[1.0, 1.0, None])
    lone = group_with({"format": 1.0}, {"format": 1.0}, rewards=[1.0, None])
    weights = {"format": 1.0, "answer": 1.0}
    groups = [weighted(group, weights), weighted(lone, weights)]
    credited = assign_credit(groups, TrainingConfig(**BY_PARTS))
    assert [sample.advantages[0] for sample in credited.samples] == pytest.approx([1.0, -1.0])
    assert credited.num_dropped_groups == 1
    assert assign_credit(groups[1:], TrainingConfig(**BY_PARTS)).samples == []


def test_each_part_is_clipped():
    group = weighted(group_with({"a": 9.0, "b": 0.0}, {"a": 0.0, "b": 0.0}), {"a": 1.0, "b": 1.0})
    credited = assign_credit([group], TrainingConfig(reward_clip=1.0, **BY_PARTS))
    assert credited.metrics["advantage/std"] == pytest.approx(0.5)


def test_groups_that_say_nothing_of_their_weights_are_refused():
    with pytest.raises(ConfigurationError, match="these groups have no reward_weights in common: play them"):
        assign_credit([group_with({"a": 1.0}, {"a": 0.0})], TrainingConfig(**BY_PARTS))


# ------------------------------------------------------------------------------ what is refused


def test_a_reward_without_parts_is_refused_in_one_line():
    with pytest.raises(ConfigurationError) as refused:
        check_reward(answered, TrainingConfig(**BY_PARTS))
    assert str(refused.value) == (
        "multi_objective_aggregation normalize_then_sum needs a reward of several parts, and answer has none "
        "that it names: use a composite reward, or name parts of its breakdown in reward_weights"
    )
    check_reward(told, TrainingConfig(reward_weights={"format": 1.0, "answer": 1.0}, **BY_PARTS))
    check_reward(CompositeReward([(in_form, 1.0), (answered, 1.0)]), TrainingConfig(**BY_PARTS))


def test_a_weight_of_a_part_that_a_composite_has_not_is_refused():
    reward = CompositeReward([(in_form, 1.0), (answered, 1.0)])
    with pytest.raises(
        ConfigurationError, match=r"composite has no part 'fromat' \(did you mean 'format'\?\)"
    ):
        check_reward(reward, TrainingConfig(reward_weights={"fromat": 1.0}))
    check_reward(reward, TrainingConfig(reward_weights={"format/tags": 1.0, "answer": 1.0}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_weights": {"a": -1.0}}, "the weight of a must be at least 0, got -1.0"),
        ({"reward_weights": {"a": 0.0}}, "at least one part needs a weight above 0, got {'a': 0.0}"),
        ({"reward_weights": {}}, "at least one part needs a weight above 0, got {}"),
        (
            {"reward_weights": {"a": 1.0}, "advantage_estimator": "turn_group"},
            "asks what turns earned: use group",
        ),
        (
            {**BY_PARTS, "advantage_estimator": "turn_gae"},
            "goes with whole conversations, and advantage_estimator",
        ),
        ({**BY_PARTS, "advantage_normalization": "none"}, "divides each part by a deviation"),
        (
            {**BY_PARTS, "baseline_type": "global_mean"},
            "compares each part within its group, and baseline_type",
        ),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigurationError) as refused:
        TrainingConfig(**settings)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_parts_that_no_conversation_has_end_the_step_and_a_single_one_is_warned_of(caplog):
    config = TrainingConfig(reward_weights={"format": 1.0, "anwser": 1.0})
    curriculum = Curriculum([Scenario(id="s")], config, {})
    plan = curriculum.plan(0, CurriculumState())
    groups = [group_with({"format": 1.0, "answer": 0.0})]
    with caplog.at_level(logging.WARNING, logger="stateset_agents"):
        for _ in range(2):
            curriculum.put_together(groups, plan)
    assert caplog.text.count("no conversation's reward has the part 'anwser', which") == 1
    with pytest.raises(ConfigurationError, match="no part called format or anwser: it has no breakdown"):
        curriculum.put_together([group_with({}, {})], plan)
