"""From scored groups to samples: who trains, with what advantage, and who moves no baseline."""

from __future__ import annotations

import pytest
from tiny_training import group_of

from stateset_agents.core.trajectory import TrajectoryGroup
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.credit import assign_credit

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
