"""How rows of tokens lie in one forward: padded side by side, or packed behind one another.

Packed, the rows stand in one sequence in the order of their tokens, each without what it has in common
with the row before it. A group's prompt P with the continuations c1, c2, c3 becomes

    P c1 | c2 | c3

where c2 attends to P and itself and stands at the positions from |P| on, so that P is computed once. See
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

    places: tuple[int, ...]
    """Which rows of the list."""
    input_ids: Tensor
    """[R, T] ids; padding is -1 and on the right, where causal attention never looks at it."""
    flat: tuple[Tensor, ...]
    """[length of the row] for each of `places`, where in [R * T] its tokens lie."""
    packing: Packing | None = None
    """Who attends to whom, where R is 1 and the rows lie behind one another; None: each row is one of R."""

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model, padding left out."""
        return self.input_ids.numel() - self.num_padding

    @property
    def num_padding(self) -> int:
        """Positions of [R, T] that hold no token."""
        return int((self.input_ids == _PADDING).sum())

    def forward_arguments(self, device: torch.device) -> dict[str, Any]:
        """What the model is called with; `packed_attention.attending` must be open for a packing."""
        arguments: dict[str, Any] = {"input_ids": self.input_ids.clamp_min(0).to(device), "use_cache": False}
        if self.packing is None:
            return arguments
        return arguments | {"position_ids": self.packing.positions.to(device), "packing": self.packing}


def padded_layouts(rows: Sequence[Sequence[int]], *, max_rows: int, max_tokens: int) -> list[Layout]:
    """Rows of like length side by side, shorter ones first.

    At most `max_rows` rows and `max_tokens` tokens, padding included, are in one layout; a row longer than
    `max_tokens` stands alone.
    """
    cuts: list[list[int]] = []
    for place in sorted(range(len(rows)), key=lambda place: (len(rows[place]), place)):
        current = cuts[-1] if cuts else []
        if current and len(current) < max_rows and (len(current) + 1) * len(rows[place]) <= max_tokens:
            current.append(place)
        else:
            cuts.append([place])
    return [_side_by_side(rows, places) for places in cuts]


def packed_layouts(rows: Sequence[Sequence[int]], *, max_rows: int, max_tokens: int) -> list[Layout]:
    """Rows behind one another in the order of their tokens, what neighbours begin with standing once.

    Bounds as of `padded_layouts`; what a row shares with the one before it counts once. There are as few
    layouts as that takes, and the largest is as small as it can be then: it decides how much memory an update
    needs.
    """
    order = sorted(range(len(rows)), key=lambda place: (tuple(rows[place]), place))
    shared = [0, *(_in_common(rows[one], rows[other]) for one, other in itertools.pairwise(order))]

    def cut(tokens: int) -> list[list[tuple[int, int]]]:
        """Packs of (place, tokens shared with the row before) with at most so many tokens."""
        packs: list[list[tuple[int, int]]] = []
        used = 0
        for place, known in zip(order, shared, strict=False):  # no rows, no pairs
            own = len(rows[place]) - known
            if packs and len(packs[-1]) < max_rows and used + own <= tokens:
                packs[-1].append((place, known))
                used += own
            else:
                packs.append([(place, 0)])
                used = len(rows[place])
        return packs

    fewest = len(cut(max_tokens))
    enough = bisect.bisect_left(range(max_tokens), True, key=lambda tokens: len(cut(tokens)) == fewest)
    return [_behind_one_another(rows, pack) for pack in cut(enough)]


def _side_by_side(rows: Sequence[Sequence[int]], places: Sequence[int]) -> Layout:
    width = max(len(rows[place]) for place in places)
    input_ids = torch.full((len(places), width), _PADDING, dtype=torch.long)
    flat = []
    for index, place in enumerate(places):
        input_ids[index, : len(rows[place])] = torch.tensor(rows[place])
        flat.append(torch.arange(index * width, index * width + len(rows[place])))
    return Layout(places=tuple(places), input_ids=input_ids, flat=tuple(flat))


def _behind_one_another(rows: Sequence[Sequence[int]], pack: Sequence[tuple[int, int]]) -> Layout:
    ids: list[int] = []
    positions: list[int] = []
    flat: list[Tensor] = []
    segments: list[Segment] = []
    ranges: list[tuple[int, int]] = []  # where the tokens of the row lie, in the order of the row
    for place, shared in pack:
        row, start = rows[place], len(ids)
        stop = start + len(row) - shared
        ids.extend(row[shared:])
        positions.extend(range(shared, len(row)))
        ranges = [*_first(ranges, shared), *([(start, stop)] if stop > start else [])]
        flat.append(torch.cat([torch.arange(*bounds) for bounds in ranges]))
        if stop > start:
            segments.append(Segment(start=start, stop=stop, keys=tuple(ranges)))
    return Layout(
        places=tuple(place for place, _ in pack),
        input_ids=torch.tensor([ids]),
        flat=tuple(flat),
        packing=Packing(positions=torch.tensor([positions]), segments=tuple(segments)),
    )


def _first(ranges: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The ranges that hold the first `count` tokens: 5 of (0, 4), (9, 12) -> (0, 4), (9, 10)."""
    kept = []
    for start, stop in ranges:
        taken = min(stop - start, count)
        if taken:
            kept.append((start, start + taken))
        count -= taken
    return kept


def _in_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in equal)
