"""A tiny random SmolVLM with its processor: a vision-language model without hub or files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import BLOCKS, SIZES, VOCAB, tiny_tokenizer
from transformers import (
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Reads content as parts, as SmolVLM's own does."""
PLACES = 4
"""Tokens of a picture of 32 x 32 pixels."""
_FRAMES = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")


def tiny_processor(template: str = TEMPLATE) -> Any:
    """Of pictures of 32 x 32 pixels."""
    tokenizer = tiny_tokenizer(bos=False).hf
    tokenizer.add_tokens(list(_FRAMES), special_tokens=True)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, do_image_splitting=False
    )
    processor = Idefics3Processor(images, tokenizer, image_seq_len=PLACES, chat_template=template)
    processor.tokenizer.chat_template = template
    return processor


def tiny_vlm(seed: int = 0) -> Any:
    """A random one, whose logits depend on the picture."""
    torch.manual_seed(seed)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = SmolVLMConfig(
        image_token_id=VOCAB,  # the first token behind the tiny tokenizer's own
        scale_factor=2,
        pad_token_id=SIZES["pad_token_id"],
        vision_config={**vision, "image_size": 32, "patch_size": 8, "initializer_range": 0.3},
        text_config={
            **BLOCKS,
            **SIZES,
            "model_type": "llama",
            "vocab_size": VOCAB + len(_FRAMES),
            "num_key_value_heads": 2,
        },
    )
    model = SmolVLMForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def save_tiny_vlm(folder: Path, *, template: str = TEMPLATE, seed: int = 0) -> str:
    """The folder's name, as `AgentConfig.model_name` takes it."""
    tiny_vlm(seed).save_pretrained(folder)
    tiny_processor(template).save_pretrained(folder)
    return str(folder)
