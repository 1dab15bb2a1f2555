"""Which baseline, spread and averaging leaves the policy gradient what it is, by exact enumeration.

docs/evidence/expected-gradients.md has the figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from tiny_training import talk
from torch import Tensor

from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.layout import padded_layouts
from stateset_agents.training.update.batch import assign_credit, micro_batch
from stateset_agents.types.trajectory import TrajectoryGroup

STOP, LONG, BAD = 1, 2, 3
"""The first turn says one of them, equally likely: end with 1.0, talk on for 1.2, end with 0."""
REWARD = {STOP: 1.0, LONG: 1.2, BAD: 0.0}
TURNS = {STOP: 1, LONG: 6, BAD: 1}
FORCED = 5
"""What every later turn says; there is no choice in it."""


def conversation(choice: int, member: int):
    replies = [choice, *[FORCED] * (TURNS[choice] - 1)]
    turns = [((9,), (reply,)) for reply in replies]
    return talk(*turns, reward=REWARD[choice], turn_rewards=(0.0,) * len(turns), member=member)


def exact() -> Tensor:
    """[3] d J / d logits of a softmax at 0: p (R - V)."""
    rewards = torch.tensor(list(REWARD.values()))
    return (rewards - rewards.mean()) / 3


def expected_ascent(config: TrainingConfig) -> Tensor:
    """[3] minus the loss's gradient, the mean over all nine groups of two; they are equally likely."""
    logits = torch.zeros(3, requires_grad=True)
    for choices in itertools.product(REWARD, repeat=2):
        members = tuple(conversation(choice, member) for member, choice in enumerate(choices))
        samples = assign_credit([TrajectoryGroup(key="g", trajectories=members)], config).samples
        lengths: Sequence[int] = [sample.trajectory.num_agent_tokens for sample in samples]
        rows = [sample.trajectory.token_ids for sample in samples]
        (layout,) = padded_layouts(rows, max_rows=2, max_tokens=99)
        batch = micro_batch(samples, layout)
        choice = torch.log_softmax(logits, 0)
        logprobs = torch.stack(
            [choice[token - 1] if token in REWARD else torch.tensor(0.0) for token in batch.targets.tolist()]
        )
        loss = policy_loss(
            config.loss_type,
            LossInputs(
                logprobs,
                logprobs.detach(),
                batch.advantages,
                batch.trajectory_ids,
                Denominators.of(lengths, max_length=config.loss_length),
            ),
        ).loss
        (-loss / 9).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("estimator", ["turn_group", "branch"])
def test_with_the_loss_they_bring_the_gradient_is_exact(estimator):
    config = TrainingConfig(advantage_estimator=estimator, num_generations=2, loss_length=6)
    assert config.loss_type == "dr_grpo"
    torch.testing.assert_close(6 * expected_ascent(config), exact())  # .09, .16, -.24


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "ppo", "cispo", "reinforce"])
def test_a_mean_over_tokens_prefers_the_worse_of_two_good_replies_because_it_is_shorter(loss_type):
    config = TrainingConfig(advantage_estimator="turn_group", num_generations=2, loss_type=loss_type)
    stop, long, bad = expected_ascent(config).tolist()
    assert stop > 1.1 * long  # though it earns less
    assert bad < 0


# ------------------------------------------------------------------- averaging, without credit per turn


STOP_OVER_LONG = {
    **{"dr_grpo": 0.571, "grpo": 1.911, "gspo": 1.911},
    **dict.fromkeys(["dapo", "ppo", "cispo", "reinforce"], 2.357),
}


def unscaled(loss_type: str) -> TrainingConfig:
    return TrainingConfig(
        advantage_estimator="group",
        baseline_type="leave_one_out",
        advantage_normalization="none",
        num_generations=2,
        loss_type=loss_type,
        loss_length=6,
    )


@pytest.mark.parametrize("loss_type", STOP_OVER_LONG)
def test_only_a_constant_weighs_replies_of_any_length_by_what_they_earn(loss_type):
    """The true gradient raises the better, longer reply by .156 and the shorter one by .089: .571 of it."""
    stop, long, _ = expected_ascent(unscaled(loss_type)).tolist()
    assert stop / long == pytest.approx(STOP_OVER_LONG[loss_type], abs=1e-3)


@pytest.mark.parametrize("loss_type", STOP_OVER_LONG)
def test_replies_of_one_length_leave_the_gradient_exact_under_every_loss(loss_type, monkeypatch):
    monkeypatch.setitem(TURNS, LONG, 1)
    ascent = expected_ascent(unscaled(loss_type))
    torch.testing.assert_close(ascent * (exact()[1] / ascent[1]), exact())
    assert ascent[1] > 0


# ----------------------------------------------------------------------------- baselines and spreads


class Choice(NamedTuple):
    """A scenario whose one reply is good with probability `p`."""

    p: float
    poor: float
    good: float


EASY = Choice(0.9, 0.8, 1.0)
HARD = Choice(0.5, 0.0, 0.2)
SIZES = (2, 4, 8)


def over_the_true_gradient(baseline: str, scaling: str, size: int) -> tuple[float, float]:
    """The expected gradient over the true one, of the easy and of the hard scenario, a step having a group of
    each; all replies have one token."""
    config = TrainingConfig(
        advantage_estimator="group",
        baseline_type=baseline,
        advantage_normalization=scaling,
        num_generations=size,
        loss_type="dr_grpo",
        loss_length=1,
    )
    expected = [0.0, 0.0]
    for counts in itertools.product(range(size + 1), repeat=2):
        groups, chance = [], 1.0
        for number, (count, choice) in enumerate(zip(counts, (EASY, HARD), strict=True)):
            chance *= math.comb(size, count) * choice.p**count * (1 - choice.p) ** (size - count)
            rewards = [choice.good] * count + [choice.poor] * (size - count)
            members = tuple(
                talk(((9,), (1,)), reward=reward, member=member) for member, reward in enumerate(rewards)
            )
            groups.append(TrajectoryGroup(key=str(number), trajectories=members))
        credit = assign_credit(groups, config).advantages
        for number, (group, choice) in enumerate(zip(groups, (EASY, HARD), strict=True)):
            for trajectory, advantage in zip(group.trajectories, credit[number], strict=True):
                assert advantage is not None
                score = (trajectory.reward == choice.good) - choice.p  # d log p / d logit
                expected[number] += chance * advantage[0] * score / size
    easy, hard = (
        value / (choice.p * (1 - choice.p) * (choice.good - choice.poor))
        for value, choice in zip(expected, (EASY, HARD), strict=True)
    )
    return easy, hard


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "global_mean"])
def test_these_baselines_leave_the_gradient_alone_up_to_one_factor(baseline, size):
    factor = {"group_mean": 1 - 1 / size, "leave_one_out": 1.0, "global_mean": 1 - 1 / (2 * size)}[baseline]
    assert over_the_true_gradient(baseline, "none", size) == pytest.approx((factor, factor), abs=1e-12)


@pytest.mark.parametrize(
    ("size", "easy", "hard"), [(2, 0.5, 0.5), (4, 0.865, 0.625), (8, 0.987, 0.727)], ids=str
)
def test_a_median_weighs_scenarios_by_how_lopsided_they_are(size, easy, hard):
    assert over_the_true_gradient("group_median", "none", size) == pytest.approx((easy, hard), abs=1e-3)


@pytest.mark.parametrize(
    ("scaling", "size", "easy", "hard"),
    [
        ("population", 2, 5.0, 5.0),
        ("population", 4, 8.45, 8.08),
        ("population", 8, 11.64, 9.28),
        ("sample", 2, 3.54, 3.54),
        ("sample", 4, 7.32, 7.0),
        ("sample", 8, 10.89, 8.68),
        ("batch", 2, 1.23, 1.12),
        ("batch", 4, 1.75, 1.68),
        ("batch", 8, 2.0, 1.96),
    ],
)
def test_a_spread_weighs_scenarios_by_what_it_is_there(scaling, size, easy, hard):
    assert over_the_true_gradient("group_mean", scaling, size) == pytest.approx((easy, hard), abs=0.01)
