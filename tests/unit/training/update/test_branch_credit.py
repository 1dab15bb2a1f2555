"""From groups with branches to samples: only members train, on what the other ways on say of their turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_training import talk

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Branch, Trajectory, TrajectoryGroup

CONFIG = TrainingConfig(advantage_estimator="branch")


def played(member: int, *rewards: float, tokens: int = 1) -> Trajectory:
    """As many turns as rewards, the first of two tokens, each turn's reward its own."""
    turns = [([9], [member + 1] * (2 if turn == 0 else tokens)) for turn in range(len(rewards))]
    return talk(*turns, member=member, reward=sum(rewards), turn_rewards=tuple(rewards))


def branch(member: int, turn: int, *rewards: float) -> Branch:
    return Branch(turn=turn, trajectory=played(member, *rewards))


GROUP = TrajectoryGroup(
    key="g",
    trajectories=(played(0, 1.0, 1.0), played(1, 0.0), talk(([9], [1]), member=2)),
    branches=(branch(0, 1, 1.0, 0.0), branch(0, 1, 1.0, 2.0, 3.0)),
)
"""Returns from the first member's second turn on: 1 its own, 0 and 5 the branches'."""


def test_a_turn_s_credit_stands_on_its_tokens_and_no_branch_trains():
    credited = assign_credit([GROUP], CONFIG)
    assert [sample.trajectory for sample in credited.samples] == list(GROUP.trajectories[:2])
    first, second, unscored = credited.advantages[0]
    assert first == pytest.approx((3.0, 3.0, 1 - 2.5))  # 1 + mean(1, 0, 5), against a sibling with 0
    assert second == (0 - 3.0,) * 2
    assert unscored is None


def test_gamma_and_the_clip_reach_the_branches():
    credited = assign_credit([GROUP], CONFIG.model_copy(update={"gamma": 0.5, "reward_clip": 2.5}))
    # the second branch is worth 2 + .5 * min(3, 2.5) = 3.25
    assert credited.advantages[0][0] == pytest.approx((1 + 0.5 * 4.25 / 3,) * 2 + (1 - 3.25 / 2,))


def test_a_branch_without_a_reward_is_no_sample():
    lost = Branch(turn=1, trajectory=replace(played(0, 1.0, 9.0), reward=None, turn_rewards=()))
    one = replace(GROUP, branches=(*GROUP.branches, lost))
    assert assign_credit([one], CONFIG).advantages == assign_credit([GROUP], CONFIG).advantages


def test_members_are_found_by_their_number_whatever_stands_before_them():
    moved = replace(GROUP, trajectories=GROUP.trajectories[::-1])
    assert assign_credit([moved], CONFIG).advantages[0] == assign_credit([GROUP], CONFIG).advantages[0][::-1]


def test_without_branches_it_is_the_per_turn_credit_of_the_group():
    plain = replace(GROUP, branches=())
    per_turn = assign_credit([plain], TrainingConfig(advantage_estimator="turn_group"))
    assert assign_credit([plain], CONFIG).advantages == per_turn.advantages


@pytest.mark.parametrize("name", ESTIMATORS)
def test_branches_are_played_for_the_estimator_that_reads_them_alone(name):
    assert TrainingConfig(advantage_estimator=name).branches_per_turn == (2 if name == "branch" else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"advantage_estimator": "turn_group", "num_branches": 3},
            "turn_group plays no branches: leave num_br",
        ),
        ({"advantage_estimator": "branch", "num_branches": 0}, "num_branches.*greater than or equal to 1"),
        (
            {"advantage_estimator": "branch", "advantage_normalization": "batch"},
            "batch does not go with .*branch",
        ),
        (
            {"advantage_estimator": "branch", "baseline_type": "group_median"},
            "branch has a baseline of its own",
        ),
    ],
)
def test_settings_that_mean_nothing_with_it_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        TrainingConfig(**settings)
