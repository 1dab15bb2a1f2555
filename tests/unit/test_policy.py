"""The policy's log-probs and entropy against a plain full forward, for models with every kind of head."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, tiny_model
from tiny_training import plain_logprobs, sample, talk
from torch import nn
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from stateset_agents.training.batch import make_micro_batches
from stateset_agents.training.policy import Policy

TALKS = [
    talk(([5, 6, 7], [8, 9]), ([10], [11, 12])),
    talk(([20], [21])),
    talk(([30, 31], [32, 33, 34])),
]


def batch_of(talks=TALKS):
    (batch,) = make_micro_batches([sample(one) for one in talks], max_rows=9, max_tokens=1000)
    return batch


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
def test_log_probs_equal_a_plain_full_forward(family, temperature):
    policy = Policy(tiny_model(family).eval(), temperature=temperature)
    assert policy.selects
    batch = batch_of()
    with torch.no_grad():
        scores = policy.score(batch, entropy="value")
        for place, trajectory in enumerate(TALKS):
            own = scores.logprobs[batch.trajectory_ids == place]
            expected = plain_logprobs(policy.model, trajectory, temperature)
            assert torch.allclose(own, expected, atol=1e-5)


def test_the_head_on_selected_states_gives_the_model_s_own_logits():
    policy = Policy(tiny_model("qwen3").eval())  # its head is tied to the embeddings
    batch = batch_of()
    with torch.no_grad():
        own = policy.model(input_ids=batch.model_input, use_cache=False).logits.flatten(0, 1)
        assert torch.allclose(policy._logits(batch), own[batch.positions], atol=1e-5)


@pytest.mark.parametrize("kind", ["capped", "scaled"])
def test_a_model_with_capped_or_scaled_logits_falls_back_to_its_own(kind):
    policy = Policy(small(kind).eval())
    assert not policy.selects
    batch = batch_of()
    with torch.no_grad():
        own = policy.score(batch).logprobs[batch.trajectory_ids == 0]
        assert torch.allclose(own, plain_logprobs(policy.model, TALKS[0]), atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "capped"])
def test_under_autocast_head_and_softmax_stay_in_fp32(kind):
    policy = Policy(
        tiny_model("llama").eval() if kind == "linear" else small(kind).eval(), autocast=torch.bfloat16
    )
    with torch.no_grad():
        logits = policy._logits(batch_of())
    assert logits.dtype is torch.float32
    assert logits.unique().numel() > 0.9 * logits.numel()  # in bf16 most of them would coincide


def test_entropy_is_exact_and_carries_gradient_only_when_asked():
    policy = Policy(tiny_model().eval())
    batch = batch_of()
    logits = policy._logits(batch).detach()
    expected = torch.distributions.Categorical(logits=logits).entropy()
    value, gradient = (policy.score(batch, entropy=kind).entropy for kind in ("value", "gradient"))
    assert torch.allclose(value, expected, atol=1e-5)
    assert torch.allclose(gradient.detach(), expected, atol=1e-5)
    assert (value.requires_grad, gradient.requires_grad) == (False, True)
    assert policy.score(batch).entropy is None


def test_half_precision_weights_become_fp32_masters_and_float64_stays():
    assert Policy(tiny_model().to(torch.bfloat16)).dtype is torch.float32
    wide = Policy(tiny_model().double())
    assert wide.dtype is torch.float64
    assert wide.score(batch_of()).logprobs.dtype is torch.float64


def test_the_reference_is_frozen_and_stays_where_the_policy_was():
    policy = Policy(tiny_model().eval())
    reference = policy.reference()
    before = reference.score(batch_of()).logprobs
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(reference.score(batch_of()).logprobs, before)
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
    batch = batch_of()
    own = policy.score(batch).logprobs[batch.trajectory_ids == 2]
    assert torch.allclose(own, plain_logprobs(model, TALKS[2]), atol=1e-5)
