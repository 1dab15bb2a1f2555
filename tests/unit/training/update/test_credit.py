"""From scored groups to samples: who trains, with what advantage, and who moves no baseline."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from tiny_training import group_of, talk

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS, ValueEstimate
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.trajectory import Status, TrajectoryGroup

PLAIN = TrainingConfig(advantage_normalization="none")


def advantages(credited):
    return [sample.advantages[0] for sample in credited.samples]


def test_a_trajectory_s_advantage_stands_on_each_of_its_agent_tokens():
    credited = assign_credit([group_of(1.0, 0.0, 0.5)], PLAIN)
    assert [sample.advantages for sample in credited.samples] == [(0.5,), (-0.5, -0.5), (0.0, 0.0, 0.0)]
    assert credited.advantages == [[(0.5,), (-0.5, -0.5), (0.0, 0.0, 0.0)]]


def test_the_default_divides_by_the_population_deviation():
    credited = assign_credit([group_of(1.0, 0.0, 0.5, 1.0)], TrainingConfig())
    assert advantages(credited) == pytest.approx([0.90453403, -1.50755672, -0.30151134, 0.90453403])


def test_unscored_members_train_nothing_and_move_no_baseline():
    credited = assign_credit([group_of(1.0, None, 0.0)], PLAIN)
    assert advantages(credited) == [0.5, -0.5]  # with the missing one as 0 it would be .67 and -.33
    assert credited.advantages[0][1] is None


def test_a_group_with_too_few_scored_members_is_left_out_whole():
    groups = [group_of(1.0, None, None), group_of(1.0, 0.0, None)]
    credited = assign_credit(groups, PLAIN)
    assert credited.num_dropped_groups == 1
    assert credited.advantages[0] == [None, None, None]
    assert advantages(credited) == [0.5, -0.5]
    larger = PLAIN.model_copy(update={"min_group_size": 3})
    assert assign_credit(groups, larger).samples == []


def test_a_global_mean_is_over_the_groups_that_train():
    config = TrainingConfig(advantage_normalization="none", baseline_type="global_mean")
    credited = assign_credit([group_of(1.0, 0.0), group_of(9.0, None), group_of(4.0, 3.0)], config)
    assert advantages(credited) == [-1.0, -2.0, 2.0, 1.0]  # around 2, the 9 not counted


def test_a_group_that_ties_gets_exactly_zero():
    assert advantages(assign_credit([group_of(0.3, 0.3, 0.3)], TrainingConfig())) == [0.0, 0.0, 0.0]


def test_rewards_are_clipped_before_they_are_compared():
    config = TrainingConfig(advantage_normalization="none", reward_clip=1.0)
    assert advantages(assign_credit([group_of(5.0, -5.0)], config)) == [1.0, -1.0]


def test_a_group_s_weight_reaches_its_samples():
    group = group_of(1.0, 0.0)
    heavy = TrajectoryGroup(key="g", trajectories=group.trajectories, weight=2.0)
    assert [sample.weight for sample in assign_credit([heavy], PLAIN).samples] == [2.0, 2.0]


# ------------------------------------------------------------------------------ per turn, and by a critic


def turns(*rewards, tokens=2, feedback=3, **fields):
    """A scored conversation whose turns earned these."""
    pairs = [([9] * feedback, [1] * tokens) for _ in rewards]
    own = {"reward": sum(rewards), "turn_rewards": tuple(map(float, rewards)), **fields}
    return talk(*pairs, **own)


def credited(estimator, *members, values=(), final=0.0, **settings):
    """Advantages per token of one group's members, and the whole result."""
    config = TrainingConfig(advantage_estimator=estimator, **{"advantage_normalization": "none", **settings})
    known = {(0, member): ValueEstimate(value, final) for member, value in enumerate(values)}
    result = assign_credit([TrajectoryGroup(key="g", trajectories=members)], config, known)
    return result.advantages[0], result


def test_a_turn_is_compared_with_the_siblings_still_talking_at_it():
    advantages, result = credited("turn_group", turns(1, 2), turns(0))
    assert advantages == [(3.0, 3.0, 2.0, 2.0), (-3.0, -3.0)]  # 3 - 0, 2 with nobody left; 0 - 3
    assert result.metrics["advantage/mean"] == pytest.approx(2 / 3)  # over the three turns
    assert result.returns == []


def test_a_rest_of_the_score_belongs_to_the_last_turn():
    member = talk(([9], [1]), ([9], [2]), reward=3.0, turn_rewards=(1.0, 0.0))
    advantages, _ = credited("turn_group", member, turns(0, 0, tokens=1))
    assert advantages[0] == (3.0, 2.0)
    assert credited("turn_group", member, turns(0, 0, tokens=1), gamma=0.5)[0][0] == (2.0, 2.0)


def test_per_turn_credit_leaves_unscored_members_out():
    advantages, _ = credited("turn_group", turns(1, 2), talk(([9], [1])), turns(0, 0))
    assert advantages == [(3.0, 3.0, 2.0, 2.0), None, (-3.0, -3.0, -2.0, -2.0)]


def test_gae_over_turns():
    advantages, result = credited("turn_gae", turns(0, 1), values=[(0.2, 0.4)])
    # delta_1 = 1 - .4 = .6; delta_0 = .4 - .2 = .2, plus .95 * .6
    assert advantages[0] == pytest.approx((0.77, 0.77, 0.6, 0.6))
    assert result.returns == [pytest.approx([0.97, 1.0])]
    assert result.metrics == pytest.approx({"advantage/mean": 0.685, "advantage/std": 0.085})


@pytest.mark.parametrize("feedback", [1, 2, 7])
def test_gae_over_tokens_steps_over_whatever_is_said_in_between(feedback):
    member = turns(0, 1, feedback=feedback)
    advantages, result = credited("token_gae", member, values=[(0.2, 0.3, 0.4, 0.6)])
    assert advantages[0] == pytest.approx((0.7185, 0.651, 0.58, 0.4), abs=1e-4)
    assert result.returns == [pytest.approx([0.9185, 0.951, 0.98, 1.0], abs=1e-4)]


def test_gamma_discounts_between_turns_and_not_between_tokens():
    advantages, _ = credited("token_gae", turns(0, 1), values=[(0.0,) * 4], gamma=0.5, gae_lambda=1.0)
    assert advantages[0] == pytest.approx((0.5, 0.5, 1.0, 1.0))


@pytest.mark.parametrize(
    ("status", "settings", "last"),
    [
        (Status.TERMINATED, {}, 1 - 0.4),
        (Status.TRUNCATED, {}, 1 + 0.5 - 0.4),
        (Status.TRUNCATED, {"bootstrap_truncated": False}, 1 - 0.4),
        (Status.TRUNCATED, {"gamma": 0.5}, 1 + 0.25 - 0.4),
    ],
)
@pytest.mark.parametrize("estimator", ["turn_gae", "token_gae"])
def test_only_a_conversation_cut_by_a_limit_is_worth_something_after_its_end(
    estimator, status, settings, last
):
    values = (0.2, 0.4) if estimator == "turn_gae" else (0.2, 0.3, 0.3, 0.4)
    advantages, _ = credited(estimator, turns(0, 1, status=status), values=[values], final=0.5, **settings)
    assert advantages[0][-1] == pytest.approx(last)


def test_a_lone_scored_member_trains_by_its_critic():
    advantages, result = credited("turn_gae", turns(1, tokens=1), talk(([9], [1])), values=[(0.25,)])
    assert advantages == [(0.75,), None]
    assert result.num_dropped_groups == 0
    assert credited("turn_group", turns(1), talk(([9], [1])))[1].samples == []


def test_gae_advantages_are_standardised_over_the_batch_s_turns_or_tokens():
    for estimator, values in (("turn_gae", (0.0, 0.0)), ("token_gae", (0.0,) * 4)):
        _, result = credited(
            estimator, turns(0, 1), turns(0, 3), values=[values] * 2, advantage_normalization="batch"
        )
        everything = [value for sample in result.samples for value in sample.advantages]
        assert fmean(everything) == pytest.approx(0.0)
        assert pstdev(everything) == pytest.approx(1.0)
        assert result.metrics["advantage/mean"] > 1  # as it was before


def test_the_hybrid_adds_the_outcome_against_the_group_to_gae_over_the_turns():
    good = talk(([9], [1]), ([9], [1]), reward=3.0, turn_rewards=(1.0, 0.0))  # outcome 2
    bad = talk(([9], [1]), ([9], [1]), reward=0.0, turn_rewards=(0.0, 0.0))
    advantages, result = credited("hybrid", good, bad, values=[(0.5, 0.5)] * 2)
    # outcomes 2 and 0 around 1; turns: delta_1 = -.5, delta_0 = 1 + .5 - .5 and .5 - .5, plus .95 * -.5
    assert advantages[0] == pytest.approx((1 + 1 - 0.475, 1 - 0.5))
    assert advantages[1] == pytest.approx((-1 + 0 - 0.475, -1 - 0.5))
    assert result.returns == [pytest.approx([1.025, 0.0]), pytest.approx([0.025, 0.0])]  # of turns alone


def test_with_per_turn_credit_each_turn_s_reward_is_clipped():
    member, still = turns(5, -5, tokens=1), turns(0, 0, tokens=1)
    assert credited("turn_group", member, still, reward_clip=1.0)[0][0] == (0.0, -1.0)
    values = [(0.0, 0.0)] * 2
    gae = credited("turn_gae", member, still, values=values, reward_clip=1.0, gae_lambda=1.0)[0]
    assert gae[0] == pytest.approx((0.0, -1.0))
    outcome = talk(([9], [1]), reward=7.0, turn_rewards=(0.0,))
    hybrid = credited("hybrid", outcome, turns(0, tokens=1), values=[(0.0,)] * 2, reward_clip=1.0)[0]
    assert hybrid == [(0.5,), (-0.5,)]


def test_every_estimator_gives_every_token_one_number():
    for name, estimator in ESTIMATORS.items():
        members = [turns(1, 0, tokens=3), talk(([9], [1]), ([9], [])), turns(0, 2, tokens=3)]
        count = 6 if estimator.critic == "token" else 2
        known = {(0, member): ValueEstimate((0.1,) * count, 0.0) for member in (0, 2)}
        config = TrainingConfig(advantage_estimator=name)
        result = assign_credit([TrajectoryGroup(key="g", trajectories=tuple(members))], config, known)
        assert [None if own is None else len(own) for own in result.advantages[0]] == [6, None, 6]
        assert len(result.returns) == (2 if estimator.critic else 0)


def test_a_turn_without_a_token_is_nobody_s_place_but_a_sibling_s_turn():
    silent = talk(([9], [1]), ([9], []), ([9], [1, 1]), reward=3.0, turn_rewards=(0.0, 1.0, 2.0))
    advantages, _ = credited("turn_group", silent, turns(0, 0, 0, tokens=1))
    assert advantages[0] == (3.0, 2.0, 2.0)
    by_critic, _ = credited("token_gae", silent, values=[(0.0, 0.0, 0.0)], gae_lambda=1.0)
    assert by_critic[0] == pytest.approx((3.0, 2.0, 2.0))


def test_an_advantage_clip_of_3_acts_in_a_group_of_12_and_in_none_of_10() -> None:
    def highest(size: int, **settings: float) -> float:
        credited = assign_credit([group_of(1.0, *[0.0] * (size - 1))], TrainingConfig(**settings))
        return max(abs(value) for sample in credited.samples for value in sample.advantages)

    assert highest(12) == pytest.approx(math.sqrt(11))
    assert highest(12, advantage_clip=3.0) == 3.0
    for size in range(2, 11):  # the furthest that anyone can be from its own mean
        assert (
            highest(size, advantage_clip=3.0)
            == pytest.approx(highest(size))
            == pytest.approx(math.sqrt(size - 1))
        )
    assert highest(12, advantage_clip=0.5) == 0.5
