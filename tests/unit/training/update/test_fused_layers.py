"""Llama's layers by hand: with operands in fp32 they are transformers' layers, gradients and all."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import BLOCKS, SIZES, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows import fused_layers
from stateset_agents.training.rows.fused_layers import fused_hidden, why_not_fused
from stateset_agents.training.rows.packed_attention import use_packed_attention
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.policy import Policy

PROMPT = list(range(20, 40))
ROWS = [[*PROMPT, 5, 6, 7], [*PROMPT, 8, 9], [*PROMPT, 10], list(range(40, 53)), [3, 4]]
"""Three share a prompt that is longer than any window."""
CONFIGS = {
    "mistral": lambda: MistralConfig(**SIZES, **BLOCKS, num_key_value_heads=2, sliding_window=8),
    "one head for all": lambda: LlamaConfig(**SIZES, **BLOCKS, num_key_value_heads=1),
    "attention bias on the way out": lambda: LlamaConfig(**SIZES, **BLOCKS, attention_bias=True),
    "gelu": lambda: LlamaConfig(**SIZES, **BLOCKS, hidden_act="gelu"),
    "dropout": lambda: LlamaConfig(**SIZES, **BLOCKS, attention_dropout=0.1),
}


def model_of(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()) if kind in CONFIGS else tiny_model(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide in a test
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def gradients(model, hidden):
    """By every weight, of a sum in which each hidden state has another weight."""
    model.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)).sum().backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def transformers_hidden(policy, layout):
    with use_packed_attention(policy.trunk):
        return policy.trunk(**layout.forward_arguments(policy.device)).last_hidden_state[0]


def packed(policy):
    (layout,) = policy.layouts(ROWS, max_rows=9, max_tokens=1000)
    return layout


@pytest.mark.parametrize("rows_of_a_block", [1, 7, 1000])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen2-window", "mistral", "one head for all"])
def test_without_rounding_hidden_states_and_gradients_are_those_of_transformers(
    kind, rows_of_a_block, monkeypatch
):
    monkeypatch.setattr(fused_layers, "_CACHED_ELEMENTS", rows_of_a_block * BLOCKS["hidden_size"])
    policy = Policy(model_of(kind))
    assert policy.packs
    assert why_not_fused(policy.trunk) is None
    layout = packed(policy)
    expected = transformers_hidden(policy, layout)
    actual = fused_hidden(policy.trunk, layout, dtype=torch.float32)
    assert torch.allclose(actual, expected, atol=2e-5 * float(expected.detach().abs().max()), rtol=0)
    wanted, found = gradients(policy.model, expected), gradients(policy.model, actual)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(found[name], gradient, atol=2e-5 * float(gradient.abs().max()), rtol=0), name


@pytest.mark.parametrize("kind", ["llama", "qwen2-window"])
def test_in_bf16_it_is_as_far_from_fp32_as_transformers_under_autocast(kind):
    policy = Policy(model_of(kind), autocast=torch.bfloat16)
    assert policy.fuses
    layout = packed(policy)
    exact = gradients(policy.model, transformers_hidden(policy, layout))
    unfused = Policy(policy.model, autocast=torch.bfloat16, fast=False)
    assert not unfused.fuses
    autocast = gradients(policy.model, unfused.hidden(layout))
    fused = gradients(policy.model, policy.hidden(layout))

    def distance(found):
        return sum(float((found[name] - exact[name]).square().sum()) for name in exact) ** 0.5

    size = sum(float(gradient.square().sum()) for gradient in exact.values()) ** 0.5
    assert 0 < distance(fused) < 1.1 * distance(autocast) < 0.05 * size


def test_a_policy_in_bf16_scores_and_learns_by_them(monkeypatch):
    calls = []
    real = fused_layers.packed_attention

    def watched(module, query, *others, **options):
        calls.append((query.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return real(module, query, *others, **options)

    policy = Policy(model_of("llama"), autocast=torch.bfloat16)
    monkeypatch.setattr(fused_layers, "packed_attention", watched)
    layout = packed(policy)
    policy.hidden(layout)
    reference = policy.reference()
    with torch.no_grad():
        same = reference.hidden(layout)
        assert torch.equal(policy.hidden(layout), same)
    layers = BLOCKS["num_hidden_layers"]
    assert calls == layers * [(torch.float32, False, True)] + 2 * layers * [(torch.float32, False, False)]
    with torch.no_grad():
        policy.model.model.layers[0].self_attn.q_proj.weight.data.mul_(2.0)  # no version counts this
        assert not torch.equal(policy.hidden(layout), same)
    reference.recompute_activations()
    assert not reference.fuses


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_reference_that_keeps_its_products_weights_in_bf16_scores_the_same(kind):
    policy = Policy(model_of(kind), autocast=torch.bfloat16)
    reference = policy.reference()
    layout = packed(policy)
    with torch.no_grad():
        before = reference.hidden(layout)
        bytes_before = size_of(reference.model)
        reference.round_operands()
        assert reference.fuses
        assert torch.equal(reference.hidden(layout), before)
    linears = [module for module in policy.trunk.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert bytes_before - size_of(reference.model) == 2 * sum(linear.weight.numel() for linear in linears)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}


def size_of(model):
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_learners_reference_takes_half_the_memory_where_the_update_rounds_its_weights(precision):
    config = TrainingConfig(beta=0.1, precision=precision)
    learner = Learner(model_of("llama"), config, num_steps=1, exact_logprobs=False)
    rounded = learner.reference.trunk.layers[0].mlp.up_proj.weight.dtype
    assert rounded == (torch.bfloat16 if precision == "bf16" else torch.float32)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "GPT2Model is none of LlamaModel, MistralModel, Qwen2Model"),
        ("attention bias on the way out", "some of its linear layers have a bias"),
        ("gelu", "its activation is gelu"),
        ("dropout", "its attention has dropout"),
    ],
)
def test_other_models_go_through_transformers(kind, reason):
    policy = Policy(model_of(kind), autocast=torch.bfloat16)
    assert policy.packs
    assert why_not_fused(policy.trunk) == reason
    assert not policy.fuses
    assert policy.hidden(packed(policy)).isfinite().all()


def test_what_was_put_into_a_model_is_not_passed_over():
    model = model_of("llama")
    with_adapter = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=["q_proj"]))
    assert (
        why_not_fused(with_adapter.base_model.model.model) == "some of its linear layers are of another kind"
    )
    assert why_not_fused(copy.deepcopy(model).double().model) == "its weights are not in fp32"
    for register in ("register_forward_hook", "register_full_backward_hook"):
        handle = getattr(model.model.layers[1].mlp, register)(lambda *_: None)
        assert why_not_fused(model.model) == "it has hooks"
        handle.remove()
        assert why_not_fused(model.model) is None
    model.model.layers[0].mlp.forward = lambda x: x
    assert why_not_fused(model.model) == "a forward of it was replaced"


def test_a_layer_of_another_kind_is_left_to_the_model():
    model = model_of("llama")
    model.model.layers[1].input_layernorm = torch.nn.RMSNorm(BLOCKS["hidden_size"])
    assert not Policy(model, autocast=torch.bfloat16).fuses


def test_an_adapter_on_the_embedding_is_switched_off_for_the_reference():
    model = get_peft_model(model_of("llama"), LoraConfig(r=2, target_modules=["embed_tokens"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_()
    policy = Policy(model, autocast=torch.bfloat16)
    layout = packed(policy)
    with torch.no_grad():
        assert not torch.allclose(policy.hidden(layout), policy.without_adapter().hidden(layout), atol=0.1)


@pytest.mark.parametrize("frozen", ["embed_tokens", "norm", "gate_proj", "q_proj", "layers.0", "layers"])
def test_frozen_weights_get_no_gradient_and_the_others_the_same(frozen):
    policy = Policy(model_of("qwen2"))
    layout = packed(policy)
    whole = gradients(policy.model, fused_hidden(policy.trunk, layout, dtype=torch.float32))
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    expected = gradients(policy.model, transformers_hidden(policy, layout))
    found = gradients(policy.model, fused_hidden(policy.trunk, layout, dtype=torch.float32))
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, whole[name]) for name, gradient in found.items())


def test_layers_that_compute_something_else_are_left_to_transformers(monkeypatch):
    monkeypatch.setattr(fused_layers, "_window", lambda attention: None)
    assert not Policy(model_of("mistral"), autocast=torch.bfloat16).fuses
    assert Policy(model_of("llama"), autocast=torch.bfloat16).fuses
