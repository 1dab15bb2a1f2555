"""A KV cache of slots: the protocol of models that have one, and one for transformers' own forward.

A conversation owns one slot. The token at position p is in column p of its slot, whatever the other slots
hold. So rows of different lengths share a forward, and a conversation continues where it stopped. A `Plan`
lists the slots of a forward and the new tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from stateset_agents.backends.adapters import Adapter
from stateset_agents.backends.linears import MatmulPrecision, fast_linears, head_weight, wide_logits
from stateset_agents.types.errors import BackendError
from stateset_agents.types.images import PixelValues

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

ROW_MULTIPLE = 8
"""Decode steps are padded to a multiple of this many rows. A matrix product with another number of rows may
sum in another order; then a conversation's tokens would depend on the other conversations of its batch."""
COLUMN_MULTIPLE = 32
"""Attention reads a multiple of this many columns, for the same reason."""
_WINDOWS = {"full_attention", "sliding_attention", "chunked_attention"}


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The input of one forward: new tokens of each of n slots, which are stored after its cached ones."""

    slots: Ints
    """[n] ascending."""
    starts: Ints
    """[n] cached tokens that each slot keeps; those after them are dropped."""
    lengths: Ints
    """[n] new tokens of each slot, at least 1. If all are 1 it is a decode step."""
    tokens: Ints
    """[sum of lengths] the new tokens, slot after slot."""
    pixels: Sequence[Sequence[PixelValues]] = ()
    """[n] the pictures of each slot's whole row, in order; empty where no slot has any."""


class EngineBase:
    """The base of all engines: the model's own forward, and defaults that hold for attention."""

    model: PreTrainedModel
    precision: MatmulPrecision = "highest"
    """Precision of the forwards' matrix products, except for the logits."""

    def set_matmul_precision(self, precision: MatmulPrecision) -> None:
        """See `CachedModel`."""
        self.precision = precision

    def reusable_tokens(self, slot: int, shared: int) -> int:
        """All of them: attention can drop any columns on the right."""
        return shared

    def refresh(self) -> None:
        """Drop what was computed from the weights; this model keeps nothing of the kind."""

    def set_adapter(self, adapter: Adapter) -> None:
        """The model's own layers add it."""

    def full_logits(self, ids: torch.Tensor, pixels: Sequence[PixelValues] = ()) -> torch.Tensor:
        """Logits [T, V] of one row of ids [T], by the model's own forward without a cache."""
        if pixels:
            raise BackendError("this engine reads no pictures; leave engine at auto")
        mask = torch.ones_like(ids[None])  # without it, a pad id among the ids causes a warning
        with wide_logits(self.model):
            output: Any = self.model(input_ids=ids[None], attention_mask=mask, use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits


class CachedModel(Protocol):
    """A causal language model with a KV cache, one slot for each conversation.

    Used only in the generation worker's thread; batcher.py assigns the slots.
    """

    num_slots: int
    num_columns: int
    """Most tokens of one slot."""
    device: torch.device
    supports_chunked_prefill: bool
    """True if a prompt can be forwarded in several chunks without more work."""

    def set_matmul_precision(self, precision: MatmulPrecision) -> None:
        """Set the precision of the forwards' matrix products, except for `full_logits` and the logits."""

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one slot takes in all layers; 0 while unknown."""

    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits [n, V] after the last new token of each slot of the plan."""

    def decode_rows(self, slots: Ints) -> int:
        """Rows that a decode step of these slots runs, padding included.

        If gaps between the slots cause much padding, the batcher moves the slots together.
        """

    def full_logits(self, ids: torch.Tensor, pixels: Sequence[PixelValues] = ()) -> torch.Tensor:
        """Logits [T, V] of one row of ids [T] and its pictures, by the model's own forward without a
        cache."""

    def reusable_tokens(self, slot: int, shared: int) -> int:
        """The number of a slot's first `shared` tokens that can stay cached when the later ones are dropped.

        For attention that is `shared`. A recurrent state cannot go back: all of its tokens stay, or none.
        """

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Change the size of the cache; the slots in `keep` become slots 0, 1, ..."""

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` gets the former content of slot `out_of[i]`, in the first `width` columns.

        A slot may be copied into several.
        """

    def clear(self, slot: int) -> None:
        """Overwrite a slot's content: it may be NaN, which masks do not hide."""

    def refresh(self) -> None:
        """Drop copies derived from the weights: the weights changed in place, or memory is to be freed."""

    def set_adapter(self, adapter: Adapter) -> None:
        """Add the adapter, which the model's own layers have, where a forward does not go through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PaddedPlan:
    """A plan as a rectangle of n rows and T tokens, left-padded: the last column has the newest tokens."""

    input_ids: torch.Tensor  # [n, T]
    position_ids: torch.Tensor  # [n, T], 0 where padded
    first_slot: int
    """The n slots are first_slot, first_slot + 1, ...; ignored where `slots` is given."""
    slots: torch.Tensor | None  # [n]
    source: torch.Tensor | None
    """[m] indices of the real tokens among the n·T; None if all are real."""
    target: torch.Tensor
    """[m] slot·columns + position: where each real token's key and value are stored."""
    width: int
    """Columns that attention reads."""
    rows: torch.Tensor | None
    """The rows of the plan's slots; None if they are all rows, in order."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' hook has no types
    """Keys and values of one layer, [slots, columns, heads, head size]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, owner: SlotModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own has no types
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate at the first use, when the shapes of the heads are known."""
        shape = (self._owner.num_slots, self._owner.num_columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [n, heads, T, size]; return the content of the layout's slots, [n, heads, width, size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        layout = self._owner.layout
        fresh = states.transpose(1, 2).flatten(0, 1)  # [n·T, heads, size]
        if layout.source is not None:
            fresh = fresh.index_select(0, layout.source)
        store.flatten(0, 1).index_copy_(0, layout.target, fresh)
        if layout.slots is None:
            content = store[layout.first_slot : layout.first_slot + states.shape[0], : layout.width]
        else:
            content = store[:, : layout.width].index_select(0, layout.slots)
        return content.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Attention reads the layout's width, from column 0."""
        return self._owner.layout.width, 0

    def get_seq_length(self) -> int:
        """Unused: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """No maximum: the cache grows."""
        return -1


class SlotModel(EngineBase):
    """A causal transformers model with its own forward and attention, and a slot cache; a `CachedModel`."""

    def __init__(self, model: PreTrainedModel, *, fast_linears: bool = True) -> None:
        """Raises BackendError for layer types whose masks are unknown."""
        self.model = model
        self._fast_linears = fast_linears
        self.num_slots = 0
        self.num_columns = 0
        self.supports_chunked_prefill = True
        self.layout: _PaddedPlan
        config = model.config.get_text_config()
        self.layer_types = layer_windows(config, type(model).__name__)
        self._layers = [_SlotLayer(self) for _ in self.layer_types]
        self._cache = Cache(layers=list(self._layers))
        self.device = model.device

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one slot takes in all layers; 0 before the first forward."""
        return sum(store.shape[2] * store.shape[3] * store.element_size() for store in self._stores())

    def decode_rows(self, slots: Ints) -> int:
        """All rows from the first to the last slot, rounded up: no cache is copied to remove gaps."""
        first = int(slots[0]) // ROW_MULTIPLE * ROW_MULTIPLE
        return round_up(int(slots[-1]) + 1 - first, ROW_MULTIPLE)

    def forward(self, plan: Plan) -> torch.Tensor:
        self.layout = layout = self._decode_layout(plan) if plan.lengths.max() == 1 else self._layout(plan)
        masks = {
            kind: self._mask(layout.position_ids, layout.width, kind, window)
            for kind, window in set(self.layer_types)
        }
        with (
            fast_linears(self._fast_linears, self.precision, wide=head_weight(self.model)),
            wide_logits(self.model),
        ):
            output = self.model(
                input_ids=layout.input_ids,
                position_ids=layout.position_ids,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits if layout.rows is None else logits.index_select(0, layout.rows)

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        rows = torch.tensor(keep, dtype=torch.long, device=self.device)
        columns = min(self.num_columns, num_columns)
        self.num_slots, self.num_columns = num_slots, num_columns
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys = _resized(layer.keys, rows, columns, num_slots, num_columns)
                layer.values = _resized(layer.values, rows, columns, num_slots, num_columns)

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` gets the former content of slot `out_of[i]`, in the first `width` columns."""
        target = torch.tensor(into, dtype=torch.long, device=self.device)
        source = torch.tensor(out_of, dtype=torch.long, device=self.device)
        for store in self._stores():
            part = store[:, :width]
            part.index_copy_(0, target, part.index_select(0, source))

    def clear(self, slot: int) -> None:
        """Fill a slot with zeros."""
        for store in self._stores():
            store[slot].zero_()

    def _stores(self) -> Iterator[torch.Tensor]:
        """Keys and values of the layers that have been used."""
        for layer in self._layers:
            if layer.is_initialized:
                yield from (layer.keys, layer.values)

    def _decode_layout(self, plan: Plan) -> _PaddedPlan:
        """The slots in their order, with padding rows in the gaps: no cache is copied."""
        first = int(plan.slots[0]) // ROW_MULTIPLE * ROW_MULTIPLE
        count = self.decode_rows(plan.slots)
        rows = plan.slots - first
        tokens, positions = np.zeros(count, np.int64), np.zeros(count, np.int64)
        tokens[rows], positions[rows] = plan.tokens, plan.starts
        live = None if len(rows) == count else self._tensor(rows)
        slots = None
        if first + count > self.num_slots:  # padding rows beyond a small cache read its last slot
            slots = self._tensor(np.arange(first, first + count).clip(max=self.num_slots - 1))
        return _PaddedPlan(
            input_ids=self._tensor(tokens[:, None]),
            position_ids=self._tensor(positions[:, None]),
            first_slot=first,
            slots=slots,
            source=live,
            target=self._tensor(plan.slots * self.num_columns + plan.starts),
            width=round_up(int(plan.starts.max()) + 1, COLUMN_MULTIPLE),
            rows=live,
        )

    def _layout(self, plan: Plan) -> _PaddedPlan:
        """Rows left-padded to the longest."""
        length = int(plan.lengths.max())
        # [n, T] index of the new token; below 0: padding
        index = np.arange(length) - (length - plan.lengths[:, None])
        real = index >= 0
        tokens = np.zeros(real.shape, np.int64)
        tokens[real] = plan.tokens
        positions = np.where(real, index + plan.starts[:, None], 0)
        adjacent = bool((np.diff(plan.slots) == 1).all())
        return _PaddedPlan(
            input_ids=self._tensor(tokens),
            position_ids=self._tensor(positions),
            first_slot=int(plan.slots[0]),
            slots=None if adjacent else self._tensor(plan.slots),
            source=None if real.all() else self._tensor(np.flatnonzero(real)),
            target=self._tensor((plan.slots[:, None] * self.num_columns + positions)[real]),
            width=round_up(int((plan.starts + plan.lengths).max()), COLUMN_MULTIPLE),
            rows=None,
        )

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _mask(self, positions: torch.Tensor, width: int, kind: str, window: int) -> torch.Tensor:
        """Additive [n, 1, T, width]: 0 where a token may attend, the dtype's minimum elsewhere."""
        columns = torch.arange(width, device=self.device)
        distance = positions[:, None, :, None] - columns
        hidden = distance < 0
        if kind == "sliding_attention":
            hidden |= distance >= window
        elif kind == "chunked_attention":
            hidden |= columns // window != positions[:, None, :, None] // window
        dtype = self.model.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(
            hidden, torch.finfo(dtype).min
        )


def layer_windows(config: PreTrainedConfig, architecture: str) -> list[tuple[str, int]]:
    """Each layer's kind of attention and its window (0 for full attention)."""
    kinds, kwargs = get_layer_types_and_kwargs(config)
    unknown = sorted(set(kinds) - _WINDOWS)
    if unknown:
        raise BackendError(f"{architecture} has layers of type {', '.join(unknown)}, whose masks are unknown")
    return [(kind, int(extra.get("sliding_window") or 0)) for kind, extra in zip(kinds, kwargs, strict=True)]


def _resized(
    store: torch.Tensor, rows: torch.Tensor, columns: int, num_slots: int, num_columns: int
) -> torch.Tensor:
    resized = store.new_zeros(num_slots, num_columns, *store.shape[2:])
    resized[: len(rows), :columns] = store[:, :columns].index_select(0, rows)
    return resized
