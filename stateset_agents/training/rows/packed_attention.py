"""Attention of rows that are packed into one sequence; called by `training.update.policy`.

transformers looks up a model's attention by name at every forward. Inside `use_packed_attention` the name is
ours: each segment's queries attend to its row's keys, which lie in a few ranges of the sequence, and the
sliding window of a layer is kept by position. No mask over the whole sequence is ever made. On a CPU segments
are attended to one after the other, elsewhere together (`rectangles.py`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stateset_agents.training.rows.rectangles import Rectangles, rectangles

_NAME = "stateset_packed"


@dataclass(frozen=True, slots=True)
class Segment:
    """What a row adds to the sequence."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    """The ranges in which the whole row lies, in the row's order; the last is the segment itself."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which tokens attend to which in a sequence of T tokens."""

    positions: Tensor
    """[1, T] each token's position in its row."""
    segments: tuple[Segment, ...]
    _masks: dict[tuple[int, int | None, torch.dtype, torch.device], Tensor | None] = field(
        default_factory=dict, repr=False
    )
    _rectangles: dict[tuple[int | None, int, torch.dtype, torch.device], Rectangles] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def pieces(self) -> tuple[list[int], list[list[int]]]:
        """Lengths of the pieces of the sequence when it is cut wherever a range begins or ends; and for each
        segment, which of these pieces make up its row."""
        cuts = sorted({end for segment in self.segments for bounds in segment.keys for end in bounds})
        number = {start: index for index, start in enumerate(cuts)}
        return [stop - start for start, stop in itertools.pairwise(cuts)], [
            [index for start, stop in segment.keys for index in range(number[start], number[stop])]
            for segment in self.segments
        ]

    def mask(self, index: int, window: int | None, like: Tensor) -> Tensor | None:
        """[L, K] of a segment's L queries and K keys, 0 where they attend and -inf elsewhere; None for plain
        causal attention."""
        name = (index, window, like.dtype, like.device)
        if name not in self._masks:
            segment = self.segments[index]
            queries, keys = segment.stop - segment.start, sum(stop - start for start, stop in segment.keys)
            self._masks[name] = _causal_mask(queries, keys, window, like)
        return self._masks[name]

    @cached_property
    def longest_row(self) -> int:
        """Tokens of the row with the most."""
        return max(sum(stop - start for start, stop in segment.keys) for segment in self.segments)

    def rectangles(self, window: int | None, shared: int, like: Tensor) -> Rectangles:
        """All segments, in few calls; `shared` heads share their keys."""
        if window is not None and window >= self.longest_row:
            window = None
        name = (window, shared, like.dtype, like.device)
        if name not in self._rectangles:
            spans = [
                (range(segment.start, segment.stop), [range(*bounds) for bounds in segment.keys])
                for segment in self.segments
            ]
            self._rectangles[name] = rectangles(spans, window, shared, like)
        return self._rectangles[name]

    def forget_masks(self) -> None:
        """Free the memory of the masks, which may be larger than the activations; they are made again."""
        self._masks.clear()
        self._rectangles.clear()


def _causal_mask(queries: int, keys: int, window: int | None, like: Tensor) -> Tensor | None:
    if window is None or window > keys:
        window = keys
    if queries == keys == window:
        return None
    distance = torch.arange(keys - queries, keys, device=like.device)[:, None]
    distance = distance - torch.arange(keys, device=like.device)  # from the key to the query
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros_like(distance, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention as transformers calls it: [1, heads, T, D] queries, [1, key heads, T, D] keys and
    values -> [1, T, heads, D]."""
    if not query.is_cpu:
        # Under autocast rotary embeddings leave queries and keys in fp32; the mask would be cast, and kept,
        # in each layer.
        query, key = query.to(value.dtype), key.to(value.dtype)
        together = packing.rectangles(sliding_window, query.shape[1] // key.shape[1], query)
        return together.attend(query, key, value, dropout=dropout, scaling=scaling), None
    grouped = query.shape[1] != key.shape[1]
    sizes, pieces_of_rows = packing.pieces
    keys, values = torch.split(key, sizes, dim=2), torch.split(value, sizes, dim=2)
    queries = torch.split(query, [segment.stop - segment.start for segment in packing.segments], dim=2)
    outputs = []
    for index, (segment, pieces) in enumerate(zip(queries, pieces_of_rows, strict=True)):
        mask = packing.mask(index, sliding_window, query)
        output = F.scaled_dot_product_attention(
            segment,
            torch.cat([keys[piece] for piece in pieces], dim=2),
            torch.cat([values[piece] for piece in pieces], dim=2),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _in_fp32_on_cpu(attention: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """On a CPU, what autocast would attend to in half precision is attended to in fp32.

    torch's CPU attention takes 1.7 times as long in bf16 as in fp32, forward and backward, on rows of a few
    hundred tokens, and it rounds. Values alone tell: rotary embeddings may leave queries and keys in fp32.
    """

    @functools.wraps(attention)
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if not query.is_cpu or value.dtype not in (torch.bfloat16, torch.float16):
            return attention(module, query, key, value, mask, **options)
        with torch.autocast("cpu", enabled=False):
            output, _ = attention(module, query.float(), key.float(), value.float(), mask, **options)
        return output.to(value.dtype), None

    return attend


@contextlib.contextmanager
def use_packed_attention(model: Any, name: str | None = None) -> Iterator[None]:
    """Inside, `model` (a trunk) uses the attention of packed rows, or the one of that name."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _in_fp32_on_cpu(packed_attention))
    config = model.config
    previous = config._attn_implementation
    config._attn_implementation = _NAME if name is None else name
    try:
        yield
    finally:
        config._attn_implementation = previous


def recompute_contexts(
    model: Any, linears: Callable[[], AbstractContextManager[None]]
) -> Callable[[], tuple[Any, Any]]:
    """`context_fn` of `torch.utils.checkpoint`: a recomputed layer attends and multiplies as at first.

    `model` is a trunk, or None where rows are never packed; `linears` is the context of its forward.
    """

    @contextlib.contextmanager
    def recompute(name: str | None) -> Iterator[None]:
        with contextlib.nullcontext() if name is None else use_packed_attention(model, name), linears():
            yield

    def contexts() -> tuple[Any, Any]:
        name = None if model is None else model.config._attn_implementation
        return contextlib.nullcontext(), recompute(name)

    return contexts
