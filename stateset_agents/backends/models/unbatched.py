"""Any causal transformers model, one conversation at a time over the model's own cache; a `CachedModel`.

For models that a slot cache can't serve: recurrent and hybrid ones, and those that make masks of their own.
Every row of a plan is a forward by itself, so it is slow; it is exact for whatever its model computes.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from stateset_agents.backends.kv_cache.slots import FullForward, Ints, Plan
from stateset_agents.backends.matmul_precision import head_weight
from stateset_agents.backends.onednn_linear import fast_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PlainModel", "Reading"]

Reading: TypeAlias = Literal["on", "again", "whole"]
"""How a row takes in new tokens: `on` from its cache, however many they are; `again` from its first token
where they are more than one (some recurrent models continue by single tokens only); `whole` at every token,
for models whose cache is wrong or that have none."""

_CACHE_NAMES = ("past_key_values", "cache_params")
"""What models call their cache, as an argument and in what they return."""


@dataclass(slots=True, eq=False)
class _Row:
    """What one slot has read."""

    ids: torch.Tensor  # [length]
    cache: Any = None
    """The model's own, of just these ids; None where it keeps none."""


class PlainModel(FullForward):
    """Rows one by one. Some models need the second or third way of reading; a check finds out."""

    def __init__(self, model: PreTrainedModel, *, reading: Reading = "on") -> None:
        self.model = model
        self.reading = reading
        self.device = model.device
        self.num_slots = self.num_columns = 0
        self._rows: list[_Row | None] = []
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)
        if self._cache_name is None:
            self.reading = "whole"
        self.reads_in_pieces = self.reading == "on"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def token_bytes(self) -> int:
        """Not known: it differs from layer to layer."""
        return 0

    def decode_rows(self, slots: Ints) -> int:
        """No row runs idle."""
        return len(slots)

    def forward(self, plan: Plan) -> torch.Tensor:
        """Logits [n, V] after the last new token of each slot of the plan."""
        logits, end = [], 0
        with fast_linears(False, self.precision, wide=head_weight(self.model)):
            for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True):
                end += int(length)
                new = torch.from_numpy(plan.tokens[end - int(length) : end]).to(self.device)
                logits.append(self._extend(int(slot), int(start), new))
        return torch.stack(logits)

    def keepable(self, slot: int, shared: int) -> int:
        """All of them where the cache can be cut there; a recurrent state can't, and is read again."""
        row = self._rows[slot]
        if row is None:
            return 0
        return shared if row.cache is None or shared == len(row.ids) or _can_be_cut(row.cache) else 0

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """The slots in `keep` become slots 0, 1, ... of `num_slots`."""
        self._rows = [*(self._rows[slot] for slot in keep), *[None] * (num_slots - len(keep))]
        self.num_slots, self.num_columns = num_slots, num_columns

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` becomes a copy of what slot `out_of[i]` was; all of it, whatever `width` is."""
        was = [self._rows[slot] for slot in out_of]
        for slot, row in zip(into, was, strict=True):
            self._rows[slot] = copy.deepcopy(row)

    def clear(self, slot: int) -> None:
        """The slot holds nothing."""
        self._rows[slot] = None

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def _extend(self, slot: int, start: int, new: torch.Tensor) -> torch.Tensor:
        """Logits [V] after a slot's first `start` tokens and these new ones [T], which it now holds."""
        row = self._rows[slot] or _Row(ids=new[:0])
        self._rows[slot] = None  # should the model fail, the slot holds nothing that is half done
        cache = None if start == 0 or (self.reading == "again" and len(new) > 1) else row.cache
        if cache is not None and start < len(row.ids):
            cache.crop(start - len(row.ids))
        ids = torch.cat([row.ids[:start], new])
        unread = ids if cache is None else new
        if self.reading == "whole" or self._cache_name is None:
            seen = torch.ones_like(ids[None])  # given, or a pad id among the ids draws a warning
            output: Any = self.model(ids[None], attention_mask=seen, use_cache=False, **self._last_only)
            self._rows[slot] = _Row(ids=ids)
        else:
            given = {} if cache is None else {self._cache_name: cache}
            output = self.model(unread[None], use_cache=True, **given, **self._last_only)
            self._rows[slot] = _Row(ids=ids, cache=getattr(output, self._cache_name))
        last: torch.Tensor = output.logits[0, -1]
        return last


def _can_be_cut(cache: Any) -> bool:
    """Whether every layer still has all its keys and values, and nothing else."""
    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer
        or (type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window)
        for layer in cache.layers
    )
