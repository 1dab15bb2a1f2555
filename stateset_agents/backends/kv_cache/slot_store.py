"""Keys and values of all slots, and attention of new tokens over them; used by fused.py.

A decode step reads every cached key and value once, so it is bound by memory, and rows differ in length. On
the CPU in fp32 both of its products are *embedding bags*: a weighted sum of rows of a table, for which torch
has a kernel that takes bags of any length and runs near the memory's speed (batched matrix products read the
padding too, and took 2.6 to 2.9 times as long). The values are plainly such rows: out = sum of p[c]·V[c]. So
are the keys when each block of 32 columns is stored size by column: scores[32] = sum of q[d]·K[d, 32]. A
query reads the blocks from the start of its window to its own position, and nothing else.

Everywhere else it is `scaled_dot_product_attention` over the columns up to the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stateset_agents.backends.kv_cache.embedding_attention import Bags, Cells
from stateset_agents.backends.kv_cache.memory import zeros
from stateset_agents.backends.kv_cache.slots import COLUMN_MULTIPLE, ROW_MULTIPLE, Plan, round_up

__all__ = ["HeadShape", "PackedRows", "SlotStore"]

_BLOCK = COLUMN_MULTIPLE
_PREFILL_MULTIPLE = 16
"""Tokens of a prefill are padded to a multiple of this: products of a new height cost a set-up each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How a model's attention is cut into heads."""

    num_heads: int
    num_kv_heads: int
    size: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The new tokens of a plan behind one another, slot after slot, and then a few that only pad."""

    count: int
    """m, of real tokens."""
    tokens: Tensor  # [M]
    positions: Tensor  # [M]
    last: Tensor  # [n] where each slot's last one stands

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> PackedRows:
        """Padded to eights where the plan is a decode step."""
        count, rows = len(plan.tokens), len(plan.slots)
        padded = round_up(count, ROW_MULTIPLE if count == rows else _PREFILL_MULTIPLE)
        tokens, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
        ends = np.cumsum(plan.lengths)
        tokens[:count] = plan.tokens
        positions[:count] = np.arange(count) - np.repeat(ends - plan.lengths - plan.starts, plan.lengths)
        tensors = (torch.from_numpy(array).to(device) for array in (tokens, positions, ends - 1))
        return cls(count, *tensors)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One row whose slot holds something: what its new tokens read there."""

    slot: int
    new: slice
    """Where its tokens stand among the packed ones."""
    columns: slice
    """Whole blocks, from the one in which the first token's window begins."""
    mask: Tensor
    """[T, c] additive, over the last c of these columns; the ones before are seen by all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """Packed tokens as a rectangle of n rows and T tokens, padded behind."""

    rows: int
    pad: Tensor | None
    """[n·T] which packed token stands there, any where it is padding; None when nothing is padded."""
    unpad: Tensor | None
    """[M] where each packed token stands in the rectangle."""
    slots: Tensor  # [n]
    fresh: bool
    """No slot holds anything yet."""
    width: int
    """Columns that attention reads: T where all is fresh."""
    masks: dict[int, Tensor | None]
    """By window: [n or 1, 1, T, width] additive; None where the plain causal mask will do."""


class SlotStore:
    """The cache of one model; `begin` each forward, then `attend` once for each layer."""

    def __init__(self, shape: HeadShape, windows: Sequence[int], dtype: torch.dtype, device: torch.device):
        """`windows` has one number a layer: how many columns it sees, itself included; 0 for all."""
        self.num_slots = self.num_columns = 0
        self._shape = shape
        self._windows = list(windows)
        self._dtype, self._device = dtype, device
        self._in_bags = device.type == "cpu" and dtype == torch.float32
        self._keys: list[Tensor] = []
        """[slots, kv heads, blocks, size, 32] where attention is by bags, else like the values."""
        self._values: list[Tensor] = []
        """[slots, kv heads, columns, size]"""
        self.resize(0, 0, [])

    @property
    def token_bytes(self) -> int:
        """Memory that one token of one slot takes in all layers."""
        return 2 * len(self._windows) * self._shape.num_kv_heads * self._shape.size * self._dtype.itemsize

    # --- slots ------------------------------------------------------------------------------------------

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Move to a store of another size; the slots in `keep` become slots 0, 1, ... of it."""
        kept = torch.tensor(keep, dtype=torch.long, device=self._device)
        columns = min(self.num_columns, num_columns)
        self.num_slots, self.num_columns = num_slots, num_columns
        kv, size = self._shape.num_kv_heads, self._shape.size
        plain = (num_slots, kv, num_columns, size)
        blocked = (num_slots, kv, num_columns // _BLOCK, size, _BLOCK)
        old = (self._keys, self._values)
        self._keys, self._values = [], []
        for layer in range(len(self._windows)):
            for stores, held, shape in (
                (self._keys, old[0], blocked if self._in_bags else plain),
                (self._values, old[1], plain),
            ):
                fresh = zeros(shape, self._dtype, self._device)
                if held and len(keep):
                    width = columns // _BLOCK if fresh.dim() == 5 else columns
                    fresh[: len(keep), :, :width] = held[layer][:, :, :width].index_select(0, kept)
                stores.append(fresh)
            for held in old:
                held[layer : layer + 1] = [torch.empty(0)] if held else []  # frees it before the next layer

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` becomes what slot `out_of[i]` was, for the first `width` columns."""
        target = torch.tensor(into, dtype=torch.long, device=self._device)
        source = torch.tensor(out_of, dtype=torch.long, device=self._device)
        for store in (*self._keys, *self._values):
            held = store[:, :, : -(-width // _BLOCK) if store.dim() == 5 else width]
            held.index_copy_(0, target, held.index_select(0, source))

    def clear(self, slot: int) -> None:
        """Zeros in all of a slot's columns."""
        for store in (*self._keys, *self._values):
            store[slot].zero_()

    # --- one forward ------------------------------------------------------------------------------------

    def begin(self, plan: Plan, rows: PackedRows) -> None:
        """Work out, once for all layers, where the plan's tokens go and what they see."""
        slots = self._tensor(plan.slots)
        self._count, padded = rows.count, len(rows.tokens)
        positions = rows.positions[: rows.count]
        self._slots = slots.repeat_interleave(self._tensor(plan.lengths)) if plan.lengths.max() > 1 else slots
        self._positions = positions
        self._decodes = bool(plan.lengths.max() == 1)
        if self._decodes and self._in_bags:
            heads, kv, size = self._shape.num_heads, self._shape.num_kv_heads, self._shape.size
            self._cells = cells = Cells.of(slots, positions, kv, size, self.num_columns)
            sizes = {"heads": heads, "columns": self.num_columns, "padded": padded}
            self._bags = {
                window: Bags.of(cells, positions, window=window, **sizes) for window in set(self._windows)
            }
        elif self._decodes:
            self._width = round_up(int(plan.starts.max()) + 1, _BLOCK)
            self._seen = {window: self._seen_columns(positions, window) for window in set(self._windows)}
        else:
            self._prefill = self._make_prefill(plan, slots, padded)
            if self._in_bags and not self._prefill.fresh:
                self._turns = {window: self._make_turns(plan, window) for window in set(self._windows)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Store keys and values [M, kv heads, size] and return what queries [M, heads, size] read there.

        [M, heads·size]; of the padding, anything finite.
        """
        keys, values, window = self._keys[layer], self._values[layer], self._windows[layer]
        if not self._decodes and self._prefill.fresh:
            return self._attend_fresh(layer, query, self._rectangle(key), self._rectangle(value), scaling)
        m = self._count
        if self._decodes and self._in_bags:
            self._cells.store(keys, values, key[:m], value[:m])
            return self._bags[window].attend(keys, values, query, scaling)
        if self._in_bags:
            block, offset = self._positions // _BLOCK, self._positions % _BLOCK
            keys[self._slots, :, block, :, offset] = key[:m]
        else:
            keys[self._slots, :, self._positions] = key[:m]
        values[self._slots, :, self._positions] = value[:m]
        if not self._decodes:
            if self._in_bags:
                return self._attend_turns(keys, values, query, self._turns[window], scaling)
            return self._attend_prefill(query, *self._cached(layer), window, scaling)
        return self._attend_decode(keys, values, query, self._seen[window], scaling)

    # --- decoding ---------------------------------------------------------------------------------------

    def _seen_columns(self, positions: Tensor, window: int) -> Tensor:
        """[m, 1, 1, width] which columns a decoding row may look at."""
        columns = torch.arange(self._width, device=self._device)
        return _seen(positions[:, None], columns, window)[:, None]

    def _attend_decode(
        self, keys: Tensor, values: Tensor, query: Tensor, seen: Tensor, scaling: float
    ) -> Tensor:
        m, shape = self._count, self._shape
        # The heads that share keys stand as so many queries of one head: nothing is repeated.
        grouped = query[:m].reshape(m, shape.num_kv_heads, -1, shape.size)
        keys, values = (store[:, :, : self._width].index_select(0, self._slots) for store in (keys, values))
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scaling)
        return F.pad(out.reshape(m, -1), (0, 0, 0, len(query) - m))

    # --- prefilling -------------------------------------------------------------------------------------

    def _make_prefill(self, plan: Plan, slots: Tensor, padded: int) -> _Prefill:
        length, rows = int(plan.lengths.max()), len(plan.slots)
        ends = np.cumsum(plan.lengths)
        place = np.arange(length)
        packed = (ends - plan.lengths)[:, None] + np.minimum(place, plan.lengths[:, None] - 1)  # [n, T]
        real = place < plan.lengths[:, None]
        even = bool(real.all()) and padded == self._count
        unpad = np.zeros(padded, np.int64)
        unpad[: self._count] = np.flatnonzero(real)
        fresh = bool((plan.starts == 0).all())
        width = length if fresh else round_up(int((plan.starts + plan.lengths).max()), _BLOCK)
        masks: dict[int, Tensor | None] = {}
        for window in set(self._windows):
            if self._in_bags and not fresh:
                break  # row by row
            if fresh and (window == 0 or window >= length):
                masks[window] = None
            else:
                starts = np.zeros(1, np.int64) if fresh else plan.starts
                positions = self._tensor(starts[:, None] + place)
                seen = _seen(positions, torch.arange(width, device=self._device), window)
                masks[window] = _additive(seen, self._dtype)[:, None]
        return _Prefill(
            rows=rows,
            pad=None if even else self._tensor(packed.reshape(-1)),
            unpad=None if even else self._tensor(unpad),
            slots=slots,
            fresh=fresh,
            width=width,
            masks=masks,
        )

    def _attend_fresh(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Slots that held nothing: attention is within the new tokens, [n, kv heads, T, size] of them.

        The padding is stored too, behind each row's end, where nothing looks before it is overwritten.
        """
        slots, blocks = self._prefill.slots, -(-key.shape[2] // _BLOCK)
        self._values[layer][:, :, : value.shape[2]].index_copy_(0, slots, value)
        if self._in_bags:
            whole = F.pad(key, (0, 0, 0, blocks * _BLOCK - key.shape[2]))
            whole = whole.reshape(*key.shape[:2], blocks, _BLOCK, -1)
            self._keys[layer][:, :, :blocks].index_copy_(0, slots, whole.transpose(-1, -2))
        else:
            self._keys[layer][:, :, : key.shape[2]].index_copy_(0, slots, key)
        return self._attend_prefill(query, key, value, self._windows[layer], scaling)

    def _attend_prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int, scaling: float
    ) -> Tensor:
        mask = self._prefill.masks[window]
        out = F.scaled_dot_product_attention(
            self._rectangle(query),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=self._shape.num_heads != self._shape.num_kv_heads,
        )
        out = out.transpose(1, 2).reshape(-1, self._shape.num_heads * self._shape.size)
        return out if self._prefill.unpad is None else out.index_select(0, self._prefill.unpad)

    def _rectangle(self, packed: Tensor) -> Tensor:
        """[M, heads, size] as [n, heads, T, size]."""
        plan = self._prefill
        if plan.pad is not None:
            packed = packed.index_select(0, plan.pad)
        return packed.reshape(plan.rows, -1, *packed.shape[1:]).transpose(1, 2)

    def _make_turns(self, plan: Plan, window: int) -> list[_Turn]:
        turns, begin = [], 0
        for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
            first = max(0, int(start) + 1 - window) // _BLOCK * _BLOCK if window else 0
            columns = slice(first, round_up(int(start + length), _BLOCK))
            masked = torch.arange(first if window else int(start), columns.stop)
            mask = _additive(
                _seen(torch.arange(int(start), int(start + length)), masked, window), self._dtype
            )
            turns.append(_Turn(int(slot), slice(begin, begin + int(length)), columns, mask))
            begin += int(length)
        return turns

    def _attend_turns(
        self, keys: Tensor, values: Tensor, query: Tensor, turns: list[_Turn], scaling: float
    ) -> Tensor:
        """Row by row, over what each holds: the scores stay in the processor's cache, and nothing is padded.

        For 16 rows of 45 tokens behind 650 it takes half as long as all rows in one call.
        """
        heads, kv, size = self._shape.num_heads, self._shape.num_kv_heads, self._shape.size
        read = query.new_zeros(len(query), heads * size)
        for turn in turns:
            first, stop = turn.columns.start, turn.columns.stop
            blocks = keys[turn.slot, :, first // _BLOCK : stop // _BLOCK]  # [kv heads, blocks, size, 32]
            across = blocks.transpose(1, 2).reshape(kv, size, -1)
            asked = (query[turn.new] * scaling).transpose(0, 1).reshape(kv, -1, size)
            scores = torch.bmm(asked, across).view(heads, -1, stop - first)
            scores[..., stop - first - turn.mask.shape[1] :].add_(turn.mask)
            shares = torch.softmax(scores, -1, out=scores).view(kv, -1, stop - first)
            found = torch.bmm(shares, values[turn.slot, :, first:stop]).view(heads, -1, size)
            read[turn.new] = found.transpose(0, 1).flatten(1)
        return read

    def _cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [n, kv heads, width, size] of the plan's slots."""
        slots, width = self._prefill.slots, self._prefill.width
        keys, values = self._keys[layer], self._values[layer]
        return keys[:, :, :width].index_select(0, slots), values[:, :, :width].index_select(0, slots)

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _seen(positions: Tensor, columns: Tensor, window: int) -> Tensor:
    """[..., T, S] may the token at each of positions [..., T] look at each of columns [S]?"""
    behind = positions[..., None] - columns
    return (behind >= 0) & (behind < window) if window else behind >= 0


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
