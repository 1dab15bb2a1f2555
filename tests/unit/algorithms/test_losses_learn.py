"""Every policy loss teaches a toy policy what is rewarded: the arithmetic end to end, in a second."""

from __future__ import annotations

import pytest
import torch

from stateset_agents.algorithms.advantages import broadcast_turns, group_advantages
from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.algorithms.policy_losses import LOSSES

NUM_PROMPTS, NUM_WORDS, NUM_REPLIES, LENGTH = 4, 6, 8, 3


def _share_right(name: str, *, learning_rate: float, beta: float = 0.0) -> float:
    """Chance of the rewarded word (prompt p wants word p) after 60 steps of two passes each."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(NUM_PROMPTS, NUM_WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=learning_rate)
    lengths = [LENGTH] * NUM_PROMPTS * NUM_REPLIES
    denominators = Denominators.of(lengths, max_length=LENGTH)
    ids = torch.arange(len(lengths)).repeat_interleave(LENGTH)
    prompts = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_REPLIES * LENGTH)
    reference = torch.full((len(ids),), 1 / NUM_WORDS).log()
    for _ in range(60):
        probabilities = logits.detach().softmax(-1)
        words = torch.multinomial(probabilities, NUM_REPLIES * LENGTH, replacement=True, generator=generator)
        right = (words == torch.arange(NUM_PROMPTS)[:, None]).view(NUM_PROMPTS, NUM_REPLIES, LENGTH)
        rewards = right.float().mean(-1).tolist()
        per_reply = [value for group in group_advantages(rewards) for value in group]
        advantages = torch.tensor(broadcast_turns(per_reply, lengths))
        old = probabilities.log()[prompts, words.flatten()]
        for _ in range(2):
            logprobs = logits.log_softmax(-1)[prompts, words.flatten()]
            output = policy_loss(
                name,
                LossInputs(logprobs, old, advantages, ids, denominators, ref_logprobs=reference),
                beta=beta,
            )
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
    return logits.detach().softmax(-1).diagonal().mean().item()


@pytest.mark.first(3)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_loss_learns_what_is_rewarded(name):
    assert _share_right(name, learning_rate=0.1) > 0.8  # chance is 1/6


def test_learning_rate_zero_learns_nothing():
    assert _share_right("grpo", learning_rate=0.0) == pytest.approx(1 / NUM_WORDS)


def test_a_strong_kl_term_keeps_the_policy_near_its_reference():
    free, constrained = (_share_right("grpo", learning_rate=0.1, beta=beta) for beta in (0.0, 2.0))
    assert constrained < 0.5 < free
