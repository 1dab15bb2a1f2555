"""Tiny random models and from-scratch tokenizers for backend tests: no files, no hub."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    RwkvConfig,
)

from stateset_agents.backends.tokenizers import HuggingFaceTokenizer

SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
VOCAB = 256 + len(SPECIAL) + 2  # bytes, special tokens, two added tokens that are not flagged special
SIZES = {"vocab_size": VOCAB, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
BLOCKS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # the usual .02 makes flat logits, in which a wrong mask would hardly show
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, **BLOCKS, num_key_value_heads=2),
    "qwen2": lambda: Qwen2Config(**SIZES, **BLOCKS, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(
        **SIZES, **BLOCKS, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True
    ),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES,
        **BLOCKS,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "gpt2": lambda: GPT2Config(
        **SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3
    ),
}


_NEXT = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "head_dim": 8, "num_key_value_heads": 2},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 16,
}
ODD_CONFIGS: dict[str, Any] = {
    "gpt-neo": lambda: GPTNeoConfig(
        **SIZES,
        **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 256},
        **{"attention_types": [[["global", "local"], 1]], "window_size": 8, "initializer_range": 0.3},
    ),
    "qwen3-next": lambda: Qwen3NextConfig(**SIZES, **{**BLOCKS, "num_hidden_layers": 4}, **_NEXT),
    "mamba": lambda: MambaConfig(**SIZES, hidden_size=32, num_hidden_layers=2, state_size=8),
    "rwkv": lambda: RwkvConfig(**SIZES, hidden_size=32, num_hidden_layers=2, context_length=256),
}
"""Models that the slot cache can't serve: masks of their own, or a recurrent state."""


def odd_model(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ODD_CONFIGS[family]()).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # zeros would hide in a test
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tiny_model(family: str = "llama", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    if family == "gpt2":  # its biases start at zero and would hide in a test
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tiny_tokenizer(*, bos: bool = True) -> HuggingFaceTokenizer:
    """Byte-level tokens, special tokens 256-259, added non-special `<tool_call>` and `</tool_call>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: id for id, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = ByteLevel()
    raw.add_special_tokens(SPECIAL)
    raw.add_tokens(["<tool_call>", "</tool_call>"])
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 256)]
        )
    hf = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|bos|>" if bos else None,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    return HuggingFaceTokenizer(hf)
