"""Random-init models with real tokenizers, written once under benchmarks/.models (git ignores it).

Every side loads the same files. The models never sample a control token, so that all sides make the same
number of tokens: hidden unit 0 is a positive constant that only the control tokens' rows of the head read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT
from benchmarks.shapes import SPECIAL, TEMPLATE

FOLDER = ROOT / "benchmarks" / ".models"

_CONTEXT = 2048
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1M": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6},
    "5.8M": {"hidden_size": 256, "intermediate_size": 864, "num_hidden_layers": 4, "num_attention_heads": 8},
    "52M": {"hidden_size": 640, "intermediate_size": 1840, "num_hidden_layers": 9, "num_attention_heads": 10},
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}
"""Named by their weights at a vocabulary of 4096, or by the model whose shape they have (its head tied)."""


def folder(*, size: str, vocabulary: int, family: str) -> str:
    """Where a model stands; `ensure` writes it."""
    return str(FOLDER / f"{family}-{size}-{vocabulary}")


def ensure(*, size: str, vocabulary: int, family: str) -> None:
    """Write a model unless it is there."""
    folder_path = Path(folder(size=size, vocabulary=vocabulary, family=family))
    if not (folder_path / "tokenizer.json").is_file():
        _write(folder_path, size, vocabulary, family)


def _write(folder_path: Path, size: str, vocabulary: int, family: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

    configs: dict[str, Any] = {"llama": LlamaConfig, "phi3": Phi3Config}
    torch.manual_seed(0)
    config = configs[family](
        **SIZES[size],
        vocab_size=vocabulary,
        max_position_embeddings=_CONTEXT,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0.1
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[: len(SPECIAL), 0] = -50.0
    model.save_pretrained(folder_path)
    tokenizer(vocabulary).save_pretrained(folder_path)


def tokenizer(vocabulary: int) -> Any:
    """Words w7, w8, ... and the control tokens; every word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"w{id}" for id in range(len(SPECIAL), vocabulary))]
    unknown = SPECIAL[-1]
    raw = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token=unknown))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=raw,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        unk_token=unknown,
        extra_special_tokens=list(SPECIAL[2:-1]),
        model_max_length=_CONTEXT,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
