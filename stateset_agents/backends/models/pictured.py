"""A vision-language model of transformers, one conversation at a time; a `CachedModel`.

A picture's places in a row of ids hold a number below 0 that its content gives (`pictures.marked`). So two
rows share a prefix only as far as their pictures are the same, and no cache is taken for another picture's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from stateset_agents.backends.kv_cache.slots import Plan
from stateset_agents.backends.models.unbatched import CacheUse, UnbatchedModel
from stateset_agents.backends.pretrained.pictures import NEVER, place_id_of, stacked
from stateset_agents.types.errors import BackendError
from stateset_agents.types.images import PixelValues

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        output: Any = self.model(**self._inputs(ids, 0, pixels), attention_mask=mask, use_cache=False)
        logits: torch.Tensor = output.logits[0].clone()
        logits[:, self._place_id] = NEVER
        return logits

    def reusable_tokens(self, slot: int, shared: int) -> int:
        """As far as the cache can be cut there; a cut inside a picture moves to its beginning."""
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
