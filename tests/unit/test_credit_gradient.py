"""Per-turn credit through the loss: which averaging leaves the policy gradient what it is, by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from tiny_training import talk
from torch import Tensor

from stateset_agents.algorithms.aggregation import Denominators
from stateset_agents.algorithms.losses import policy_loss
from stateset_agents.core.trajectory import TrajectoryGroup
from stateset_agents.training.batch import micro_batch
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.credit import assign_credit
from stateset_agents.training.layout import padded_layouts

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
            logprobs,
            logprobs.detach(),
            batch.advantages,
            batch.trajectory_ids,
            Denominators.of(lengths, max_length=config.loss_length),
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
