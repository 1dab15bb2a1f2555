"""How rows of tokens are laid out in one forward: padded side by side, or packed behind one another.

Packed, the rows are one sequence in the order of their tokens, each without the prefix that it shares with
the row before it. A group's prompt P with the continuations c1, c2, c3 becomes

    P c1 | c2 | c3

where c2 attends to P and itself and has the positions from |P| on, so that P is computed once. See
`packed_attention.py` for the attention; called by `training.update.batch` and `training.update.critic`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stateset_agents.training.rows.packed_attention import Packing, Segment

__all__ = ["Layout", "packed_layouts", "padded_layouts"]

_PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Some rows of a list, as one forward sees them."""

    rows: tuple[int, ...]
    """Indices in the list."""
    input_ids: Tensor
    """[R, T] ids; padding is -1 and on the right, where causal attention never looks at it."""
    flat: tuple[Tensor, ...]
    """[length of the row] for each of `rows`, the positions of its tokens in [R * T]."""
    packing: Packing | None = None
    """Which tokens attend to which, where R is 1 and the rows are packed; None: each row is one of R."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding left out."""
        return self.input_ids.numel() - self.num_padding

    @property
    def num_padding(self) -> int:
        """Positions of [R, T] that hold no token."""
        return int((self.input_ids == _PADDING).sum())

    def forward_arguments(self, device: torch.device) -> dict[str, Any]:
        """The keywords of the model's forward; a packing needs `use_packed_attention` around it."""
        arguments: dict[str, Any] = {"input_ids": self.input_ids.clamp_min(0).to(device), "use_cache": False}
        if self.packing is None:
            return arguments
        return arguments | {"position_ids": self.packing.positions.to(device), "packing": self.packing}


def padded_layouts(rows: Sequence[Sequence[int]], *, max_rows: int, max_tokens: int) -> list[Layout]:
    """Rows of similar length side by side, shorter ones first.

    At most `max_rows` rows and `max_tokens` tokens, padding included, are in one layout; a row longer than
    `max_tokens` is alone in its layout.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(rows)), key=lambda index: (len(rows[index]), index)):
        current = batches[-1] if batches else []
        if current and len(current) < max_rows and (len(current) + 1) * len(rows[index]) <= max_tokens:
            current.append(index)
        else:
            batches.append([index])
    return [_padded(rows, indices) for indices in batches]


def packed_layouts(rows: Sequence[Sequence[int]], *, max_rows: int, max_tokens: int) -> list[Layout]:
    """Rows behind one another in the order of their tokens; a prefix that neighbours share is there once.

    Bounds as of `padded_layouts`; a shared prefix counts once. There are as few layouts as possible, and
    then the largest is as small as possible: it decides how much memory an update needs.
    """
    order = sorted(range(len(rows)), key=lambda index: (tuple(rows[index]), index))
    prefixes = [0, *(_shared_prefix(rows[left], rows[right]) for left, right in itertools.pairwise(order))]

    def pack(tokens: int) -> list[list[tuple[int, int]]]:
        """Packs of (index, tokens shared with the row before) with at most so many tokens."""
        packs: list[list[tuple[int, int]]] = []
        used = 0
        for index, shared in zip(order, prefixes, strict=False):  # no rows, no pairs
            added = len(rows[index]) - shared
            if packs and len(packs[-1]) < max_rows and used + added <= tokens:
                packs[-1].append((index, shared))
                used += added
            else:
                packs.append([(index, 0)])
                used = len(rows[index])
        return packs

    fewest = len(pack(max_tokens))
    enough = bisect.bisect_left(range(max_tokens), True, key=lambda tokens: len(pack(tokens)) == fewest)
    return [_packed(rows, pairs) for pairs in pack(enough)]


def _padded(rows: Sequence[Sequence[int]], indices: Sequence[int]) -> Layout:
    width = max(len(rows[index]) for index in indices)
    input_ids = torch.full((len(indices), width), _PADDING, dtype=torch.long)
    flat = []
    for line, index in enumerate(indices):
        input_ids[line, : len(rows[index])] = torch.tensor(rows[index])
        flat.append(torch.arange(line * width, line * width + len(rows[index])))
    return Layout(rows=tuple(indices), input_ids=input_ids, flat=tuple(flat))


def _packed(rows: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]]) -> Layout:
    ids: list[int] = []
    positions: list[int] = []
    flat: list[Tensor] = []
    segments: list[Segment] = []
    ranges: list[tuple[int, int]] = []  # of the row's tokens in the sequence, in the order of the row
    for index, shared in pairs:
        row, start = rows[index], len(ids)
        stop = start + len(row) - shared
        ids.extend(row[shared:])
        positions.extend(range(shared, len(row)))
        ranges = [*_first(ranges, shared), *([(start, stop)] if stop > start else [])]
        flat.append(torch.cat([torch.arange(*bounds) for bounds in ranges]))
        if stop > start:
            segments.append(Segment(start=start, stop=stop, keys=tuple(ranges)))
    return Layout(
        rows=tuple(index for index, _ in pairs),
        input_ids=torch.tensor([ids]),
        flat=tuple(flat),
        packing=Packing(positions=torch.tensor([positions]), segments=tuple(segments)),
    )


def _first(ranges: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The ranges that hold the first `count` tokens: 5 of (0, 4), (9, 12) -> (0, 4), (9, 10)."""
    first = []
    for start, stop in ranges:
        length = min(stop - start, count)
        if length:
            first.append((start, start + length))
        count -= length
    return first


def _shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in equal)
