"""A cache of slots: what a model that has one offers (`CachedModel`), and one for transformers' own forward.

A conversation owns one slot; the token at position p lives in column p of its slot, whatever stands in the
other slots. So rows of any lengths share a forward, and a conversation goes on where it stopped. A `Plan`
says which slots take part in a forward and which tokens each of them lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from stateset_agents.backends.matmul_precision import MatmulPrecision, head_weight
from stateset_agents.backends.onednn_linear import fast_linears
from stateset_agents.types.errors import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "COLUMN_MULTIPLE",
    "ROW_MULTIPLE",
    "CachedModel",
    "FullForward",
    "Ints",
    "Plan",
    "SlotModel",
    "layer_windows",
    "round_up",
]

Ints: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

ROW_MULTIPLE = 8
"""Decode steps run a multiple of so many rows, idle ones among them: a matrix product of another height may
add up in another order, and then the same conversation would say something else beside other ones."""
COLUMN_MULTIPLE = 32
"""Attention reads a multiple of so many columns, for the same reason."""
_WINDOWS = {"full_attention", "sliding_attention", "chunked_attention"}


def round_up(count: int, multiple: int) -> int:
    """`count` or the next multiple above it."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One forward: the tokens that each of n slots lacks. They are stored behind those that it holds."""

    slots: Ints
    """[n] ascending."""
    starts: Ints
    """[n] tokens that each slot holds and keeps; what it held behind them is forgotten."""
    lengths: Ints
    """[n] new tokens of each slot, at least 1. Where all are 1 it is a decode step."""
    tokens: Ints
    """[sum of lengths] the new tokens, slot after slot."""


class FullForward:
    """What every way of running a transformers model shares: the model's own forward, to be measured by."""

    model: PreTrainedModel
    precision: MatmulPrecision = "highest"
    """Of the forwards' matrix products, the head's logits excepted."""

    def multiply_in(self, precision: MatmulPrecision) -> None:
        """Set `precision`."""
        self.precision = precision

    def full_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one row of ids [T], by the model's own forward without any cache."""
        seen = torch.ones_like(ids[None])  # given, or a pad id among the ids draws a warning
        logits: torch.Tensor = self.model(input_ids=ids[None], attention_mask=seen, use_cache=False).logits
        return logits[0]


class CachedModel(Protocol):
    """A causal language model that keeps what it has read, a slot for each conversation.

    Lives in the generation worker's thread; the batcher (batcher.py) decides who has which slot.
    """

    num_slots: int
    num_columns: int
    """Most tokens of one slot."""
    device: torch.device
    reads_in_pieces: bool
    """Is it no more work to forward a prompt in several pieces?"""

    def multiply_in(self, precision: MatmulPrecision) -> None:
        """Make the forwards' matrix products at this precision from now on, `full_logits` and the head's
        logits excepted."""
        ...

    @property
    def token_bytes(self) -> int:
        """Memory that one token of one slot takes in all layers; 0 while it is not known."""
        ...

    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits [n, V] after the last new token of each slot of the plan."""
        ...

    def decode_rows(self, slots: Ints) -> int:
        """Rows that a decode step of these slots runs, idle ones included.

        Where idle rows come of slots that lie apart, the batcher moves them together when they are many.
        """
        ...

    def full_logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one row of ids [T], by the model's own forward without any cache."""
        ...

    def keepable(self, slot: int, shared: int) -> int:
        """How many of the first `shared` tokens that a slot holds may stay when those behind them go.

        `shared` itself for attention; a recurrent state cannot go back, so it keeps all or nothing.
        """
        ...

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Move to a store of another size; the slots in `keep` become slots 0, 1, ..."""
        ...

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` becomes what slot `out_of[i]` was, for the first `width` columns.

        One slot may be copied into several.
        """
        ...

    def clear(self, slot: int) -> None:
        """Overwrite what a slot holds: it may be NaN, which no mask hides."""
        ...

    def refresh(self) -> None:
        """Forget what was derived from the weights: they changed in place, or nobody needs it for a while."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A plan as a rectangle of n rows and T tokens, left-padded so that the last column is the newest."""

    input_ids: torch.Tensor  # [n, T]
    position_ids: torch.Tensor  # [n, T], 0 where padded
    first_slot: int
    """The n slots are first_slot, first_slot + 1, ...; ignored where `slots` is given."""
    slots: torch.Tensor | None  # [n]
    source: torch.Tensor | None
    """[m] which of the n·T tokens are real; None when all are."""
    target: torch.Tensor
    """[m] slot·columns + position: where each real token's key and value go."""
    width: int
    """Columns that attention reads."""
    rows: torch.Tensor | None
    """Which rows the plan's slots are; None when all are, in order."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' hook has no types
    """Keys and values of one layer, [slots, columns, heads, head size]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, owner: SlotModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' own has no types
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate on first use, when the heads' shapes are known."""
        shape = (self._owner.num_slots, self._owner.num_columns)
        self.keys = key_states.new_zeros(*shape, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [n, heads, T, size] and return what the layout's slots hold, [n, heads, width, size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._swap(self.keys, key_states), self._swap(self.values, value_states)

    def _swap(self, store: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        layout = self._owner.layout
        fresh = states.transpose(1, 2).flatten(0, 1)  # [n·T, heads, size]
        if layout.source is not None:
            fresh = fresh.index_select(0, layout.source)
        store.flatten(0, 1).index_copy_(0, layout.target, fresh)
        if layout.slots is None:
            held = store[layout.first_slot : layout.first_slot + states.shape[0], : layout.width]
        else:
            held = store[:, : layout.width].index_select(0, layout.slots)
        return held.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every slot is as wide as the layout says, from column 0."""
        return self._owner.layout.width, 0

    def get_seq_length(self) -> int:
        """Unused: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """No fixed end; the store grows."""
        return -1


class SlotModel(FullForward):
    """A causal transformers model that runs its own forward over a slot cache; a `CachedModel`."""

    def __init__(self, model: PreTrainedModel, *, fast_linears: bool = True) -> None:
        """Raises BackendError for layer types whose masks we don't know."""
        self.model = model
        self._fast_linears = fast_linears
        self.num_slots = 0
        self.num_columns = 0
        self.reads_in_pieces = True
        self.layout: _Layout
        config = model.config.get_text_config()
        self.layer_types = layer_windows(config, type(model).__name__)
        self._layers = [_SlotLayer(self) for _ in self.layer_types]
        self._cache = Cache(layers=list(self._layers))
        self.device = model.device

    @property
    def token_bytes(self) -> int:
        """Memory that one token of one slot takes in all layers; 0 before the first forward."""
        stores = [
            store for layer in self._layers if layer.is_initialized for store in (layer.keys, layer.values)
        ]
        return sum(store.shape[2] * store.shape[3] * store.element_size() for store in stores)

    def decode_rows(self, slots: Ints) -> int:
        """All from the first to the last slot, in eights: no cache is copied to bring rows together."""
        first = int(slots[0]) // ROW_MULTIPLE * ROW_MULTIPLE
        return round_up(int(slots[-1]) + 1 - first, ROW_MULTIPLE)

    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits [n, V] after the last new token of each slot of the plan."""
        self.layout = layout = self._decode_layout(plan) if plan.lengths.max() == 1 else self._layout(plan)
        masks = {
            kind: self._mask(layout.position_ids, layout.width, kind, window)
            for kind, window in set(self.layer_types)
        }
        with fast_linears(self._fast_linears, self.precision, wide=head_weight(self.model)):
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

    def keepable(self, slot: int, shared: int) -> int:
        """All of them: attention forgets any columns from the right."""
        return shared

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Move to a store of another size; the slots in `keep` become slots 0, 1, ... of it."""
        rows = torch.tensor(keep, dtype=torch.long, device=self.device)
        columns = min(self.num_columns, num_columns)
        self.num_slots, self.num_columns = num_slots, num_columns
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys = _resized(layer.keys, rows, columns, num_slots, num_columns)
                layer.values = _resized(layer.values, rows, columns, num_slots, num_columns)

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` becomes what slot `out_of[i]` was, for the first `width` columns."""
        target = torch.tensor(into, dtype=torch.long, device=self.device)
        source = torch.tensor(out_of, dtype=torch.long, device=self.device)
        for layer in self._layers:
            if layer.is_initialized:
                for store in (layer.keys, layer.values):
                    held = store[:, :width]
                    held.index_copy_(0, target, held.index_select(0, source))

    def clear(self, slot: int) -> None:
        """Zeros in all of a slot's columns."""
        for layer in self._layers:
            if layer.is_initialized:
                for store in (layer.keys, layer.values):
                    store[slot].zero_()

    def _decode_layout(self, plan: Plan) -> _Layout:
        """Slots run as they lie, idle ones between them for nothing: no cache is copied."""
        first = int(plan.slots[0]) // ROW_MULTIPLE * ROW_MULTIPLE
        count = self.decode_rows(plan.slots)
        rows = plan.slots - first
        tokens, positions = np.zeros(count, np.int64), np.zeros(count, np.int64)
        tokens[rows], positions[rows] = plan.tokens, plan.starts
        live = None if len(rows) == count else self._tensor(rows)
        slots = None
        if first + count > self.num_slots:  # a small store has no slots to idle there: the last stands in
            slots = self._tensor(np.arange(first, first + count).clip(max=self.num_slots - 1))
        return _Layout(
            input_ids=self._tensor(tokens[:, None]),
            position_ids=self._tensor(positions[:, None]),
            first_slot=first,
            slots=slots,
            source=live,
            target=self._tensor(plan.slots * self.num_columns + plan.starts),
            width=round_up(int(plan.starts.max()) + 1, COLUMN_MULTIPLE),
            rows=live,
        )

    def _layout(self, plan: Plan) -> _Layout:
        """Rows left-padded to the longest."""
        length = int(plan.lengths.max())
        behind = np.arange(length) - (
            length - plan.lengths[:, None]
        )  # [n, T] place among the new, or below 0
        real = behind >= 0
        tokens = np.zeros(real.shape, np.int64)
        tokens[real] = plan.tokens
        positions = np.where(real, behind + plan.starts[:, None], 0)
        adjacent = bool((np.diff(plan.slots) == 1).all())
        return _Layout(
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
        """Additive [n, 1, T, width]: 0 where a token may look, the dtype's minimum elsewhere."""
        columns = torch.arange(width, device=self.device)
        behind = positions[:, None, :, None] - columns  # how far each column lies back
        unseen = behind < 0
        if kind == "sliding_attention":
            unseen |= behind >= window
        elif kind == "chunked_attention":
            unseen |= columns // window != positions[:, None, :, None] // window
        dtype = self.model.dtype
        return torch.zeros(unseen.shape, dtype=dtype, device=self.device).masked_fill_(
            unseen, torch.finfo(dtype).min
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
    fresh = store.new_zeros(num_slots, num_columns, *store.shape[2:])
    fresh[: len(rows), :columns] = store[:, :columns].index_select(0, rows)
    return fresh
