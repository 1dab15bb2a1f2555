"""Layouts of rows of tokens in one forward: padded side by side, or packed behind one another.

Packed, the rows are one sequence in the order of their tokens, each without the prefix that it shares with
the row before it. A group's prompt P with the continuations c1, c2, c3 becomes

    P c1 | c2 | c3

where c2 attends to P and itself and has the positions from |P| on, so that P is computed once. So is what
the rows of one conversation have in common, which stand behind one another. See `packed_attention.py` for the
attention; called by `training.update.policy`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stateset_agents.training.rows.packed_attention import Packing, Segment

_PADDING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Some rows of a list, as one forward sees them."""

    rows: tuple[int, ...]
    """Indices in the list."""
    input_ids: Tensor
    """[R, T] ids; padding is -1 and on the right, where causal attention never looks at it."""
    num_padding: int = 0
    """Positions of [R, T] that hold no token."""
    flat: tuple[Tensor, ...]
    """[length of the row] for each of `rows`, the positions of its tokens in [R * T]."""
    packing: Packing | None = None
    """The attention's layout, where R is 1 and the rows are packed; None: each row is one of R."""
    pixels: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments of the forward for the pictures in the rows, in order; empty where they have none."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding left out."""
        return self.input_ids.numel() - self.num_padding

    def forget_masks(self) -> None:
        """Free the masks of a layout that is not forwarded for a while."""
        if self.packing is not None:
            self.packing.forget_masks()

    def forward_arguments(self, device: torch.device) -> dict[str, Any]:
        """The keywords of the model's forward; a packing needs `use_packed_attention` around it."""
        arguments: dict[str, Any] = {"input_ids": self.input_ids.clamp_min(0).to(device), "use_cache": False}
        if self.packing is None:
            return arguments | {name: tensor.to(device) for name, tensor in self.pixels.items()}
        return arguments | {"position_ids": self.packing.positions.to(device), "packing": self.packing}


def units_of_conversations(
    rows: Sequence[Sequence[int]], conversations: Sequence[int], *, max_tokens: int | None = None
) -> list[list[int]]:
    """Indices of rows that are to be in one layout: those of one conversation.

    `conversations`: of which each row is. One whose rows have more than `max_tokens` tokens, prefixes that
    they share counted once, is cut into several units; None: none is cut.
    """
    members: dict[int, list[int]] = {}
    for index, conversation in enumerate(conversations):
        members.setdefault(conversation, []).append(index)
    units = list(members.values())
    if max_tokens is None:
        return units
    return [
        [index for index, _ in pack]
        for unit in units
        for pack in _packs(rows, [[index] for index in unit], max_units=len(unit), max_tokens=max_tokens)
    ]


def padded_layouts(
    rows: Sequence[Sequence[int]],
    *,
    max_rows: int,
    max_tokens: int,
    units: Sequence[Sequence[int]] | None = None,
) -> list[Layout]:
    """Rows of similar length side by side, shorter ones first.

    `units`: indices of rows that stay in one layout; each row by itself unless given. At most `max_rows`
    units and `max_tokens` tokens, padding included, are in one layout; a unit of more tokens is alone in its
    layout.
    """
    batches: list[list[Sequence[int]]] = []
    units = [[index] for index in range(len(rows))] if units is None else units
    widths = [max(len(rows[index]) for index in unit) for unit in units]
    for width, unit in sorted(zip(widths, units, strict=True), key=lambda pair: (pair[0], pair[1][0])):
        current = batches[-1] if batches else []
        count = sum(map(len, current)) + len(unit)
        if current and len(current) < max_rows and count * width <= max_tokens:
            current.append(unit)
        else:
            batches.append([unit])
    return [_padded(rows, list(itertools.chain.from_iterable(batch))) for batch in batches]


def packed_layouts(
    rows: Sequence[Sequence[int]],
    *,
    max_rows: int,
    max_tokens: int,
    units: Sequence[Sequence[int]] | None = None,
    at_once: int = 1,
) -> list[Layout]:
    """Rows behind one another in the order of their tokens; a prefix that neighbours share is there once.

    Units and bounds as of `padded_layouts`; a shared prefix counts once. A unit's rows are neighbours. There
    are as few layouts as possible, and then the largest is as small as possible: it decides how much memory
    an update needs. Where `at_once` of them are to run side by side, these have at most `max_tokens`
    together; but a unit that is larger than its part of these lets them all be as for one.
    """
    units = [[index] for index in range(len(rows))] if units is None else units
    packs = _packs(rows, units, max_units=max_rows, max_tokens=max_tokens, at_once=at_once)
    return [_packed(rows, pairs) for pairs in packs]


def num_distinct_tokens(rows: Sequence[Sequence[int]]) -> int:
    """The number of tokens of the rows in one pack: prefixes that they share once."""
    ordered = sorted(map(list, rows))
    return sum(map(len, rows)) - sum(_shared_prefix(*pair) for pair in itertools.pairwise(ordered))


def _packs(
    rows: Sequence[Sequence[int]],
    units: Sequence[Sequence[int]],
    *,
    max_units: int,
    max_tokens: int,
    at_once: int = 1,
) -> list[list[tuple[int, int]]]:
    """Packs of (index, tokens shared with the row before), in the order of the rows' tokens."""
    inside = [sorted(unit, key=lambda index: (tuple(rows[index]), index)) for unit in units]
    ordered = sorted(inside, key=lambda unit: (tuple(rows[unit[0]]), unit[0]))
    order = list(itertools.chain.from_iterable(ordered))
    shared = [0, *(_shared_prefix(rows[left], rows[right]) for left, right in itertools.pairwise(order))]
    pairs = iter(zip(order, shared, strict=False))  # no rows, no pairs
    together = [list(itertools.islice(pairs, len(unit))) for unit in ordered]
    sizes = [sum(len(rows[index]) - prefix for index, prefix in unit) for unit in together]

    def pack(tokens: int) -> list[list[tuple[int, int]]]:
        """Packs with at most so many tokens in each."""
        packs: list[list[tuple[int, int]]] = []
        num_tokens = count = 0
        for unit, added in zip(together, sizes, strict=True):
            if packs and count < max_units and num_tokens + added <= tokens:
                packs[-1].extend(unit)
                num_tokens, count = num_tokens + added, count + 1
            else:
                (first, prefix), *others = unit
                packs.append([(first, 0), *others])
                num_tokens, count = added + prefix, 1
        return packs

    alone = [size + unit[0][1] for size, unit in zip(sizes, together, strict=True)]
    if max(alone, default=0) > max_tokens // at_once:
        at_once = 1
    # As few packs as the bound allows; then the smallest bound that makes so few, for the largest pack
    # decides how much memory an update needs.
    num_packs = at_once * math.ceil(len(pack(max_tokens // at_once)) / at_once)
    enough = bisect.bisect_left(range(max_tokens), True, key=lambda tokens: len(pack(tokens)) <= num_packs)
    return pack(enough)


def _padded(rows: Sequence[Sequence[int]], indices: Sequence[int]) -> Layout:
    width = max(len(rows[index]) for index in indices)
    input_ids = torch.full((len(indices), width), _PADDING, dtype=torch.long)
    flat = []
    for line, index in enumerate(indices):
        input_ids[line, : len(rows[index])] = torch.tensor(rows[index])
        flat.append(torch.arange(line * width, line * width + len(rows[index])))
    num_padding = input_ids.numel() - sum(len(rows[index]) for index in indices)
    return Layout(rows=tuple(indices), input_ids=input_ids, num_padding=num_padding, flat=tuple(flat))


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
    """The number of tokens that both begin with."""
    equal, most = 0, min(len(left), len(right))
    while equal < most:  # slices are compared in C
        middle = (equal + most + 1) // 2
        if left[equal:middle] == right[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal
