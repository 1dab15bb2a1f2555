"""How many tokens go through a model in one pass, where nobody says; called by the learner."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["default_pass_tokens"]

_ON_GPU = 16384
"""They fill a GPU."""
_MOST_ON_CPU = 2048
"""A CPU's caches hold no more of the smallest models."""
_LEAST_ON_CPU = 512
"""Matrix products of fewer rows take longer."""
_ACTIVATIONS = 2**30
"""Bytes that a pass on a CPU may keep for its backward: what a model of 135 million parameters needs for 750
tokens; 2048 would take more than its weights, gradients and moments together."""


def default_pass_tokens(model: Any, device: torch.device) -> int:
    """Tokens of a pass, padding included."""
    if device.type != "cpu":
        return _ON_GPU
    return max(_LEAST_ON_CPU, min(_MOST_ON_CPU, _ACTIVATIONS // activation_bytes(model)))


def activation_bytes(model: Any) -> int:
    """About what a layered model keeps of one token for its backward pass, in fp32: of each layer ten times
    its width (norms, queries, keys, values, attention, residuals) and four times that of its feed-forward.

    1 for a model whose config names no layers.
    """
    config = model.config.get_text_config()
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not width or not layers:
        return 1
    inner = getattr(config, "intermediate_size", None) or 4 * width
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    return int(4 * layers * (10 * width + 4 * inner))
