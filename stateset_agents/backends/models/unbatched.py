"""Any causal transformers model, one conversation at a time, with the model's own cache; a `CachedModel`.

For models that a slot cache cannot serve: recurrent and hybrid models, and models that make their own masks.
Each row of a plan is a separate forward. So it is slow, and it is exact for every model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from stateset_agents.backends.linears import fast_linears, head_weight, wide_logits
from stateset_agents.backends.models.slots import EngineBase, Ints, Plan
from stateset_agents.backends.pretrained.pictures import place_id_of, stacked
from stateset_agents.backends.sampling import NEVER
from stateset_agents.types.errors import BackendError
from stateset_agents.types.images import PixelValues

if TYPE_CHECKING:
    from transformers import PreTrainedModel


CacheUse: TypeAlias = Literal["always", "decode", "never"]
"""Times at which a row uses its cache: `always`; in `decode` steps only, since some recurrent models continue
by single tokens only, so that several new tokens forward the row from its start; `never`, for models whose
cache is wrong or that have none."""

_CACHE_NAMES = ("past_key_values", "cache_params")
"""Names of the cache in a model's arguments and in its output."""


@dataclass(slots=True, eq=False)
class _CachedRow:
    """The tokens of one slot, and their cache."""

    ids: torch.Tensor  # [length]
    cache: Any = None
    """The model's cache of exactly these ids; None without one."""


class UnbatchedModel(EngineBase):
    """Forwards rows one by one. model_selection.py finds out which `cache_use` is correct."""

    def __init__(self, model: PreTrainedModel, *, cache_use: CacheUse = "always") -> None:
        self.model = model
        self.cache_use = cache_use
        self.device = model.device
        self.num_slots = self.num_columns = 0
        self._rows: list[_CachedRow | None] = []
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in accepted), None)
        if self._cache_name is None:
            self.cache_use = "never"
        self.supports_chunked_prefill = self.cache_use == "always"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def token_bytes(self) -> int:
        """Unknown: it differs between layers."""
        return 0

    def decode_rows(self, slots: Ints) -> int:
        """There is no padding."""
        return len(slots)

    def forward(self, plan: Plan) -> torch.Tensor:
        logits, end = [], 0
        pixels = plan.pixels or [()] * len(plan.slots)
        with fast_linears(False, self.precision, wide=head_weight(self.model)), wide_logits(self.model):
            for slot, start, length, items in zip(plan.slots, plan.starts, plan.lengths, pixels, strict=True):
                end += int(length)
                new = torch.from_numpy(plan.tokens[end - int(length) : end]).to(self.device)
                logits.append(self._extend(int(slot), int(start), new, items))
        return torch.stack(logits)

    def reusable_tokens(self, slot: int, shared: int) -> int:
        """All of them if the cache can be cut there. A recurrent state cannot: its row is forwarded again."""
        row = self._rows[slot]
        if row is None:
            return 0
        return shared if row.cache is None or shared == len(row.ids) or _can_be_cut(row.cache) else 0

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """The slots in `keep` become slots 0, 1, ... of `num_slots`."""
        self._rows = [*(self._rows[slot] for slot in keep), *[None] * (num_slots - len(keep))]
        self.num_slots, self.num_columns = num_slots, num_columns

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` gets a copy of the former content of slot `out_of[i]`; `width` is ignored."""
        rows = [self._rows[slot] for slot in out_of]
        for slot, row in zip(into, rows, strict=True):
            self._rows[slot] = copy.deepcopy(row)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._rows[slot] = None

    def _inputs(self, ids: torch.Tensor, start: int, pixels: Sequence[PixelValues]) -> dict[str, Any]:
        """The forward's arguments for the tokens of a row [length] from `start` on; `pixels`: the row's."""
        return {"input_ids": ids[None, start:]}

    def _extend(
        self, slot: int, start: int, new: torch.Tensor, pixels: Sequence[PixelValues]
    ) -> torch.Tensor:
        """Logits [V] after a slot's first `start` tokens and these new ones [T], which it keeps."""
        row = self._rows[slot] or _CachedRow(ids=new[:0])
        self._rows[slot] = None  # if the forward fails, the slot is empty instead of half updated
        cache = None if start == 0 or (self.cache_use == "decode" and len(new) > 1) else row.cache
        if cache is not None and start < len(row.ids):
            cache.crop(start - len(row.ids))
        ids = torch.cat([row.ids[:start], new])
        inputs = self._inputs(ids, 0 if cache is None else start, pixels)
        if self.cache_use == "never" or self._cache_name is None:
            mask = torch.ones_like(ids[None])  # without it, a pad id among the ids causes a warning
            output: Any = self.model(**inputs, attention_mask=mask, use_cache=False, **self._last_only)
            self._rows[slot] = _CachedRow(ids=ids)
        else:
            past = {} if cache is None else {self._cache_name: cache}
            output = self.model(**inputs, use_cache=True, **past, **self._last_only)
            self._rows[slot] = _CachedRow(ids=ids, cache=getattr(output, self._cache_name))
        last: torch.Tensor = output.logits[0, -1]
        return last


def _can_be_cut(cache: Any) -> bool:
    """True if every layer still has all its keys and values, and no other state."""
    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer
        or (type(layer) is DynamicSlidingWindowLayer and layer.get_seq_length() < layer.sliding_window)
        for layer in cache.layers
    )


# --- models that read pictures
#
# A picture's places in a row of ids hold a number below 0 that its content gives (`pictures.marked`). So two
# rows share a prefix only as far as their pictures are the same, and no cache is taken for another picture's.


class PicturedModel(UnbatchedModel):
    """Forwards rows with their pictures. It never samples the token that stands for a picture."""

    def __init__(self, model: PreTrainedModel, *, cache_use: CacheUse = "always") -> None:
        """Raises BackendError for a model without such a token."""
        super().__init__(model, cache_use=cache_use)
        place_id = place_id_of(model)
        if place_id is None:
            raise BackendError(f"{type(model).__name__} names no image token")
        self._place_id = place_id
        self.supports_chunked_prefill = False  # a chunk might end inside a picture

    def forward(self, plan: Plan) -> torch.Tensor:
        logits = super().forward(plan)
        logits[:, self._place_id] = NEVER
        return logits

    def full_logits(self, ids: torch.Tensor, pixels: Sequence[PixelValues] = ()) -> torch.Tensor:
        mask = torch.ones_like(ids[None])
        with wide_logits(self.model):
            output: Any = self.model(**self._inputs(ids, 0, pixels), attention_mask=mask, use_cache=False)
        logits: torch.Tensor = output.logits[0].clone()
        logits[:, self._place_id] = NEVER
        return logits

    def reusable_tokens(self, slot: int, shared: int) -> int:
        """The tokens up to which the cache can be cut; a cut inside a picture moves to its beginning."""
        row = self._rows[slot]
        if row is not None and shared < len(row.ids):
            ids = row.ids.tolist()
            while shared and ids[shared] < 0 and ids[shared - 1] == ids[shared]:
                shared -= 1
        return super().reusable_tokens(slot, shared)

    def _inputs(self, ids: torch.Tensor, start: int, pixels: Sequence[PixelValues]) -> dict[str, Any]:
        num_cached, following = int((ids[:start] < 0).sum()), list(pixels)
        while num_cached > 0:
            num_cached -= following.pop(0).num_places
        if num_cached < 0:
            raise BackendError("a cache was cut inside a picture; please report this")
        tokens = ids[start:]
        places = tokens.masked_fill(tokens < 0, self._place_id)
        return {"input_ids": places[None], **stacked(following, self.model, self.device)}
