"""The policy's log-probs and entropy against a plain full forward, for models with every kind of head."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from tiny_training import plain_logits, plain_logprobs, sample, talk
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from stateset_agents.training.update.batch import micro_batch
from stateset_agents.training.update.policy import Policy

TALKS = [
    talk(([5, 6, 7], [8, 9]), ([10], [11, 12])),
    talk(([20], [21])),
    talk(([30, 31], [32, 33, 34])),
]


def batch_of(policy, talks=TALKS):
    (layout,) = policy.layouts([one.token_ids for one in talks], max_rows=9, max_tokens=1000)
    return micro_batch([sample(one) for one in talks], layout)


def own(batch, values, place):
    return values[batch.trajectory_ids == place]


def small(kind):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 257,
    }
    torch.manual_seed(0)
    if kind == "capped":
        return Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, attn_implementation="eager"))
    return CohereForCausalLM(CohereConfig(**sizes, logit_scale=0.5))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("row_layout", ["packed", "padded"])
def test_log_probs_equal_a_plain_full_forward(family, temperature, row_layout):
    policy = Policy(tiny_model(family).eval(), temperature=temperature, row_layout=row_layout)
    assert policy.selects
    batch = batch_of(policy)
    scores = policy.score(batch)
    for place, trajectory in enumerate(TALKS):
        with torch.no_grad():
            expected = plain_logprobs(policy.model, trajectory, temperature)
        assert torch.allclose(own(batch, scores.logprobs, place), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["capped", "scaled"])
def test_a_model_with_capped_or_scaled_logits_falls_back_to_its_own(kind):
    policy = Policy(small(kind).eval())
    assert not policy.selects
    assert not policy.packs
    batch = batch_of(policy)
    scores = policy.score(batch)
    with torch.no_grad():
        expected = plain_logprobs(policy.model, TALKS[0])
    assert torch.allclose(own(batch, scores.logprobs, 0), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "capped"])
def test_under_autocast_head_and_softmax_stay_in_fp32(kind):
    policy = Policy(
        tiny_model("llama").eval() if kind == "linear" else small(kind).eval(), autocast=torch.bfloat16
    )
    scores = policy.score(batch_of(policy))
    for values in scores:
        assert values.dtype is torch.float32
        assert (values.to(torch.bfloat16) != values).all()  # not of bf16 logits


def test_packed_rows_attend_in_fp32_under_autocast_on_a_cpu(monkeypatch):
    """torch's attention in bf16 takes longer there. Queries and keys come in fp32 from rotary embeddings, and
    by them alone it was thought to be fp32's already, while autocast rounded all three."""
    policy = Policy(tiny_model("llama").eval(), autocast=torch.bfloat16)
    assert policy.packs
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, **options):
        seen.extend([query.dtype, key.dtype, value.dtype, torch.is_autocast_enabled("cpu")])
        return real(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    policy.score(batch_of(policy))
    assert set(seen) == {torch.float32, False}


@pytest.mark.parametrize("kind", ["linear", "capped"])
def test_entropy_is_exact_and_carries_gradient_only_when_asked(kind):
    policy = Policy(tiny_model().eval() if kind == "linear" else small(kind).eval())
    batch = batch_of(policy)
    with torch.no_grad():
        logits = torch.cat([plain_logits(policy.model, TALKS[place]) for place in batch.layout.rows])
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(policy.score(batch).entropy, expected, atol=1e-5)

    def total(scores, part):
        return scores.logprobs.sum() * 0 + scores.entropy.sum(), None

    parameters = list(policy.model.parameters())
    for asked in (False, True):
        loss, _ = policy.loss(batch, total, entropy_gradient=asked)
        assert torch.allclose(loss, expected.sum(), atol=1e-4)
        found = torch.autograd.grad(loss, parameters)
        assert any(bool((one != 0).any()) for one in found) == asked


def test_half_precision_weights_become_fp32_masters_and_float64_stays():
    assert Policy(tiny_model().to(torch.bfloat16)).dtype is torch.float32
    wide = Policy(tiny_model().double())
    assert wide.dtype is torch.float64
    assert wide.score(batch_of(wide)).logprobs.dtype is torch.float64


def test_the_reference_is_frozen_and_stays_where_the_policy_was():
    policy = Policy(tiny_model().eval())
    reference = policy.reference()
    batch = batch_of(policy)
    before = reference.score(batch).logprobs
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(reference.score(batch).logprobs, before)
    assert not torch.allclose(policy.score(batch).logprobs, before, atol=1e-3)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())


def test_a_model_whose_head_is_no_linear_layer_falls_back():
    class Head(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden).tanh()

    model = tiny_model().eval()
    model.lm_head = Head(model.lm_head)
    policy = Policy(model)
    assert not policy.selects
    batch = batch_of(policy)
    scores = policy.score(batch)
    with torch.no_grad():
        assert torch.allclose(own(batch, scores.logprobs, 2), plain_logprobs(model, TALKS[2]), atol=1e-5)
