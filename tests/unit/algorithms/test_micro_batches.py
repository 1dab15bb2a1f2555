"""Losses, gradients and metrics are the same however a batch is cut, ordered or shared out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateset_agents.algorithms.losses import (
    Denominators,
    LossInputs,
    Metrics,
    mean_per_trajectory,
    policy_loss,
)
from stateset_agents.algorithms.policy_losses import LOSSES

NAMES = sorted(LOSSES)


class Batch:
    """Six conversations of a tiny softmax policy: a gradient in shared parameters, as in a real model."""

    lengths = (4, 1, 7, 3, 2, 5)

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        num_tokens, num_features, num_words = sum(self.lengths), 5, 7
        self.parameters = draw(num_features, num_words).to(dtype)
        self.features = draw(num_tokens, num_features).to(dtype)
        self.tokens = torch.randint(num_words, (num_tokens,), generator=generator)
        self.advantages = draw(num_tokens).to(dtype)
        self.ids = torch.repeat_interleave(torch.arange(6), torch.tensor(self.lengths))
        self.counts = Denominators.of(self.lengths, max_length=10)
        with torch.no_grad():
            clean = self._logprobs(self.parameters, torch.arange(num_tokens))
        self.old = clean + 0.3 * draw(num_tokens).to(dtype)
        self.behaviour = self.old + 0.2 * draw(num_tokens).to(dtype)
        self.reference = clean + 0.5 * draw(num_tokens).to(dtype)
        self.keep = draw(num_tokens) > -1

    def _logprobs(self, parameters: Tensor, rows: Tensor) -> Tensor:
        logits = self.features[rows] @ parameters
        return logits.log_softmax(-1).gather(-1, self.tokens[rows, None])[:, 0]

    def learn(self, name: str, pieces: list[Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        """(summed loss, gradient, merged metrics) over micro-batches given as token indices."""
        parameters = self.parameters.clone().requires_grad_()
        total, metrics = torch.zeros((), dtype=parameters.dtype), Metrics()
        for rows in pieces:
            output = policy_loss(
                name,
                LossInputs(
                    self._logprobs(parameters, rows),
                    self.old[rows],
                    self.advantages[rows],
                    self.ids[rows],
                    self.counts,
                    behaviour_logprobs=self.behaviour[rows],
                    keep=self.keep[rows],
                    ref_logprobs=self.reference[rows],
                ),
                weight_cap=1.3,
                beta=0.1,
            )
            output.loss.backward()
            total, metrics = total + output.loss.detach(), metrics + output.metrics
        return total, parameters.grad, metrics


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(NAMES),
    split_at=st.lists(st.integers(0, 3), min_size=22),
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_any_split_into_micro_batches_gives_the_same_gradient(dtype, tolerance, seed, name, split_at):
    batch = Batch(seed, dtype)
    # gspo keeps conversations whole; the others may be cut anywhere, even inside one
    piece = (
        torch.tensor(split_at)[batch.ids] if LOSSES[name].level == "sequence" else torch.tensor(split_at[:22])
    )
    in_one_batch = batch.learn(name, [torch.arange(22)])
    split = batch.learn(name, [(piece == part).nonzero()[:, 0] for part in range(4)])
    assert abs(float(split[0] - in_one_batch[0])) < tolerance * max(1.0, abs(float(in_one_batch[0])))
    assert _relative(split[1], in_one_batch[1]) < tolerance
    assert split[2].to_dict() == pytest.approx(
        in_one_batch[2].to_dict(), rel=10 * tolerance, abs=10 * tolerance
    )


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_with_their_own_conversations_sum_to_one_batch(name):
    batch = Batch(3)
    whole_loss, whole_gradient, _ = batch.learn(name, [torch.arange(22)])
    total, gradient = 0.0, torch.zeros_like(whole_gradient)
    for first, last in [(0, 2), (2, 6)]:
        half = Batch(3)
        rows = ((batch.ids >= first) & (batch.ids < last)).nonzero()[:, 0]
        half.ids = batch.ids - first  # each numbers its own; only the totals are shared
        half.counts = replace(
            Denominators.of(batch.lengths[first:last], max_length=10),
            num_trajectories=batch.counts.num_trajectories,
            num_tokens=batch.counts.num_tokens,
        )
        loss, part, _ = half.learn(name, [rows])
        total, gradient = total + float(loss), gradient + part
    assert total == pytest.approx(float(whole_loss), rel=1e-12)
    assert _relative(gradient, whole_gradient) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_tokens_and_the_numbering_of_conversations_change_nothing(name):
    batch, b = Batch(5), Batch(5)
    loss, gradient, _ = batch.learn(name, [torch.arange(22)])
    b.ids = 5 - batch.ids
    b.counts = Denominators.of(batch.lengths[::-1], max_length=10)
    backwards = b.learn(name, [torch.arange(22).flip(0)])
    assert float(backwards[0]) == pytest.approx(float(loss), rel=1e-12)
    assert _relative(backwards[1], gradient) < 1e-12


def test_gspo_refuses_a_conversation_that_is_cut_in_two():
    batch = Batch(1)
    with pytest.raises(ValueError, match="trajectory 2 has 7 tokens but 3 are in this micro-batch"):
        batch.learn("gspo", [torch.arange(8)])


def test_a_trajectory_without_trained_tokens_does_not_count():
    counts = Denominators.of([3, 0, 2])
    assert (counts.num_trajectories, counts.num_tokens) == (2, 5)


def test_an_empty_micro_batch_adds_zero():
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    counts = Denominators.of([3], max_length=8)
    for name in NAMES:
        output = policy_loss(name, LossInputs(empty, empty, empty, torch.zeros(0, dtype=torch.int64), counts))
        assert output.loss.item() == 0
        output.loss.backward()


def test_a_batch_without_a_trained_token_has_no_denominators():
    with pytest.raises(ValueError, match="skip its optimiser step"):
        Denominators.of([0, 0])


def test_mean_per_trajectory_gives_each_token_its_conversations_mean():
    ids, counts = torch.tensor([1, 0, 1]), Denominators.of([1, 2])
    assert mean_per_trajectory(torch.tensor([1.0, 5.0, 3.0]), ids, counts).tolist() == [2, 5, 2]
