"""The simulated bytes of a training are those of real tensors that go through the same code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tiny_training import talk
from transformers import GPT2Config, LlamaConfig, MistralConfig, PhiConfig, Qwen2Config, Qwen3Config

from stateset_agents.backends import linears
from stateset_agents.core.value_function import create_value_function
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.memory_simulation import SimulatedTraining, StorageCounter, Workload
from stateset_agents.training.rows import chunked_head
from stateset_agents.training.rows.layout import packed_layouts
from stateset_agents.training.update import policy
from stateset_agents.training.update.batch import ValuePredictions

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
LOAD = Workload(
    **{"conversations": 8, "row_tokens": 320, "prompt_tokens": 64, "pass_tokens": 1216},
    **{"prefill_tokens": 1024, "step_tokens": 8 * 256},
)


def simulated_training(
    config: Any, device: str, *, teacher: Any = None, **settings: Any
) -> SimulatedTraining:
    return SimulatedTraining(
        config,
        TrainingConfig(fast_linears=False, **settings),
        dtype=torch.bfloat16,
        autocast=torch.bfloat16,
        teacher=None if teacher is None else (teacher, torch.bfloat16),
        device=device,
    )


def peaks(config: Any, device: str, *, load: Workload = LOAD, **settings: Any) -> dict[str, int]:
    training = simulated_training(config, device, **settings)
    return {"start": training.start, "hand-over": training.hand_over(), "update": training.update(load)}


@pytest.fixture
def branches_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real tensors on the CPU take the branches of a GPU; its one product that a CPU lacks gives zeros."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    monkeypatch.setattr(policy, "is_usable", lambda wanted, device: False)  # heads from rounded operands
    for module in (linears, chunked_head):
        monkeypatch.setattr(module, "wide_product", lambda a, b: a.new_zeros(len(a), len(b)).float())


CASES = [
    pytest.param(shape, lora, checkpointing, id=f"{name}-{'lora' if lora else 'full'}-{checkpointing}")
    for name, shape in {**UNSEEN, **SHAPES}.items()
    for lora in (None, {"rank": 8})
    for checkpointing in (False, True)
]


@pytest.mark.first(2)
@pytest.mark.usefixtures("branches_of_a_gpu")
@pytest.mark.parametrize(("shape", "lora", "checkpointing"), CASES)
def test_simulated_bytes_are_those_of_real_tensors(shape: Any, lora: Any, checkpointing: bool) -> None:
    settings = {"lora": lora, "gradient_checkpointing": checkpointing, "beta": 0.05}
    simulated, counted = (peaks(shape, device, **settings) for device in ("meta", "cpu"))
    print({name: f"{simulated[name] / counted[name] - 1:+.3%}" for name in counted}, counted)
    for name, bytes in counted.items():
        assert simulated[name] == pytest.approx(bytes, rel=0.01), name


SMALL = LlamaConfig(
    **{"vocab_size": 3001, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
)
MORE: dict[str, dict[str, Any]] = {
    "a critic of tokens": {"advantage_estimator": "token_gae"},
    "a teacher": {"distillation": {"teacher": "embedded:desk"}, "teacher": SHAPES["qwen3-32k"]},
    "two processes": {"num_processes": 2},
    "a critic of turns": {"advantage_estimator": "turn_gae"},
    "whole conversations": {"loss_type": "gspo"},
}
LONG = replace(LOAD, step_tokens=64 * 256)
"""A step of eight passes."""


@pytest.mark.first(2)
@pytest.mark.usefixtures("branches_of_a_gpu")
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("lora", [None, {"rank": 8}], ids=["full", "lora"])
def test_critics_teachers_processes_and_long_steps_are_counted(more: str, lora: Any) -> None:
    settings = {"lora": lora, "beta": 0.05, "gradient_checkpointing": True, "load": LONG, **MORE[more]}
    simulated, counted = (peaks(SMALL, device, **settings) for device in ("meta", "cpu"))
    print({name: f"{simulated[name] / counted[name] - 1:+.3%}" for name in counted}, counted)
    for name, bytes in counted.items():
        assert simulated[name] == pytest.approx(bytes, rel=0.01), name


def test_what_is_beside_a_pass_is_in_the_figure() -> None:
    def bytes(load: Workload = LONG, **settings: Any) -> dict[str, int]:
        return peaks(SMALL, "meta", load=load, beta=0.0, **settings)

    plain = bytes()
    longer = bytes(replace(LONG, step_tokens=4096 * 256))["update"] - plain["update"]
    assert longer == pytest.approx(40 * 256 * (4096 - 64), rel=0.1)  # ten numbers of four bytes a token
    hidden = 64 * (256 + 256 // 32) * 128 * 2  # of each token and each end of a turn, in bf16
    assert bytes(advantage_estimator="token_gae")["update"] - plain["update"] >= hidden
    taught = bytes(distillation={"teacher": "embedded:desk"}, teacher=SMALL)
    weights = taught["start"] - plain["start"]
    assert weights >= 2 * 3001 * 128
    assert taught["update"] - plain["update"] == pytest.approx(weights, rel=0.01)


@pytest.mark.parametrize("per", ["token", "turn"])
def test_a_critic_of_the_product_takes_what_is_simulated(per: str) -> None:
    """32 conversations of eight turns, each of a prompt of two tokens and a reply of 32."""
    load = replace(LOAD, step_tokens=32 * 256, row_tokens=272, prompt_tokens=16, pass_tokens=32 * 272)
    training = simulated_training(SMALL, "meta", advantage_estimator=f"{per}_gae")
    layout, _ = training._batch(replace(load, pass_tokens=272))
    before = training.counter.live
    with training._counted():
        held = training._predicted(layout, load)
        assert held is not None
        training.counter.peak = kept = training.counter.live
        training._learn_values(held)
        learning = training.counter.peak - before
    simulated = training.critic
    assert simulated is not None
    critic = replace(
        simulated,
        value_function=create_value_function(tiny_model(), hidden_size=128, dropout=0.0),
        layouts=lambda rows: packed_layouts([row.token_ids for _, row in rows], max_rows=1, max_tokens=10**6),
        hidden=lambda layout: torch.zeros(layout.num_tokens, 128, dtype=held.dtype),
    )
    trajectories = [talk(*(([turn + 1, number + 1], [9] * 32) for turn in range(8))) for number in range(32)]

    def learn(predictions: ValuePredictions) -> None:
        returns = [[0.5] * len(estimate.values) for estimate in predictions.estimates]
        critic.learn(predictions, trajectories, returns)

    learn(critic.predict(trajectories))  # from here on there are moments
    counter = StorageCounter()
    for part in critic.value_function.head.parameters():
        counter.add(part)
        for moment in critic.value_function.optimizer.state[part].values():
            counter.add(moment)
    begin = counter.live
    with counter:
        predictions = critic.predict(trajectories)
        assert counter.live - begin == pytest.approx(kept - before, rel=0.02)
        learn(predictions)
    assert sum(map(len, predictions.hidden)) == len(held)
    assert counter.peak - begin == pytest.approx(learning, rel=0.02)
