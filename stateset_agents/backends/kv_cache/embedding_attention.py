"""Decode attention as embedding bags, on the CPU in fp32; used by slot_store.py, which says why.

Keys lie in blocks of 32 columns, [slots, kv heads, blocks, size, 32], values as [slots, kv heads, columns,
size]. One head of one row reads the blocks from the start of its window to its own position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stateset_agents.backends.kv_cache.slots import COLUMN_MULTIPLE

__all__ = ["Bags", "Cells"]

_BLOCK = COLUMN_MULTIPLE


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the new token of each of m rows is stored."""

    tables: Tensor
    """[m, kv heads] which table of columns, of [slots·kv heads]."""
    keys: Tensor
    """[m, kv heads, size] places among all numbers of the keys."""
    values: Tensor
    """[m·kv heads] rows of the values [slots·kv heads·columns, size]."""

    @classmethod
    def of(cls, slots: Tensor, positions: Tensor, kv_heads: int, size: int, columns: int) -> Cells:
        """For rows in these slots [m] at these positions [m]."""
        tables = slots[:, None] * kv_heads + torch.arange(kv_heads)
        values = tables * columns + positions[:, None]
        # A block's numbers stand where its columns' would, size by column instead of column by size.
        inside = positions % _BLOCK
        keys = ((values - inside[:, None]) * size + inside[:, None])[..., None] + torch.arange(size) * _BLOCK
        return cls(tables, keys, values.view(-1))

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Write new keys and values [m, kv heads, size]."""
        keys.put_(self.keys, key)
        values.view(-1, value.shape[-1]).index_copy_(0, self.values, value.reshape(-1, value.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bags:
    """Which blocks of 32 columns each (row, head) of a decode step reads; N blocks in all."""

    queries: Tensor
    """[N] whose block it is: place in [m·heads]."""
    places: Tensor
    """[N] where the block's 32 scores stand: place in [m·heads·widest], widest in blocks."""
    keys: Tensor
    """[N·size] rows of the key table [slots·kv heads·blocks·size, 32]."""
    key_bags: Tensor
    """[m·heads·widest] where each bag of `keys` starts; empty where a row is shorter."""
    values: Tensor
    """[N·32] rows of the value table [slots·kv heads·columns, size]."""
    value_bags: Tensor
    """[M·heads] where each bag of `values` starts; empty for the rows that only pad."""
    mask: Tensor
    """[m, 1, widest·32] 0 where a row may look, minus infinity elsewhere."""

    @classmethod
    def of(
        cls, cells: Cells, positions: Tensor, *, window: int, heads: int, columns: int, padded: int
    ) -> Bags:
        """For rows at these positions [m], of M = `padded` ones; `window` is 0 where a row sees all."""
        m, size = len(positions), cells.keys.shape[-1]
        last = positions // _BLOCK
        first = (positions - window + 1).clamp(min=0) // _BLOCK if window else torch.zeros_like(last)
        widest = int(last.max()) + 1
        span = torch.arange(widest)
        reads = (span >= first[:, None]) & (span <= last[:, None])  # [m, widest]
        reads = reads[:, None].expand(-1, heads, -1).reshape(-1)
        places = reads.nonzero()[:, 0]
        tables = cells.tables.repeat_interleave(heads // cells.tables.shape[1], 1) * (columns // _BLOCK)
        blocks = (tables[..., None] + span).view(-1).index_select(0, places)
        before = reads.cumsum(0) - reads.long()  # [m·heads·widest] blocks that stand before each place
        idle = before.new_full(((padded - m) * heads,), len(places))
        behind = positions[:, None, None] - torch.arange(widest * _BLOCK)
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        return cls(
            queries=places // widest,
            places=places,
            keys=(blocks[:, None] * size + torch.arange(size)).view(-1),
            key_bags=before * size,
            values=(blocks[:, None] * _BLOCK + torch.arange(_BLOCK)).view(-1),
            value_bags=torch.cat([before.view(-1, widest)[:, 0], idle]) * _BLOCK,
            mask=torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf),
        )

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, scaling: float) -> Tensor:
        """What queries [M, heads, size] read there, [M, heads·size]; zeros for the rows that only pad."""
        m, size = len(self.mask), query.shape[-1]
        weights = query[:m].reshape(-1, size).index_select(0, self.queries).view(-1)
        scores = _weighted(keys.view(-1, _BLOCK), self.keys, self.key_bags, weights)
        probs = torch.add(self.mask, scores.view(m, query.shape[1], -1), alpha=scaling).softmax(-1)
        weights = probs.view(-1, _BLOCK).index_select(0, self.places).view(-1)
        return _weighted(values.view(-1, size), self.values, self.value_bags, weights).view(len(query), -1)


def _weighted(table: Tensor, rows: Tensor, bags: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a table's rows, one for each bag; what `F.embedding_bag` calls."""
    summed: Tensor = torch.embedding_bag(table, rows, bags, False, 0, False, weights)[0]
    return summed
