"""Draw one token per row of logits, and the log-prob of what was drawn, in one pass; called by batcher.py.

Uniforms come from the caller (`turn_uniforms`: one counter-based stream per turn), so what a conversation
says does not depend on which others share its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Knobs", "sample", "turn_uniforms"]

_BLOCK = 32
_BELOW_ONE = 1 - 2**-40


class Knobs(NamedTuple):
    """How each of B rows is sampled."""

    temperature: torch.Tensor | None  # [B] float32, above 0, 1 for greedy rows; None when all are 1
    greedy: torch.Tensor | None  # [B] bool; None when no row is greedy
    top_k: torch.Tensor | None  # [B] int64, 0 keeps all; None when no row truncates
    top_p: torch.Tensor | None  # [B] float32, 1 keeps all; None when no row truncates


def turn_uniforms(stream: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The first `count` uniforms [count] of a turn's own stream; the t-th is the same whatever `count` is."""
    return np.random.Generator(np.random.Philox(key=stream)).random(count)


def sample(logits: torch.Tensor, uniforms: torch.Tensor, knobs: Knobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] int64 and their log-probs [B] float32 from logits [B, V] and uniforms [B] float64.

    Float32 logits are overwritten: at a large vocabulary a copy of them takes longer than all the rest.
    Log-probs are under the distribution sampled from (tempered, truncated, renormalised); a greedy row
    takes its most likely token and that token's log-prob at temperature 1. Where logits are NaN, so is the
    log-prob.
    """
    scores = logits.float()
    if knobs.temperature is not None:
        scores = scores.div_(knobs.temperature[:, None])
    if knobs.top_k is not None and knobs.top_p is not None:
        scores = _truncate(scores, knobs.top_k, knobs.top_p)
    probs = scores.softmax(-1)
    tokens, total = _inverse_cdf(probs, uniforms[:, None])
    if knobs.greedy is not None:
        tokens = torch.where(knobs.greedy[:, None], probs.argmax(-1, keepdim=True), tokens)
    chosen = probs.gather(-1, tokens).double() / total
    return tokens[:, 0], chosen.log()[:, 0].float()


def _inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [B, 1] at which the running sum of probs [B, V] passes u·total, and the totals [B, 1] float64.

    Two levels: sums of blocks of 32 first, then a running sum inside the one block that is hit. So each
    row is read once, and the running sums are short and in float64 (a softmax over a large vocabulary adds
    up to 1 only to within 1e-6). Uniforms are [B, 1].
    """
    vocab = probs.shape[-1]
    whole = vocab - vocab % _BLOCK
    sums = probs[:, :whole].view(len(probs), -1, _BLOCK).sum(-1)
    if whole < vocab:  # the last block is a shorter one
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], -1)
    outer = torch.nn.functional.pad(sums.cumsum(-1, dtype=torch.float64), (1, 0))  # [B, blocks + 1], from 0
    total = outer[:, -1:]
    # Stay below the total, or rounding could pick a token behind the last one that has any weight.
    target = uniforms.clamp(max=_BELOW_ONE) * total
    block = (torch.searchsorted(outer, target, right=True) - 1).clamp_(max=sums.shape[-1] - 1)  # or NaN
    places = block * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(-1, places.clamp(max=vocab - 1))
    if whole < vocab:
        inside = inside.masked_fill_(places >= vocab, 0.0)
    inner = inside.cumsum(-1, dtype=torch.float64)
    rest = torch.minimum(target - outer.gather(-1, block), inner[:, -1:] * _BELOW_ONE)
    return (block * _BLOCK + torch.searchsorted(inner, rest, right=True)).clamp_(max=vocab - 1), total


def _truncate(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Scores with everything outside the top-k, and then outside the nucleus, at minus infinity.

    The nucleus is the smallest set of most likely tokens whose mass, within the top-k, reaches top_p
    (Holtzman et al., https://arxiv.org/abs/1904.09751).
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    keep_k = torch.where(top_k > 0, top_k, scores.shape[-1])[:, None]
    ordered = ordered.masked_fill(rank >= keep_k, -torch.inf)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    reach = torch.where(top_p < 1, top_p, torch.inf)[:, None]  # 1 keeps all, whatever the sum rounds to
    drop = (mass_before >= reach) | (rank >= keep_k)
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
