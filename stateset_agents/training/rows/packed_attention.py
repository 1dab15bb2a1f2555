"""Attention of rows that are packed into one sequence; called by `training.update.policy`.

transformers looks up a model's attention by name at every forward. Inside `use_packed_attention` the name is
ours: each segment's queries attend to its row's keys, which lie in a few ranges of the sequence, and the
sliding window of a layer is kept by position. No mask over the whole sequence is ever made. On a CPU segments
are attended to one after the other, elsewhere together (`rectangles.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Segments of a packed sequence that are attended to together, padded to rectangles.
#
# A GPU spends longer on starting a small attention than on computing it: on an H100, 840 of them for the 28
# rows and 30 layers of a step took most of an update. So rows of like lengths go in one call. On a CPU one
# after the other is faster (`packed_attention.py`).

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
    rows = tensor[0].index_select(1, index)
    return rows.view(len(rows), count, -1, rows.shape[-1]).transpose(0, 1)


def rectangles(spans: Sequence[Span], window: int | None, shared: int, like: Tensor) -> Rectangles:
    """The rectangles of segments that together hold every token once.

    `window`: how many keys a query attends to, its own included; `shared`: how many heads share their keys.
    Tensors are on the device of `like`, masks of its dtype.
    """
    most = _MOST // shared
    whole: list[Span] = []
    behind: list[Span] = []
    for queries, row in spans:
        keys = sum(map(len, row))
        if len(queries) == keys and (window is None or window >= keys):
            whole.append((queries, row))
        else:
            behind.extend(_pieces(queries, row, most))
    num_tokens = sum(len(queries) for queries, _ in spans)
    order = torch.empty(num_tokens, dtype=torch.long)
    parts: list[Rectangle] = []
    begin = 0
    for kind, is_masked in ((whole, False), (behind, True)):
        for members in _alike(
            [(len(queries), sum(map(len, row))) for queries, row in kind], most if is_masked else None
        ):
            rows = [kind[index] for index in members]
            part = _rectangle(rows, window, shared, like) if is_masked else _causal_rectangle(rows, like)
            longest = len(part.queries) // part.count
            for place, (queries, _) in enumerate(rows):
                first = begin + place * longest
                order[queries.start : queries.stop] = torch.arange(first, first + len(queries))
            begin += len(part.queries)
            parts.append(part)
    return Rectangles(parts=tuple(parts), order=order.to(like.device))


def _pieces(queries: range, row: Sequence[range], most: int) -> Iterator[Span]:
    """A segment, cut where it would have more than `most` scores."""
    keys = sum(map(len, row))
    size = max(1, most // keys)
    for start in range(queries.start, queries.stop, size):
        stop = min(start + size, queries.stop)
        left = keys - (queries.stop - stop)
        keys_of_piece = []
        for part in row:
            if left > 0:
                keys_of_piece.append(part[:left])
            left -= len(part)
        yield range(start, stop), keys_of_piece


def _alike(sizes: Sequence[tuple[int, int]], most: int | None) -> list[list[int]]:
    """Indices of segments that go together: at most twice the scores that they need, or few for nothing, and
    no more than `most`; None: as many as there are."""
    groups: list[list[int]] = []
    longest = area = 0
    for index in sorted(range(len(sizes)), key=lambda index: sizes[index][::-1], reverse=True):
        queries, keys = sizes[index]
        if groups:
            # Sorted by their keys: the first has the most.
            wide = max(longest, queries) * sizes[groups[-1][0]][1] * (len(groups[-1]) + 1)
            useful = area + queries * keys
            if (most is None or wide <= most) and (wide <= 2 * useful or wide - useful <= _FREE):
                groups[-1].append(index)
                longest, area = max(longest, queries), useful
                continue
        groups.append([index])
        longest, area = queries, queries * keys
    return groups


def _causal_rectangle(spans: Sequence[Span], like: Tensor) -> Rectangle:
    """A rectangle of whole rows."""
    longest = max(len(queries) for queries, _ in spans)
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


_NAME = "stateset_packed"


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a row that it adds to the sequence."""

    start: int
    stop: int
    keys: tuple[tuple[int, int], ...]
    """The ranges in which the whole row lies, in the row's order; the last is the segment itself."""


@dataclass(frozen=True, kw_only=True)
class Packing:
    """The rows that are packed into a sequence of T tokens, and so which tokens attend to which."""

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
        if name in self._masks:
            return self._masks[name]
        segment = self.segments[index]
        queries, keys = segment.stop - segment.start, sum(stop - start for start, stop in segment.keys)
        window = keys if window is None else min(window, keys)
        mask = None
        if not queries == keys == window:
            distance = torch.arange(keys - queries, keys, device=like.device)[:, None]
            distance = distance - torch.arange(keys, device=like.device)  # from the key to the query
            hidden = (distance < 0) | (distance >= window)
            mask = torch.zeros_like(distance, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
        self._masks[name] = mask
        return mask

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


def _attend_in_fp32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """`packed_attention`, in fp32 on a CPU where autocast would attend in half precision.

    torch's CPU attention takes 1.7 times as long in bf16 as in fp32, forward and backward, on rows of a few
    hundred tokens, and it rounds. Values alone tell: rotary embeddings may leave queries and keys in fp32.
    """
    if not query.is_cpu or value.dtype not in (torch.bfloat16, torch.float16):
        return packed_attention(module, query, key, value, mask, **options)
    with torch.autocast("cpu", enabled=False):
        output, _ = packed_attention(module, query.float(), key.float(), value.float(), mask, **options)
    return output.to(value.dtype), None


@contextlib.contextmanager
def use_packed_attention(model: Any, name: str | None = None) -> Iterator[None]:
    """A context in which `model` (a trunk) uses the attention of packed rows, or the one of that name."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend_in_fp32)
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
