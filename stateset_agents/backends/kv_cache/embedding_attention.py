"""Decode attention by `torch.embedding_bag`, on the CPU in fp32 and bf16; slot_store.py says why.

Keys are stored in blocks of 32 columns, [slots, kv heads, blocks, size, 32], values as [slots, kv heads,
columns, size]; keys in fp32, values in fp32 or bf16. One head of one row reads the blocks from the start of
its window to its own position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stateset_agents.backends.kv_cache.slots import COLUMN_MULTIPLE

_BLOCK = COLUMN_MULTIPLE


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where the new key and value of each of m tokens are stored."""

    tables: Tensor
    """[m, kv heads] indices in [slots·kv heads]."""
    keys: Tensor
    """[m, kv heads, size] flat indices in the keys."""
    values: Tensor
    """[m·kv heads] row indices in the values [slots·kv heads·columns, size]."""

    @classmethod
    def of(cls, slots: Tensor, positions: Tensor, kv_heads: int, size: int, columns: int) -> SlotMapping:
        """The mapping of tokens in these slots [m] at these positions [m]."""
        tables = slots[:, None] * kv_heads + torch.arange(kv_heads)
        values = tables * columns + positions[:, None]
        # A block takes the memory of its 32 columns, but is stored [size, 32] instead of [32, size].
        inside = positions % _BLOCK
        keys = ((values - inside[:, None]) * size + inside[:, None])[..., None] + torch.arange(size) * _BLOCK
        return cls(tables, keys, values.view(-1))

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Write new keys and values [m, kv heads, size]."""
        keys.put_(self.keys, key.to(keys.dtype))
        values.view(-1, value.shape[-1]).index_copy_(0, self.values, value.reshape(-1, value.shape[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingBagAttention:
    """The blocks of 32 columns that each (row, head) of a decode step attends to; N blocks in all."""

    queries: Tensor
    """[N] the block's query: index in [m·heads]."""
    score_blocks: Tensor
    """[N] the block's 32 scores: index in [m·heads·widest], where widest counts blocks."""
    keys: Tensor
    """[N·size] rows of the key table [slots·kv heads·blocks·size, 32]."""
    key_offsets: Tensor
    """[m·heads·widest] where each bag of `keys` starts; a bag is empty if its row is shorter."""
    values: Tensor
    """[N·32] rows of the value table [slots·kv heads·columns, size]."""
    value_offsets: Tensor
    """[M·heads] where each bag of `values` starts; the bags of padding rows are empty."""
    mask: Tensor
    """[m, 1, widest·32] 0 where a row may attend, minus infinity elsewhere."""

    @classmethod
    def of(
        cls, mapping: SlotMapping, positions: Tensor, *, window: int, heads: int, columns: int, padded: int
    ) -> EmbeddingBagAttention:
        """For rows at these positions [m], padded to M = `padded` rows; `window` 0: attend to all columns."""
        m, size = len(positions), mapping.keys.shape[-1]
        last = positions // _BLOCK
        first = (positions - window + 1).clamp(min=0) // _BLOCK if window else torch.zeros_like(last)
        widest = int(last.max()) + 1
        span = torch.arange(widest)
        reads = (span >= first[:, None]) & (span <= last[:, None])  # [m, widest]
        reads = reads[:, None].expand(-1, heads, -1).reshape(-1)
        score_blocks = reads.nonzero()[:, 0]
        tables = mapping.tables.repeat_interleave(heads // mapping.tables.shape[1], 1) * (columns // _BLOCK)
        blocks = (tables[..., None] + span).view(-1).index_select(0, score_blocks)
        before = reads.cumsum(0) - reads.long()  # [m·heads·widest] number of blocks before each
        idle = before.new_full(((padded - m) * heads,), len(score_blocks))
        behind = positions[:, None, None] - torch.arange(widest * _BLOCK)
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        return cls(
            queries=score_blocks // widest,
            score_blocks=score_blocks,
            keys=(blocks[:, None] * size + torch.arange(size)).view(-1),
            key_offsets=before * size,
            values=(blocks[:, None] * _BLOCK + torch.arange(_BLOCK)).view(-1),
            value_offsets=torch.cat([before.view(-1, widest)[:, 0], idle]) * _BLOCK,
            mask=torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf),
        )

    def attend(self, keys: Tensor, values: Tensor, query: Tensor, scaling: float) -> Tensor:
        """Attention of queries [M, heads, size], [M, heads·size]; zeros for padding rows."""
        m, size = len(self.mask), query.shape[-1]
        weights = query[:m].to(keys.dtype).reshape(-1, size).index_select(0, self.queries).view(-1)
        scores = _weighted(keys.view(-1, _BLOCK), self.keys, self.key_offsets, weights)
        probs = torch.add(self.mask, scores.view(m, query.shape[1], -1), alpha=scaling).softmax(-1)
        weights = probs.to(values.dtype).view(-1, _BLOCK).index_select(0, self.score_blocks).view(-1)
        attended = _weighted(values.view(-1, size), self.values, self.value_offsets, weights)
        return attended.view(len(query), -1)


def _weighted(table: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of a table's rows, one for each bag; `F.embedding_bag` calls the same function."""
    summed: Tensor = torch.embedding_bag(table, rows, offsets, False, 0, False, weights)[0]
    return summed
