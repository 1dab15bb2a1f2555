"""Policy losses by name: the loss of one token, and what it is averaged over. `losses` computes them.

Notation: ratio = exp(logprobs - old_logprobs), A = advantage, old = the policy the ratio is taken to.

    name       loss of a token                                        mean over     paper
    grpo       -min(ratio A, clip(ratio, 1 - low, 1 + high) A)        trajectories  arxiv.org/abs/2402.03300
    dapo       the same                                               tokens        arxiv.org/abs/2503.14476
    dr_grpo    the same                                               a constant    arxiv.org/abs/2503.20783
    gspo       the same with one ratio per trajectory                 trajectories  arxiv.org/abs/2507.18071
    cispo      -stop_gradient(min(ratio, 1 + high)) A logprob         tokens        arxiv.org/abs/2506.13585
    reinforce  -A logprob                                             tokens        Williams 1992
    ppo        grpo's, meant for GAE advantages                       tokens        arxiv.org/abs/1707.06347

A new loss is one function beside its siblings and one line in `LOSSES`. The settings read that list, and
importing them loads no torch: functions here use methods of their tensors, or import torch themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stateset_agents.types.settings import expect_that

if TYPE_CHECKING:
    from torch import Tensor


Averaging = Literal["trajectory", "token", "constant"]
"""- trajectory: 1/B sum_i 1/|y_i| sum_t; each conversation counts alike (GRPO, GSPO);
- token: sum / all trained tokens of the batch; each token counts alike (DAPO);
- constant: sum / (B * max_length); no length in it at all (Dr. GRPO).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The range of a ratio: from 1 - low to 1 + high."""

    low: float = 0.2
    high: float = 0.2
    """DAPO's clip-higher sets it apart from `low` (.28 there), so that rare tokens can grow."""
    dual: float | None = None
    """c > 1: where A < 0 a token's loss never passes -c A, however large its ratio
    (dual-clip PPO, https://arxiv.org/abs/1912.09729). None: no such bound."""

    def __post_init__(self) -> None:
        expect_that(0 < self.low <= 1, "clip_ratio", "be above 0 and at most 1", self.low)
        expect_that(self.high > 0, "clip_ratio_high", "be positive", self.high)
        expect_that(self.dual is None or self.dual > 1, "dual_clip", "be above 1 (None for none)", self.dual)


def clipped_surrogate(logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """PPO's pessimistic bound, equation 7: no gain beyond the clip range, full loss for straying."""
    bounded = ratio.clamp(1 - clip.low, 1 + clip.high)
    loss = -(ratio * advantages).minimum(bounded * advantages)
    if clip.dual is None:
        return loss
    return loss.minimum(-clip.dual * advantages).where(advantages < 0, loss)


def clipped_weight(logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """CISPO: clip the weight, not the token, so that every token keeps a gradient.

    Only the upper clip acts, as in the paper's experiments.
    """
    return -ratio.detach().clamp(max=1 + clip.high) * advantages * logprobs


def log_likelihood(logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """REINFORCE: the on-policy gradient, blind to the ratio."""
    return -advantages * logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """One entry of `LOSSES`."""

    token_loss: Callable[[Tensor, Tensor, Tensor, Clip], Tensor]
    """(logprobs, ratio, advantages, clip), all [N] -> the loss of each token, [N]."""
    averaging: Averaging
    level: Literal["token", "sequence"] = "token"
    """Whether a ratio is one token's or the geometric mean over its trajectory."""
    clips: Literal["both", "above", "none"] = "both"
    """The sides on which the clip acts."""
    clip: Clip = Clip()
    """The range where the caller names none."""


LOSSES: Mapping[str, PolicyLoss] = {
    "grpo": PolicyLoss(token_loss=clipped_surrogate, averaging="trajectory"),
    "dapo": PolicyLoss(token_loss=clipped_surrogate, averaging="token", clip=Clip(high=0.28)),
    "dr_grpo": PolicyLoss(token_loss=clipped_surrogate, averaging="constant"),
    "gspo": PolicyLoss(
        token_loss=clipped_surrogate, averaging="trajectory", level="sequence", clip=Clip(low=3e-4, high=4e-4)
    ),
    "cispo": PolicyLoss(token_loss=clipped_weight, averaging="token", clips="above"),
    "reinforce": PolicyLoss(token_loss=log_likelihood, averaging="token", clips="none"),
    "ppo": PolicyLoss(token_loss=clipped_surrogate, averaging="token"),
}
"""Every `loss_type`."""
LIKELIHOOD_LOSS = "reinforce"
"""The loss that with every advantage 1 is the mean of -log p over tokens: what fine-tuning minimises."""
