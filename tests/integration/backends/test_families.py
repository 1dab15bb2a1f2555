"""Every family that docs/own-model.md names is started by an agent, from a folder, with `engine: auto`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from repository_paths import ROOT
from tiny_models import BLOCKS, CONFIGS, ODD_CONFIGS, SIZES, VOCAB, tiny_tokenizer
from trained_models import ODD
from transformers import (
    AutoModelForCausalLM,
    Mamba2Config,
    MistralConfig,
    RecurrentGemmaConfig,
    xLSTMConfig,
)

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.loading import load_backend
from stateset_agents.types.errors import ConfigurationError

PAGE = ROOT / "docs" / "own-model.md"
FAMILIES: dict[str, tuple[str, Any]] = {
    "Llama": ("lean", CONFIGS["llama"]),
    "Mistral": ("lean", lambda: MistralConfig(**SIZES, **BLOCKS, num_key_value_heads=2)),
    "Qwen2": ("lean", CONFIGS["qwen2"]),
    "Qwen3": ("lean", CONFIGS["qwen3"]),
    "GPT-2": ("lean", CONFIGS["gpt2"]),
    "Phi-3": ("general", ODD["phi3"]),
    "GPT-Neo": ("plain", ODD_CONFIGS["gpt-neo"]),
    "Qwen3-Next": ("plain", ODD_CONFIGS["qwen3-next"]),
    "Mamba": ("plain", ODD_CONFIGS["mamba"]),
    "RWKV": ("plain", ODD_CONFIGS["rwkv"]),
    "Mamba-2": (
        "plain",
        lambda: Mamba2Config(
            **SIZES, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1
        ),
    ),
    "RecurrentGemma": (
        "plain",
        lambda: RecurrentGemmaConfig(
            **SIZES,
            **{"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4},
            **{"lru_width": 32, "attention_window_size": 16},
        ),
    ),
    "xLSTM": (
        "plain",
        lambda: xLSTMConfig(vocab_size=VOCAB, hidden_size=32, num_blocks=2, num_heads=2),
    ),
}
PLAIN_NAMES = "Llama|Mistral|Qwen|GPT|Phi|Gemma|Falcon|Bloom|Mamba|RWKV|xLSTM"
NAME = re.compile(rf"(?<![\w/`])(?:\w*(?:{PLAIN_NAMES})\w*(?:-\w+)?)(?![\w`])")


def test_the_page_names_these_families_and_no_other() -> None:
    run = PAGE.read_text().partition("## How it is run")[2]
    assert set(NAME.findall(run)) == set(FAMILIES)


@pytest.mark.first(5)
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_agent_starts_each_family_by_itself(family: str, tmp_path: Path) -> None:
    engine, config = FAMILIES[family]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    settings = AgentConfig(
        model_name=str(tmp_path), chat_template="plain", max_new_tokens=4, max_context_tokens=128
    )
    async with MultiTurnAgent(settings) as agent:
        assert agent.backend.running.name == engine  # type: ignore[attr-defined]  # a HuggingFaceBackend's
        assert agent.context_length == 128
        assert isinstance(await agent.generate_response("hello"), str)


async def test_a_model_without_a_limit_asks_for_one(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(ODD_CONFIGS["mamba"]()).save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="set the agent's max_context_tokens"):
        await load_backend(str(tmp_path))
