"""Which tokens each sampled token was chosen among, for the head's softmax in an update; called by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stateset_agents.backends.grammars import Packed
from stateset_agents.backends.sampling import forbid


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of N tokens; of a step's thousands a hundred or so differ."""

    packed: Tensor
    """[D, W] int32, the distinct masks."""
    index: Tensor
    """[N] each token's mask, -1 where all tokens were allowed."""

    @classmethod
    def of(cls, masks: Sequence[Packed | None]) -> TokenMasks | None:
        """Of N masks, None for a token that was free; None where all were."""
        numbers: dict[bytes, int] = {}
        index = [-1 if mask is None else numbers.setdefault(mask.tobytes(), len(numbers)) for mask in masks]
        if not numbers:
            return None
        packed = np.stack([np.frombuffer(mask, np.int32) for mask in numbers])
        return cls(torch.from_numpy(packed), torch.tensor(index))

    def __getitem__(self, part: slice) -> TokenMasks:
        """The masks of a slice of the tokens."""
        return TokenMasks(self.packed, self.index[part])

    def to(self, device: torch.device) -> TokenMasks:
        return TokenMasks(self.packed.to(device), self.index.to(device))

    def apply(self, logits: Tensor) -> None:
        """Give what was not allowed the logit NEVER, in the [N, V] logits themselves."""
        distinct, places = torch.unique(self.index, return_inverse=True)
        forbid(logits, self.packed[distinct.clamp_min(0)], places, free=distinct < 0)
