"""How many tokens go through a model in one pass, where nobody says; called by the learner."""

from __future__ import annotations

from typing import Any

import torch

_ON_GPU = 16384
"""They fill a GPU."""
_MOST_ON_CPU = 2048
"""A CPU's caches hold no more of the smallest models."""
_LEAST_ON_CPU = 512
"""Matrix products of fewer rows take longer."""
_ACTIVATIONS = 2**30
"""Bytes that a pass on a CPU may keep for its backward: what a model of 135 million parameters needs for 750
tokens, or 1,400 in fused layers; 2048 would take more than its weights, gradients and moments together."""


def default_pass_tokens(model: Any, device: torch.device, *, fused: bool = False) -> int:
    """Tokens of a pass, padding included; `fused`: through the layers of `fused_layers.py`."""
    if device.type != "cpu":
        return _ON_GPU
    return max(_LEAST_ON_CPU, min(_MOST_ON_CPU, _ACTIVATIONS // activation_bytes(model, fused=fused)))


def activation_bytes(model: Any, *, fused: bool = False) -> int:
    """About what a layered model keeps of one token for its backward pass: of each layer ten times its width
    (norms, queries, keys, values, attention, residuals) and four times that of its feed-forward, in fp32;
    fused, where operands are in bf16, as much as seven and one and a half times in fp32.

    1 for a model whose config names no layers.
    """
    config = model.config.get_text_config()
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not width or not layers:
        return 1
    inner = getattr(config, "intermediate_size", None) or 4 * width
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    return int(4 * layers * (7 * width + 1.5 * inner if fused else 10 * width + 4 * inner))
