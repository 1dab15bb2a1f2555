"""The trainable policy: fp32 master weights, log-probs of what was sampled, and the frozen reference."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stateset_agents.training.batch import MicroBatch

__all__ = ["Policy", "TokenScores"]


class TokenScores(NamedTuple):
    """What the policy says about the trained tokens of a micro-batch."""

    logprobs: Tensor
    """[N] at the sampling temperature."""
    entropy: Tensor | None
    """[N] exact, in nats; None unless asked for."""


class Policy:
    """A causal language model with fp32 weights, forwarded under autocast.

    Hidden states are selected at the positions that predict a trained token before the LM head, so the
    [R, T, V] logits of a whole batch never exist.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, autocast: torch.dtype | None = None
    ) -> None:
        self.model: Any = model.float()
        self.temperature = temperature
        self.autocast = autocast
        self.device = next(model.parameters()).device
        self._selects = self._head_is_linear()

    def reference(self) -> Policy:
        """A frozen copy of the policy as it is now."""
        model = copy.deepcopy(self.model).eval().requires_grad_(False)
        return Policy(model, temperature=self.temperature, autocast=self.autocast)

    def score(self, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        """Log-probs (and entropy) of the trained tokens; differentiable."""
        logits = self._logits(batch) / self.temperature
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, batch.targets[:, None]).squeeze(1)
        spread = -(logprobs.exp() * logprobs).sum(dim=-1) if entropy else None
        return TokenScores(chosen, spread)

    def _logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] in fp32."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if not self._selects:
                logits = self.model(input_ids=batch.model_input, use_cache=False).logits
                selected: Tensor = logits.flatten(0, 1).index_select(0, batch.positions).float()
                return selected
            hidden = self.model.base_model(input_ids=batch.model_input, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, batch.positions).float()
        head = self.model.get_output_embeddings()
        return F.linear(hidden, head.weight.float(), None if head.bias is None else head.bias.float())

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        """Is the model's logits just its output embedding applied to the last hidden state?

        Some models scale or cap their logits (Gemma 2, Cohere); for those the model's own logits are used.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return False
        training = self.model.training
        self.model.eval()
        ids = torch.arange(4, device=self.device)[None]
        own = self.model(input_ids=ids, use_cache=False).logits
        ours = head(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        self.model.train(training)
        return bool(torch.allclose(own, ours, atol=1e-5, rtol=1e-4))
