"""Segments of a packed sequence that are attended to together, padded to rectangles.

A GPU spends longer on starting a small attention than on computing it: on an H100, 840 of them for the 28
rows and 30 layers of a step took seven times as long as a padded batch. So rows of like lengths go in one
call. On a CPU one after the other is faster (`packed_attention.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Rectangle", "Rectangles", "Span", "rectangles"]

_MULTIPLE = 8
"""Keys are padded to a multiple of this, as the masks of fused attention kernels want it."""
_FREE = 2**20
"""Scores that may be computed for nothing rather than start another call."""
_MOST = 2**26
"""Scores of one call and head."""

Span = tuple[range, Sequence[range]]
"""The tokens of a segment, and the ranges in which the whole row lies, in the row's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """S segments of up to L queries and K keys."""

    count: int
    """S."""
    queries: Tensor
    """[S * L] index of each query in the sequence, of any token for padding."""
    keys: Tensor
    """[S * K] likewise."""
    mask: Tensor
    """[S, 1, L, K] 0 where a query attends and -inf elsewhere; a padded query attends to something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """All segments of a sequence of T tokens."""

    parts: tuple[Rectangle, ...]
    order: Tensor
    """[T] where each token of the sequence lies among the queries of all parts."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, dropout: float, scaling: float | None
    ) -> Tensor:
        """[1, heads, T, D] queries, [1, key heads, T, D] keys and values -> [1, T, heads, D]."""
        shared = query.shape[1] // key.shape[1]
        outputs = []
        for part in self.parts:
            keys, values = _cut(key, part.keys, part.count), _cut(value, part.keys, part.count)
            if shared > 1:  # not every fused kernel takes a mask and heads that share keys
                keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
            output = F.scaled_dot_product_attention(
                _cut(query, part.queries, part.count),
                keys,
                values,
                attn_mask=part.mask,
                dropout_p=dropout,
                scale=scaling,
            )
            outputs.append(output.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.order)[None]


def _cut(tensor: Tensor, index: Tensor, count: int) -> Tensor:
    """[1, heads, T, D] -> [S, heads, tokens of a segment, D]."""
    chosen = tensor[0].index_select(1, index)
    return chosen.view(len(chosen), count, -1, chosen.shape[-1]).transpose(0, 1)


def rectangles(spans: Sequence[Span], window: int | None, like: Tensor) -> Rectangles:
    """The rectangles of segments that together hold every token once; `window`: how many keys a query
    attends to, its own included. Tensors are on the device of `like`, masks of its dtype."""
    sizes = [(len(own), sum(map(len, row))) for own, row in spans]
    order = torch.empty(sum(queries for queries, _ in sizes), dtype=torch.long)
    parts, begin = [], 0
    for members in _alike(sizes):
        longest = max(sizes[index][0] for index in members)
        part = _rectangle([spans[index] for index in members], longest, window, like)
        for place, index in enumerate(members):
            own, _ = spans[index]
            first = begin + place * longest
            order[own.start : own.stop] = torch.arange(first, first + len(own))
        begin += part.count * longest
        parts.append(part)
    return Rectangles(parts=tuple(parts), order=order.to(like.device))


def _alike(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Indices of segments that go together: at most twice the scores that they need, or few for nothing."""
    groups: list[list[int]] = []
    longest = needed = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index][::-1], reverse=True):
        queries, keys = sizes[index]
        if groups:
            # Sorted by their keys: the first has the most.
            wide = max(longest, queries) * sizes[groups[-1][0]][1] * (len(groups[-1]) + 1)
            useful = needed + queries * keys
            if wide <= _MOST and (wide <= 2 * useful or wide - useful <= _FREE):
                groups[-1].append(index)
                longest, needed = max(longest, queries), useful
                continue
        groups.append([index])
        longest, needed = queries, queries * keys
    return groups


def _rectangle(spans: Sequence[Span], longest: int, window: int | None, like: Tensor) -> Rectangle:
    widest = max(sum(map(len, row)) for _, row in spans)
    widest += -widest % _MULTIPLE
    queries = torch.zeros(len(spans), longest, dtype=torch.long)
    keys = torch.zeros(len(spans), widest, dtype=torch.long)
    last = torch.empty(len(spans), longest, dtype=torch.long)  # the last key that a query attends to
    for index, (own, row) in enumerate(spans):
        ids = torch.cat([torch.arange(part.start, part.stop) for part in row])
        queries[index, : len(own)] = torch.arange(own.start, own.stop)
        keys[index, : len(ids)] = ids
        last[index] = (torch.arange(longest) + len(ids) - len(own)).clamp_max(len(ids) - 1)
    distance = last.to(like.device)[:, :, None] - torch.arange(widest, device=like.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return Rectangle(
        count=len(spans),
        queries=queries.flatten().to(like.device),
        keys=keys.flatten().to(like.device),
        mask=mask.masked_fill_(hidden, float("-inf"))[:, None],
    )
