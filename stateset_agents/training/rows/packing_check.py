"""Is what a model computes for packed rows what it computes for each alone? The policy tries it before it
trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stateset_agents.training.rows.fused_layers import fused_hidden, why_not_fused
from stateset_agents.training.rows.layout import Layout, packed_layouts
from stateset_agents.training.rows.packed_attention import use_packed_attention

_TOLERANCE = 2e-5
"""Of the largest entry of a hidden state. Another order of sums moves it by 3e-7; a leak from one row into
the next moves it by a tenth in trained weights, and by 1e-4 in untrained ones."""


@torch.no_grad()
def why_not_packed(trunk: Any) -> str | None:
    """None where the trunk's hidden states of packed rows are those of plain forwards, row by row; else the
    reason against packing.

    The rows share a prompt and are longer than any window within which the model attends.
    """
    config = trunk.config.get_text_config()
    if config._attn_implementation in (None, "eager"):
        return f"{type(trunk).__name__} runs with eager attention"
    modes = [(module, module.training) for module in trunk.modules()]
    trunk.eval()
    try:
        difference = max(_differences(trunk, _rows(config), lambda layout: _forwarded(trunk, layout)))
    except Exception as error:  # the model's own code, called in a way that it may not know
        return f"{type(trunk).__name__} refuses them: {type(error).__name__}"
    finally:
        for module, training in modes:
            module.training = training
    if difference < _TOLERANCE:
        return None
    return f"{type(trunk).__name__} would see other hidden states, by up to {difference:.1g} of their size"


@torch.no_grad()
def is_fused_exactly(trunk: Any) -> bool:
    """Are the hidden states of `fused_hidden`, with nothing rounded, those of plain forwards? The release of
    transformers that is installed may compute something else than the one that it was written for."""
    if why_not_fused(trunk) is not None:
        return False
    config = trunk.config.get_text_config()
    try:
        differences = _differences(
            trunk, _rows(config), lambda layout: fused_hidden(trunk, layout, dtype=torch.float32)
        )
    except Exception:  # the model's own code, called in a way that it may not know
        return False
    return max(differences) < _TOLERANCE


def _rows(config: Any) -> list[list[int]]:
    """Three rows, two of which share a prompt longer than any window; one of two tokens."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    longest = getattr(config, "max_position_embeddings", None) or 2**20
    prompt = min(max([24, *(size + 8 for size in windows if isinstance(size, int))]), max(2, longest - 8))
    ids = [(7 * position + position**2) % (config.vocab_size - 1) for position in range(prompt + 8)]
    other = [(token + 1) % (config.vocab_size - 1) for token in ids[prompt:]]
    return [ids, ids[:prompt] + other[:5], ids[1:3]]


def _forwarded(trunk: Any, layout: Layout) -> Tensor:
    with use_packed_attention(trunk):
        states: Tensor = trunk(**layout.forward_arguments(next(trunk.parameters()).device)).last_hidden_state
    return states[0]


def _differences(trunk: Any, rows: list[list[int]], hidden: Callable[[Layout], Tensor]) -> list[float]:
    """Of each row's `hidden` states [T, H] in one layout from those alone, relative to the largest entry."""
    device = next(trunk.parameters()).device
    (layout,) = packed_layouts(rows, max_rows=len(rows), max_tokens=sum(map(len, rows)))
    packed = hidden(layout)
    differences = []
    for index, flat in zip(layout.rows, layout.flat, strict=True):
        row = torch.tensor([rows[index]], device=device)
        alone: Tensor = trunk(input_ids=row, use_cache=False).last_hidden_state[0]
        differences.append(float((packed[flat.to(device)] - alone).abs().max() / alone.abs().max()))
    return differences
