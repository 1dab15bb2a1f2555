"""The simulated bytes of a training are those of real tensors that go through the same code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, PhiConfig, Qwen2Config, Qwen3Config

from stateset_agents.backends import linears
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.memory_simulation import SimulatedTraining, Workload
from stateset_agents.training.rows import chunked_head
from stateset_agents.training.update import policy

SHAPES: dict[str, Any] = {
    "llama-8k": LlamaConfig(
        **{"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "qwen3-32k": Qwen3Config(
        **{"vocab_size": 32768, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    ),
    "llama-49k": LlamaConfig(
        **{"vocab_size": 49152, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 5},
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen2-152k": Qwen2Config(
        **{"vocab_size": 151936, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
}
UNSEEN: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=20011, n_embd=160, n_layer=3, n_head=5, n_positions=2048),
    "mistral": MistralConfig(
        **{"vocab_size": 12007, "hidden_size": 320, "intermediate_size": 999, "num_hidden_layers": 3},
        **{"num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 40, "sliding_window": 256},
    ),
    "phi": PhiConfig(
        **{"vocab_size": 7001, "hidden_size": 224, "intermediate_size": 640, "num_hidden_layers": 4},
        **{"num_attention_heads": 7, "partial_rotary_factor": 0.5},
    ),
    "narrow-deep": LlamaConfig(
        **{"vocab_size": 3001, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 11},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24, "tie_word_embeddings": True},
    ),
}
"""Shapes that no one had looked at before this test was written."""
LOAD = Workload(conversations=8, row_tokens=320, prompt_tokens=64, pass_tokens=1216, prefill_tokens=1024)


def peaks(config: Any, device: str, **settings: Any) -> dict[str, int]:
    training = SimulatedTraining(
        config,
        TrainingConfig(fast_linears=False, **settings),
        dtype=torch.bfloat16,
        autocast=torch.bfloat16,
        device=device,
    )
    return {"start": training.start, "hand-over": training.hand_over(), "update": training.update(LOAD)}


@pytest.fixture
def branches_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tensors on the CPU take the branches of a GPU; its one product that a CPU lacks gives zeros."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(policy, "is_usable", lambda wanted, device: False)  # heads from rounded operands
    for module in (linears, chunked_head):
        monkeypatch.setattr(module, "wide_product", lambda a, b: a.new_zeros(len(a), len(b)).float())


CASES = [
    pytest.param(shape, lora, checkpointing, id=f"{name}-{'lora' if lora else 'full'}-{checkpointing}")
    for name, shape in {**SHAPES, **UNSEEN}.items()
    for lora in (None, {"rank": 8})
    for checkpointing in (False, True)
]


@pytest.mark.first(6)
@pytest.mark.usefixtures("branches_of_a_gpu")
@pytest.mark.parametrize(("shape", "lora", "checkpointing"), CASES)
def test_simulated_bytes_are_those_of_real_tensors(shape: Any, lora: Any, checkpointing: bool) -> None:
    settings = {"lora": lora, "gradient_checkpointing": checkpointing, "beta": 0.05}
    simulated, counted = (peaks(shape, device, **settings) for device in ("meta", "cpu"))
    print({name: f"{simulated[name] / counted[name] - 1:+.3%}" for name in counted}, counted)
    for name, bytes in counted.items():
        assert simulated[name] == pytest.approx(bytes, rel=0.01), name
