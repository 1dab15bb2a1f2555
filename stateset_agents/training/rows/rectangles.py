"""Segments of a packed sequence that are attended to together, padded to rectangles.

A GPU spends longer on starting a small attention than on computing it: on an H100, 840 of them for the 28
rows and 30 layers of a step took most of an update. So rows of like lengths go in one call. On a CPU one
after the other is faster (`packed_attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_MULTIPLE = 8
"""Keys under a mask are padded to a multiple of this, as fused attention kernels want it."""
_FREE = 2**20
"""Scores that may be computed for nothing rather than start another call."""
_MOST = 2**26
"""Scores of one call under a mask, of the heads that share keys: its mask has as many entries."""

Span = tuple[range, Sequence[range]]
"""The tokens of a segment, and the ranges in which the row lies up to its end, in the row's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """S segments of up to L queries and K keys, padded on the right."""

    count: int
    """S."""
    queries: Tensor
    """[S * L] index of each query in the sequence, of any token for padding."""
    keys: Tensor
    """[S * K] likewise."""
    mask: Tensor | None
    """[S, 1, shared * L, K] 0 where a query attends and -inf elsewhere; a padded query attends to something.
    None where each segment is a whole row: then causal attention never looks at the padding."""


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
        outputs = []
        for part in self.parts:
            queries = _cut(query, part.queries, part.count)
            keys, values = _cut(key, part.keys, part.count), _cut(value, part.keys, part.count)
            shape = queries.shape
            if part.mask is not None:
                # Heads that share keys are several queries of one head: so keys need not be repeated, which
                # kernels that take a mask may not do without.
                queries = queries.reshape(part.count, key.shape[1], -1, shape[-1])
            output = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=part.mask,
                dropout_p=dropout,
                is_causal=part.mask is None,
                scale=scaling,
                enable_gqa=part.mask is None and shape[1] != key.shape[1],
            )
            outputs.append(output.reshape(shape).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.order)[None]


def _cut(tensor: Tensor, index: Tensor, count: int) -> Tensor:
    """[1, heads, T, D] -> [S, heads, tokens of a segment, D]."""
    chosen = tensor[0].index_select(1, index)
    return chosen.view(len(chosen), count, -1, chosen.shape[-1]).transpose(0, 1)


def rectangles(spans: Sequence[Span], window: int | None, shared: int, like: Tensor) -> Rectangles:
    """The rectangles of segments that together hold every token once.

    `window`: how many keys a query attends to, its own included; `shared`: how many heads share their keys.
    Tensors are on the device of `like`, masks of its dtype.
    """
    most = _MOST // shared
    whole: list[Span] = []
    behind: list[Span] = []
    for own, row in spans:
        keys = sum(map(len, row))
        if len(own) == keys and (window is None or window >= keys):
            whole.append((own, row))
        else:
            behind.extend(_pieces(own, row, most))
    num_tokens = sum(len(own) for own, _ in spans)
    order = torch.empty(num_tokens, dtype=torch.long)
    parts: list[Rectangle] = []
    begin = 0
    for kind, is_masked in ((whole, False), (behind, True)):
        for members in _alike(
            [(len(own), sum(map(len, row))) for own, row in kind], most if is_masked else None
        ):
            chosen = [kind[index] for index in members]
            part = _rectangle(chosen, window, shared, like) if is_masked else _causal_rectangle(chosen, like)
            longest = len(part.queries) // part.count
            for place, (own, _) in enumerate(chosen):
                first = begin + place * longest
                order[own.start : own.stop] = torch.arange(first, first + len(own))
            begin += len(part.queries)
            parts.append(part)
    return Rectangles(parts=tuple(parts), order=order.to(like.device))


def _pieces(own: range, row: Sequence[range], most: int) -> Iterator[Span]:
    """A segment, cut where it would have more than `most` scores."""
    keys = sum(map(len, row))
    size = max(1, most // keys)
    for start in range(own.start, own.stop, size):
        stop = min(start + size, own.stop)
        left = keys - (own.stop - stop)
        seen = []
        for part in row:
            if left > 0:
                seen.append(part[:left])
            left -= len(part)
        yield range(start, stop), seen


def _alike(sizes: Sequence[tuple[int, int]], most: int | None) -> list[list[int]]:
    """Indices of segments that go together: at most twice the scores that they need, or few for nothing, and
    no more than `most`; None: as many as there are."""
    groups: list[list[int]] = []
    longest = needed = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index][::-1], reverse=True):
        queries, keys = sizes[index]
        if groups:
            # Sorted by their keys: the first has the most.
            wide = max(longest, queries) * sizes[groups[-1][0]][1] * (len(groups[-1]) + 1)
            useful = needed + queries * keys
            if (most is None or wide <= most) and (wide <= 2 * useful or wide - useful <= _FREE):
                groups[-1].append(index)
                longest, needed = max(longest, queries), useful
                continue
        groups.append([index])
        longest, needed = queries, queries * keys
    return groups


def _causal_rectangle(spans: Sequence[Span], like: Tensor) -> Rectangle:
    """Of whole rows."""
    longest = max(len(own) for own, _ in spans)
    index = torch.zeros(len(spans), longest, dtype=torch.long)
    for place, (_, row) in enumerate(spans):
        ids = torch.cat([torch.arange(part.start, part.stop) for part in row])
        index[place, : len(ids)] = ids
    both = index.flatten().to(like.device)
    return Rectangle(count=len(spans), queries=both, keys=both, mask=None)


def _rectangle(spans: Sequence[Span], window: int | None, shared: int, like: Tensor) -> Rectangle:
    longest = max(len(own) for own, _ in spans)
    widest = max(sum(map(len, row)) for _, row in spans)
    widest += -widest % _MULTIPLE
    queries = torch.zeros(len(spans), longest, dtype=torch.long)
    keys = torch.zeros(len(spans), widest, dtype=torch.long)
    last = torch.empty(len(spans), longest, dtype=torch.int32)  # the last key that a query attends to
    for index, (own, row) in enumerate(spans):
        ids = torch.cat([torch.arange(part.start, part.stop) for part in row])
        queries[index, : len(own)] = torch.arange(own.start, own.stop)
        keys[index, : len(ids)] = ids
        last[index] = (torch.arange(longest) + len(ids) - len(own)).clamp_max(len(ids) - 1)
    columns = torch.arange(widest, dtype=torch.int32, device=like.device)
    last = last.to(like.device)[:, :, None]
    hidden = columns > last
    if window is not None:
        hidden |= columns <= last - window
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return Rectangle(
        count=len(spans),
        queries=queries.flatten().to(like.device),
        keys=keys.flatten().to(like.device),
        mask=mask.masked_fill_(hidden, float("-inf"))[:, None].repeat(1, 1, shared, 1),
    )
