"""A fresh network for a vocabulary of a thousand words, as the embedded model and an example begin."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stateset_agents.backends.pretrained.load_lock import loading
from stateset_agents.types.seeds import derive


def new_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    max_new_tokens: int = 48,
    num_hidden_layers: int = 2,
    intermediate_size: int = 384,
) -> Qwen3ForCausalLM:
    """A fresh network of about half a million parameters.

    Its weights are drawn with a standard deviation of .08: with the usual .02, copying an order id did
    not emerge within 500 steps. Its context is the tokenizer's `model_max_length`; `max_new_tokens` is what
    plain transformers generates unless told otherwise.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=0.08,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with (
        loading(),
        torch.random.fork_rng(devices=[]),
    ):  # building draws from the global generator; leave it as it was
        model = Qwen3ForCausalLM(config)
    weights = torch.Generator().manual_seed(derive(seed, "initial weights"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, config.initializer_range, generator=weights)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped in transformers
        do_sample=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model
