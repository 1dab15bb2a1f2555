"""LoRA's settings, where adapters go, and what model plus adapter weigh."""

from __future__ import annotations

import sys

import pytest
import torch
from peft import get_peft_model
from tiny_models import tiny_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.update import LoraSettings
from stateset_agents.training.update.lora import lora_config, merged_weights
from stateset_agents.types.errors import ConfigurationError


def wrapped(family="llama", **settings):
    model = tiny_model(family)
    adapted = get_peft_model(model, lora_config(LoraSettings(**settings), model)).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # at 0 an adapter changes nothing
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_plain_model_with_the_merged_weights_says_what_model_and_adapter_say(family):
    adapted = wrapped(family)
    plain = tiny_model(family, seed=1).eval()
    weights = merged_weights(adapted)
    assert weights.keys() == plain.state_dict().keys()
    plain.load_state_dict(weights)
    ids = torch.tensor([[1, 5, 9, 200, 7]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, atol=2e-5, rtol=1e-5)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - plain(ids).logits).abs().max() > 0.01


def test_merging_leaves_the_trained_model_s_own_weights_bit_equal():
    adapted = wrapped()
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    merged_weights(adapted)
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.state_dict().items())


def test_a_plain_model_s_merged_weights_are_its_own():
    model = tiny_model()
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in merged_weights(model).items())


def test_every_linear_layer_but_the_head_gets_an_adapter():
    adapted = wrapped(rank=4, alpha=2.0)
    placed = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert placed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (4, 32)
    assert layer.scaling["default"] == 0.5


def test_experts_of_a_mixture_get_no_adapter_though_a_dense_layer_has_their_names():
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0],
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    adapted = get_peft_model(model, lora_config(LoraSettings(), model))
    placed = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert placed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ConfigurationError, match="'gate_proj' names no linear layer"):
        lora_config(LoraSettings(target_modules=("gate_proj",)), model)


def test_layers_that_share_the_end_of_their_names_with_others_are_named_in_full():
    model = tiny_model("llama")
    model.model.layers[0].mlp = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.Linear(8, 32))
    adapted = get_peft_model(model, lora_config(LoraSettings(), model))
    placed = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert {f"base_model.model.model.layers.0.mlp.{place}" for place in (0, 1)} < placed
    assert not any(name.endswith("layers.0") for name in placed)


def test_names_choose_layers_and_a_wrong_one_says_what_there_is():
    adapted = wrapped(target_modules=("q_proj",))
    placed = {name.split(".")[-4] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert placed == {"q_proj"}
    with pytest.raises(ConfigurationError, match=r"'query' names no linear layer: .* k_proj, o_proj, q_proj"):
        wrapped(target_modules=("query",))
    with pytest.raises(ConfigurationError, match="'lm_head' is the output head"):
        wrapped(target_modules=("q_proj", "lm_head"))


def test_the_settings_are_part_of_a_training_s():
    assert TrainingConfig(lora={"rank": 8}).lora == LoraSettings(rank=8)
    with pytest.raises(ConfigurationError, match=r"lora.*rnk"):
        TrainingConfig(lora={"rnk": 8})


def test_a_missing_peft_gives_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r'an adapter needs peft: pip install "peft>=0.18"'):
        lora_config(LoraSettings(), tiny_model())
