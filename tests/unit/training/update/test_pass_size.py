"""Micro-batches are sized by what the model keeps of a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.rows.fused_layers import fused_hidden
from stateset_agents.training.rows.layout import packed_layouts
from stateset_agents.training.rows.parallel_passes import activation_bytes, default_pass_tokens
from stateset_agents.training.update import learner as learner_module
from stateset_agents.training.update.batch import ConversationRow
from stateset_agents.training.update.learner import Learner

CPU = torch.device("cpu")


def model(**config: Any) -> Any:
    return SimpleNamespace(config=LlamaConfig(**config))


def test_a_small_model_fills_the_caches_and_a_larger_one_the_memory_it_may_have():
    desk = model(hidden_size=128, intermediate_size=384, num_hidden_layers=2)
    smollm2 = model(hidden_size=576, intermediate_size=1536, num_hidden_layers=30)
    llama_8b = model(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    assert default_pass_tokens(desk, CPU) == 2048
    assert default_pass_tokens(llama_8b, CPU) == 512
    tokens = default_pass_tokens(smollm2, CPU)
    assert 512 < tokens < 2048
    assert tokens * activation_bytes(smollm2) <= 2**30
    assert tokens < default_pass_tokens(smollm2, CPU, fused=True) < 2048
    assert default_pass_tokens(llama_8b, torch.device("cuda")) == 16384


@pytest.mark.parametrize("fused", [False, True])
def test_the_estimate_is_about_what_a_forward_keeps(fused):
    """Everything that autograd saves of a forward, weights aside."""
    config = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=64, **config))
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = 96
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if fused:
            (layout,) = packed_layouts(
                [[token % 64 for token in range(tokens)]], max_rows=1, max_tokens=tokens
            )
            hidden = fused_hidden(net.model, layout)
        else:
            hidden = net.model(torch.arange(tokens)[None] % 64).last_hidden_state
    assert hidden.requires_grad
    ratio = sum(kept.values()) / tokens / activation_bytes(net, fused=fused)
    assert 0.5 < ratio < 1.6, ratio


@pytest.mark.parametrize("asked", [None, 7])
def test_a_learner_takes_what_is_asked_for_or_the_default(asked, monkeypatch):
    monkeypatch.setattr(learner_module, "default_pass_tokens", lambda *_, **__: 5)  # of a larger model
    config = TrainingConfig(max_steps=1, beta=0.0, micro_batch_tokens=asked)
    learner = Learner(tiny_model(), config, num_steps=1, exact_logprobs=True)
    two_tokens: Any = [
        SimpleNamespace(token_ids=[10 + 2 * index, 11 + 2 * index], pixels=()) for index in range(6)
    ]
    rows = [ConversationRow(index, row) for index, row in enumerate(two_tokens)]
    layouts = learner._layouts(rows)
    assert max(layout.num_tokens for layout in layouts) <= (asked or 5)
    assert sum(len(layout.rows) for layout in layouts) == 6
