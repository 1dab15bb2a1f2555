"""The trainable policy: master weights, log-probs of what was sampled, and the frozen reference.

Called by the learner, in the trainer's worker thread.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

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
    """A causal language model with weights in fp32 (or wider), forwarded under autocast.

    Hidden states are selected at the positions that predict a trained token before the LM head, so the
    [R, T, V] logits of a whole batch never exist. Head and softmax are never in half precision.
    """

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, autocast: torch.dtype | None = None
    ) -> None:
        first = next(model.parameters())
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.device = first.device
        self.model: Any = model.to(self.dtype)
        self.temperature = temperature
        self.autocast = autocast
        self.selects = self._head_is_linear()
        """Is the head applied to selected hidden states, or has the model logits of its own making?"""

    def reference(self) -> Policy:
        """A frozen copy of the policy as it is now."""
        model = copy.deepcopy(self.model).eval().requires_grad_(False)
        return Policy(model, temperature=self.temperature, autocast=self.autocast)

    def score(
        self, batch: MicroBatch, *, entropy: Literal["none", "value", "gradient"] = "none"
    ) -> TokenScores:
        """Differentiable log-probs of the trained tokens, and their distributions' entropy if asked for.

        Entropy as a mere "value" keeps no [N, V] tensor for a backward pass.
        """
        logprobs = torch.log_softmax(self._logits(batch) / self.temperature, dim=-1)
        chosen = logprobs.gather(1, batch.targets[:, None]).squeeze(1)
        if entropy == "none":
            return TokenScores(chosen, None)
        spread = logprobs if entropy == "gradient" else logprobs.detach()
        return TokenScores(chosen, -(spread.exp() * spread).sum(dim=-1))

    def _logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] of the positions that predict a trained token."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            if self.selects:
                output = self.model.base_model(input_ids=batch.model_input, use_cache=False).last_hidden_state
            else:
                with _wide_head(self.model.get_output_embeddings()):
                    output = self.model(input_ids=batch.model_input, use_cache=False).logits
        selected = output.flatten(0, 1).index_select(0, batch.positions).to(self.dtype)
        return self._head(selected) if self.selects else selected

    def _head(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        return F.linear(hidden, head.weight, head.bias)

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        """Are the model's logits its output embedding, applied to the last hidden state, and nothing more?

        Some models scale or cap their logits (Cohere, Gemma 2); for those the model's own are used. A cap
        hardly shows on small logits, so the head's input is blown up for the comparison.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or self.model.base_model is self.model:
            return False
        ids = torch.arange(4, device=self.device)[None]
        training = self.model.training
        self.model.eval()
        blown_up = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1000, *inputs[1:]))
        try:
            own = self.model(input_ids=ids, use_cache=False).logits
        finally:
            blown_up.remove()
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        self.model.train(training)
        return torch.allclose(own, self._head(hidden * 1000), atol=1e-2, rtol=1e-4)


@contextlib.contextmanager
def _wide_head(head: nn.Module) -> Iterator[None]:
    """While open, the model's own head computes in its weights' dtype, whatever autocast says."""

    def widely(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not isinstance(linear, nn.Linear):
            return output
        with torch.autocast(output.device.type, enabled=False):
            return F.linear(inputs[0].to(linear.weight.dtype), linear.weight, linear.bias)

    hook = head.register_forward_hook(widely)
    try:
        yield
    finally:
        hook.remove()
