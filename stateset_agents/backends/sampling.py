"""Sample one token for each row of logits, and its log-prob, in one pass; called by batcher.py.

The caller gives the uniforms (`turn_uniforms`: one counter-based stream per turn). So the tokens of a
conversation do not depend on the other rows of its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

NEVER = -1e9
"""The logit of a token that no reply can have; with minus infinity an entropy would be NaN."""
_BLOCK = 32
_BELOW_ONE = 1 - 2**-40


class SamplingMetadata(NamedTuple):
    """Says how each of B rows is sampled."""

    temperature: torch.Tensor | None  # [B] float32, above 0, 1 for greedy rows; None when all are 1
    greedy: torch.Tensor | None  # [B] bool; None when no row is greedy
    top_k: torch.Tensor | None  # [B] int64, 0 keeps all; None when no row truncates
    top_p: torch.Tensor | None  # [B] float32, 1 keeps all; None when no row truncates


def turn_uniforms(stream: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The first `count` uniforms [count] of a turn's stream; uniform t is the same for every `count`."""
    return np.random.Generator(np.random.Philox(key=stream)).random(count)


class Sampled(NamedTuple):
    """One token of each row."""

    tokens: torch.Tensor  # [B] int64
    logprobs: torch.Tensor  # [B] float32
    kept: torch.Tensor | None  # [B, V] bool, tokens that could be drawn; None when no row truncates


def sample(logits: torch.Tensor, uniforms: torch.Tensor, metadata: SamplingMetadata) -> Sampled:
    """A token of each row, from logits [B, V] and uniforms [B] float64.

    Float32 logits are overwritten: with a large vocabulary, copying them would take longer than sampling.
    Log-probs are under the sampled distribution (tempered, truncated, renormalised). A greedy row takes its
    most likely token and that token's log-prob at temperature 1. NaN logits give a NaN log-prob.
    """
    scores = logits.float()
    if metadata.temperature is not None:
        scores = scores.div_(metadata.temperature[:, None])
    if metadata.top_k is not None and metadata.top_p is not None:
        scores = _truncate(scores, metadata.top_k, metadata.top_p)
    probs = scores.softmax(-1)
    tokens, total = _inverse_cdf(probs, uniforms[:, None])
    if metadata.greedy is not None:
        tokens = torch.where(metadata.greedy[:, None], probs.argmax(-1, keepdim=True), tokens)
    # By the total of the draw: a float32 softmax sums to 1 only within 1e-6.
    token_p = probs.gather(-1, tokens).double() / total
    return Sampled(tokens[:, 0], token_p.log()[:, 0].float(), None if metadata.top_k is None else probs > 0)


def forbid(
    logits: torch.Tensor,
    packed: torch.Tensor,
    rows: torch.Tensor | None = None,
    *,
    free: torch.Tensor | None = None,
) -> None:
    """Give the tokens that a mask leaves out the logit NEVER, in place; sampler and update both call it.

    Args:
        logits: [N, V]; of tokens beyond 32 W none is allowed.
        packed: [D, W] int32, a bit for each token that is allowed.
        rows: [N] the mask of each row; None: the row of the same number.
        free: [D] True for a mask that is not used: its rows may have any token.
    """
    bits = torch.arange(32, dtype=torch.int32, device=packed.device)
    allowed = ((packed[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
    added = logits.new_full((len(packed), logits.shape[1]), NEVER)
    added[:, : allowed.shape[1]].masked_fill_(allowed.bool(), 0.0)
    if free is not None:
        added[free] = 0.0
    logits.add_(added if rows is None else added[rows])


def _inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [B, 1] at which the running sum of probs [B, V] exceeds u·total, and the totals [B, 1] float64.

    It works on two levels: sums of blocks of 32, then a running sum inside the block that is hit. So each row
    is read once, and the running sums are short and in float64 (a float32 softmax over a large vocabulary
    sums to 1 only within 1e-6). Uniforms are [B, 1].
    """
    vocab = probs.shape[-1]
    in_full_blocks = vocab - vocab % _BLOCK
    sums = probs[:, :in_full_blocks].view(len(probs), -1, _BLOCK).sum(-1)
    if in_full_blocks < vocab:  # the last block is shorter
        sums = torch.cat([sums, probs[:, in_full_blocks:].sum(-1, keepdim=True)], -1)
    outer = torch.nn.functional.pad(sums.cumsum(-1, dtype=torch.float64), (1, 0))  # [B, blocks + 1], from 0
    total = outer[:, -1:]
    # Below the total, or rounding could pick a token after the last one with a probability above 0.
    target = uniforms.clamp(max=_BELOW_ONE) * total
    block = (torch.searchsorted(outer, target, right=True) - 1).clamp_(max=sums.shape[-1] - 1)  # or NaN
    indices = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, indices.clamp(max=vocab - 1))
    if in_full_blocks < vocab:
        inside = inside.masked_fill_(indices >= vocab, 0.0)
    inner = inside.cumsum(-1, dtype=torch.float64)
    remainder = torch.minimum(target - outer.gather(-1, block), inner[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + torch.searchsorted(inner, remainder, right=True)).clamp_(max=vocab - 1), total


def _truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Scores with minus infinity for all tokens outside the top-k, and then outside the nucleus.

    The nucleus is the smallest set of most likely tokens whose mass, within the top-k, reaches top_p
    (Holtzman et al., https://arxiv.org/abs/1904.09751).
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    keep_k = torch.where(top_k > 0, top_k, scores.shape[-1])[:, None]
    ordered = ordered.masked_fill(rank >= keep_k, -torch.inf)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    reach = torch.where(top_p < 1, top_p, torch.inf)[:, None]  # 1 keeps all, despite rounding
    drop = (mass_before >= reach) | (rank >= keep_k)
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
