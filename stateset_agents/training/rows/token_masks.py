"""Which tokens each sampled token was chosen among, for the head's softmax in an update; called by it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from stateset_agents.backends.grammars import Packed
from stateset_agents.backends.sampling import NEVER, forbid


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of N tokens; of a step's thousands a hundred or so differ."""

    packed: Tensor
    """[D, W] int32, the distinct masks."""
    index: Tensor
    """[N] each token's mask, -1 where all tokens were allowed."""
    kept: Tensor
    """[K] int32, the sets that top-k and top-p kept, behind one another: hardly two are alike."""
    ends: Tensor
    """[N] where in `kept` each token's set ends; it is empty where nothing was left out."""
    raised: Tensor
    """[N, 2] a token and what its logit is raised by; 0 where nothing is."""

    @classmethod
    def of(
        cls,
        masks: Sequence[Packed | None],
        sets: Sequence[array[int]] = (),
        raised: Sequence[tuple[int, float]] = (),
    ) -> TokenMasks | None:
        """Of N masks, None for a token that no grammar bound, N sampling sets, empty for one of which nothing
        was left out, and N raised tokens; no sets: all are empty, as with these. None where all tokens were
        free."""
        numbers: dict[bytes, int] = {}
        index = [-1 if mask is None else numbers.setdefault(mask.tobytes(), len(numbers)) for mask in masks]
        counts = [len(ids) for ids in sets] or [0] * len(masks)
        if not numbers and not any(counts):
            return None
        packed = np.stack([np.frombuffer(mask, np.int32) for mask in numbers] or [np.zeros(0, np.int32)])
        joined = np.concatenate(
            [np.zeros(0, np.int32), *(np.frombuffer(ids, np.int32) for ids in sets if ids)]
        )
        ends = torch.tensor(counts).cumsum(0)
        lifts = torch.tensor(raised or [(0, 0.0)] * len(masks), dtype=torch.float64)
        return cls(torch.from_numpy(packed), torch.tensor(index), torch.from_numpy(joined), ends, lifts)

    def __getitem__(self, part: slice) -> TokenMasks:
        """The masks of a slice of the tokens."""
        ends = self.ends[part]
        first = int(self.ends[part.start - 1]) if part.start else 0
        token_ids = self.kept[first : int(ends[-1]) if len(ends) else first]
        return TokenMasks(self.packed, self.index[part], token_ids, ends - first, self.raised[part])

    def to(self, device: torch.device) -> TokenMasks:
        return TokenMasks(*(getattr(self, field.name).to(device) for field in fields(self)))

    def apply(self, logits: Tensor) -> None:
        """Give what was not allowed the logit NEVER, in the [N, V] logits themselves: what a grammar forbade,
        and what is outside a set. What the grammar's constraint raised is raised before."""
        rows = self.raised[:, 1].nonzero()[:, 0]
        logits[rows, self.raised[rows, 0].long()] += self.raised[rows, 1].to(logits.dtype)
        distinct, places = torch.unique(self.index, return_inverse=True)
        if bool((distinct >= 0).any()):
            forbid(logits, self.packed[distinct.clamp_min(0)], places, free=distinct < 0)
        if not len(self.kept):
            return
        counts = self.ends.diff(prepend=self.ends.new_zeros(1))
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        columns = self.kept.long()
        values = logits[rows, columns]
        logits.masked_fill_((counts > 0)[:, None], NEVER)
        logits[rows, columns] = values
