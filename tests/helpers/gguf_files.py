"""A tiny random Llama as a GGUF file, written by the gguf package: `from gguf_files import write_gguf`."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_models import BLOCKS, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["OWN_TEMPLATE", "tiny_llama", "write_gguf", "write_wheel"]

OWN_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's: it speaks ChatML, and lists no tools."""
_CONTROLS = ["<|im_start|>", "<|im_end|>"]


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """With the vocabulary of the file: 262 bytes and tokens of the tiny tokenizer, a merge, ChatML's two."""
    import torch

    torch.manual_seed(seed)
    sizes = {"vocab_size": 265, "bos_token_id": 263, "eos_token_id": 264, "pad_token_id": 264}
    return LlamaForCausalLM(LlamaConfig(**sizes, **BLOCKS, num_key_value_heads=2)).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> None:
    """Write the model; `kind` of its matrices, as llama.cpp converts one (its norms stay in fp32)."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _paired(values, heads)
        stored = names.get_name(name.removesuffix(".weight"))
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{stored}.weight", values.copy())
        else:
            writer.add_tensor(f"{stored}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, file: Path) -> None:
    """A package `tiny-model` 1.0 that holds the file, as pip takes it, with a dependency that nobody has."""
    info = "tiny_model-1.0.dist-info"
    texts = {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        "Requires-Dist: not-there-9\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": "Do as you like.\n",
        f"{info}/RECORD": "",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in texts.items():
            wheel.writestr(name, text)
        wheel.write(file, "tiny_model/tiny.gguf")


def _paired(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows in llama.cpp's order, in which the two numbers that RoPE turns stand side by side."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    hf = tiny_tokenizer(bos=False).hf
    special = {token.content: token.special for token in hf.added_tokens_decoder.values()}
    tokens = [*hf.convert_ids_to_tokens(range(len(hf))), "he", *_CONTROLS]
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[True if token in _CONTROLS else special.get(token)] for token in tokens])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(OWN_TEMPLATE)
