"""The weights that are trained come from their source unrounded, whatever the dtype of the rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_trainer, same_bits

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.runs.checkpoint_files import latest_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny fp32 model on disk, whose weights bf16 and fp16 cannot hold."""
    tiny_model("llama").save_pretrained(tmp_path / "source")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def agent_of(source: Path, dtype: Any) -> MultiTurnAgent:
    settings = {"chat_template": "plain", "max_new_tokens": 3, "device": "cpu"}
    return MultiTurnAgent(AgentConfig(model_name=str(source), dtype=dtype, **settings))


@pytest.mark.first(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
async def test_at_a_learning_rate_of_0_the_checkpoint_has_the_source_s_bits(tmp_path, source, dtype):
    trainer = make_trainer(tmp_path, agent=agent_of(source, dtype), learning_rate=0.0, max_steps=2)
    await trainer.train()
    kept = load_file(latest_checkpoint(trainer.run.checkpoints) / "model" / "model.safetensors")
    own = load_file(source / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert same_bits(kept, own)
    assert same_bits(dict(trainer.learner.reference.model.state_dict()), dict(trainer.learner.weights()))
    # the agent itself speaks, and is saved, in the dtype of its rollouts
    await trainer.agent.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert same_bits(saved, {name: tensor.to(wanted) for name, tensor in own.items()})
    assert same_bits(saved, own) == (dtype == "fp32")
    await trainer.close()


def test_a_model_in_memory_keeps_its_own_bits_beside_the_rounded_ones() -> None:
    model = tiny_model("qwen3")
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for copy_model in (True, False):
        backend = HuggingFaceBackend(model, tiny_tokenizer(), dtype="bf16", copy_model=copy_model)
        assert backend.model.dtype is torch.bfloat16
        master = backend.master_model()
        assert same_bits(dict(master.state_dict()), own)
        assert all(parameter.requires_grad for parameter in master.parameters())


def test_a_double_precision_model_is_not_brought_down_to_fp32() -> None:
    backend = HuggingFaceBackend(tiny_model("llama").double(), tiny_tokenizer())
    assert backend.master_model().dtype is torch.float64


async def test_training_goes_on_from_trained_weights_and_says_when_they_are_rounded(tmp_path, source, caplog):
    for dtype, rounded in (("fp32", False), ("bf16", True)):
        agent = agent_of(source, dtype)
        trainer = make_trainer(tmp_path, agent=agent, max_steps=1)
        await trainer.train()
        trained = trainer.learner.weights()
        await trainer.stop()
        again = make_trainer(tmp_path, agent=agent, max_steps=1)
        await again.initialize()
        kept = {name: tensor.to(agent.backend.model.dtype).float() for name, tensor in trained.items()}
        assert same_bits(again.learner.weights(), kept)
        assert ("goes on from rounded ones" in caplog.text) is rounded
        await again.close()
