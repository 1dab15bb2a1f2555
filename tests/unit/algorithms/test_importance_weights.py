"""The expected gradient of conversations that another policy sampled: all 243 of five tokens, enumerated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss

SEQUENCES = torch.tensor(list(itertools.product(range(3), repeat=5)))
"""[243, 5]"""
REWARDS = (SEQUENCES == 2).sum(1).double() / 5 + (SEQUENCES[:, 0] == SEQUENCES[:, 4]).double()
LOSSES = ("reinforce", "grpo", "gspo")


def logprobs(table: Tensor) -> Tensor:
    """[243, 5] under the Markov policy of these logits [4, 3]; row 3 is before the first token."""
    before = torch.cat([torch.full((len(SEQUENCES), 1), 3), SEQUENCES[:, :-1]], dim=1)
    return table.log_softmax(-1)[before, SEQUENCES]


def gradient(table: Tensor, sampler: Tensor, name: str, **options: Any) -> Tensor:
    """The expectation, over what the sampler says, of the product's own loss's gradient by the table."""
    table = table.clone().requires_grad_()
    current, behaviour = logprobs(table), logprobs(sampler)
    chances = behaviour.sum(1).exp()
    baseline = (chances * REWARDS).sum()
    ids = torch.arange(len(SEQUENCES)).repeat_interleave(5)
    inputs = LossInputs(
        current.flatten(),
        current.detach().flatten(),
        ((REWARDS - baseline) * chances * len(SEQUENCES)).repeat_interleave(5),
        ids,
        Denominators.of([5] * len(SEQUENCES)),
        behaviour_logprobs=behaviour.flatten() if options else None,
    )
    (result,) = torch.autograd.grad(policy_loss(name, inputs, **options).loss, table)
    return result


def policies(sigma: float) -> tuple[Tensor, Tensor]:
    """A policy, and a sampler whose tokens' log-probs are off by about sigma, systematically."""
    torch.manual_seed(0)
    table = torch.randn(4, 3, dtype=torch.float64)
    return table, table * (1 + sigma) + 0.6 * sigma * torch.randn(4, 3, dtype=torch.float64)


def error(name: str, sigma: float, **options: Any) -> float:
    table, sampler = policies(sigma)
    exact = gradient(table, table, name)
    return float((gradient(table, sampler, name, **options) - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", LOSSES)
def test_whole_conversations_weights_leave_no_bias_but_that_of_the_baseline(name: str) -> None:
    assert error(name, 0.05) > 0.04
    assert error(name, 0.05, weight_level="sequence") <= 1e-3
    assert error(name, 0.05, weight_level="sequence", weight_cap=5.0) <= 1e-3
    assert error(name, 0.05, weight_level="token", weight_cap=2.0) < error(name, 0.05)


def test_a_conversation_s_weight_is_the_product_of_its_tokens() -> None:
    table, sampler = policies(0.1)
    gaps = (logprobs(table) - logprobs(sampler)).sum(1)
    inputs = LossInputs(
        logprobs(table).flatten(),
        logprobs(table).clone().flatten(),
        torch.ones(243 * 5, dtype=torch.float64),
        torch.arange(243).repeat_interleave(5),
        Denominators.of([5] * 243),
        behaviour_logprobs=logprobs(sampler).flatten(),
    )
    metrics = policy_loss("reinforce", inputs, weight_level="sequence").metrics.to_dict()
    assert metrics["policy/weight"] == pytest.approx(float(gaps.exp().mean()))
    assert metrics["policy/weight_square"] == pytest.approx(float((2 * gaps).exp().mean()))


def test_a_part_of_a_conversation_has_no_weight() -> None:
    table, sampler = policies(0.1)
    inputs = LossInputs(
        logprobs(table)[0, :3],
        logprobs(table)[0, :3].clone(),
        torch.ones(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.long),
        Denominators.of([5]),
        behaviour_logprobs=logprobs(sampler)[0, :3],
    )
    with pytest.raises(ValueError, match="each trajectory whole"):
        policy_loss("grpo", inputs, weight_level="sequence")
