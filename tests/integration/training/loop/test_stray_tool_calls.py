"""A model that writes tool calls where no tools are, on a template without a place for results, trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from chat_templates import trl_tokenizer
from tiny_models import BLOCKS, SIZES
from transformers import AutoModelForCausalLM, LlamaConfig

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.messages import Message


@reward_function
def length(replies: list[Message]) -> float:
    return float(len(replies[0].content) % 7)


@pytest.mark.long
async def test_a_random_model_on_gemma_s_template_trains_though_it_writes_calls(tmp_path: Path) -> None:
    tokenizer = trl_tokenizer("gemma")
    torch.manual_seed(0)
    sizes = {**SIZES, **BLOCKS, "vocab_size": len(tokenizer.hf), "max_position_embeddings": 1024}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=2))
    agent = MultiTurnAgent(AgentConfig(max_new_tokens=40), backend=HuggingFaceBackend(model, tokenizer))
    environment = ConversationEnvironment(scenarios=[{"topic": "order"}, {"topic": "refund"}], max_turns=3)
    config = TrainingConfig(max_steps=1, num_generations=8, per_device_train_batch_size=2, beta=0.0)
    run = RunFolder.create(tmp_path)
    async with MultiTurnGRPOTrainer(agent, environment, length, config, run=run) as trainer:
        await trainer.train()
        rollouts = list(RunLog(trainer.run).rollouts("train"))
    stray = [one for one in rollouts if any(message.tool_calls for message in one.messages)]
    assert stray  # one token in some 270 opens a call
    assert all(one.error is None and one.advantages is not None for one in rollouts)
    answers = [message.content for one in stray for message in one.messages if message.role == "tool"]
    assert answers
    assert all(text.startswith("error: ") for text in answers)
