"""A policy that scores each intervention of a menu by the same network: any number of them, in any order."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stateset_agents.numeric.acquisition.environment import CANDIDATE_FEATURES, CONTEXT_FEATURES
from stateset_agents.numeric.acquisition.families import as_key
from stateset_agents.numeric.policy import as_tensors, linear_layer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that


class AcquisitionPolicyNetwork(nn.Module):
    """Candidates are embedded one by one, pooled by mean and maximum, and scored with what was pooled.

    Logits are permutation-equivariant: a menu in another order gives the same logits in that order (Zaheer
    and others, Deep Sets, 2017). What was trained on five variables plays eight.
    """

    def __init__(self, *, hidden: int = 64, critic: bool = False, seed: int = 0) -> None:
        """`hidden`: width of every layer; `seed`: of the weights, which are a function of it alone."""
        super().__init__()
        expect_that(hidden >= 1, "hidden", "be at least 1", hidden)
        generator = torch.Generator().manual_seed(seed)
        features, context = len(CANDIDATE_FEATURES), len(CONTEXT_FEATURES)
        root = math.sqrt(2)
        self.embed = linear_layer(features + context, hidden, root, generator)
        self.mix = linear_layer(hidden, hidden, root, generator)
        self.from_pooled = linear_layer(2 * hidden + context, hidden, root, generator)
        self.score = linear_layer(hidden, 1, 0.01, generator)
        self.value = linear_layer(hidden, 1, 1.0, generator) if critic else None

    def init(self, key: int | torch.Generator, state: Any) -> dict[str, Tensor]:
        """New parameters for the functional form, a function of `key` alone; the network keeps its own.

        `state`: an `AcquisitionState`, which is scored once, so that one that does not fit raises here.
        """
        hidden, critic = self.mix.in_features, self.value is not None
        fresh = AcquisitionPolicyNetwork(hidden=hidden, critic=critic, seed=as_key(key))
        fresh.requires_grad_(False)(as_tensors(state.observations))
        return dict(fresh.named_parameters())

    def forward(self, observations: Any) -> Tensor:
        """[B, A] logits of `candidates` [B, A, 13] and `context` [B, 5]."""
        embedded, pooled = self._encoded(observations)
        mixed = torch.tanh(functional.linear(embedded, self.mix.weight, self.mix.bias) + pooled[:, None])
        return functional.linear(mixed, self.score.weight, self.score.bias)[..., 0]

    def values(self, observations: Any) -> Tensor:
        """[B] the return that is expected; raises ConfigurationError without a critic."""
        if self.value is None:
            raise ConfigurationError("this AcquisitionPolicyNetwork has no critic: make it with critic=True")
        _, pooled = self._encoded(observations)
        return functional.linear(torch.tanh(pooled), self.value.weight, self.value.bias)[..., 0]

    def _encoded(self, observations: Any) -> tuple[Tensor, Tensor]:
        """Each candidate's embedding [B, A, H], and what all of them have in common [B, H]."""
        candidates, context = observations["candidates"], observations["context"]
        beside = context[:, None, :].expand(-1, candidates.shape[1], -1)
        together = torch.cat([candidates, beside], dim=-1)
        embedded = torch.tanh(functional.linear(together, self.embed.weight, self.embed.bias))
        pooled = torch.cat([embedded.mean(dim=1), embedded.amax(dim=1), context], dim=-1)
        return embedded, functional.linear(pooled, self.from_pooled.weight, self.from_pooled.bias)
