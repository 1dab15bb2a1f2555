"""Draw one token per row of logits, and the log-prob of what was drawn, in one pass; called by batching.py.

Uniforms come from the caller (`turn_uniforms`: one counter-based stream per turn), so what a conversation
says does not depend on which others share its batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Knobs", "sample", "turn_uniforms"]

_BLOCK = 32


class Knobs(NamedTuple):
    """How each of B rows is sampled."""

    temperature: torch.Tensor  # [B] float32, above 0; unused for greedy rows
    greedy: torch.Tensor | None  # [B] bool; None when no row is greedy
    top_k: torch.Tensor | None  # [B] int64, 0 keeps all; None when no row truncates
    top_p: torch.Tensor | None  # [B] float32, 1 keeps all; None when no row truncates


def turn_uniforms(stream: int, count: int) -> list[float]:
    """The first `count` uniforms of a turn's own stream; the t-th is the same whatever `count` is."""
    uniforms: list[float] = np.random.Generator(np.random.Philox(key=stream)).random(count).tolist()
    return uniforms


def sample(logits: torch.Tensor, uniforms: torch.Tensor, knobs: Knobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B] int64 and their log-probs [B] float32 from logits [B, V] and uniforms [B] float64.

    Log-probs are under the distribution sampled from (tempered, truncated, renormalised); a greedy row
    takes its most likely token and that token's log-prob at temperature 1.
    """
    scores = logits.float() / knobs.temperature[:, None]
    if knobs.top_k is not None and knobs.top_p is not None:
        scores = _truncate(scores, knobs.top_k, knobs.top_p)
    top = scores.amax(dim=-1)
    weights = (scores - top[:, None]).exp_()  # [B, V], the largest is 1
    tokens, total = _inverse_cdf(weights, uniforms)
    if knobs.greedy is not None:
        tokens = torch.where(knobs.greedy, scores.argmax(dim=-1), tokens)
    chosen = scores.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen - top - total.log().float()


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index [B] at which the running sum of weights [B, V] passes u·total, and the totals [B] float64.

    Two levels: sums of blocks of 32 first, then a running sum inside the one block that is hit, which
    reads each row once and keeps the sums in float64 where a large vocabulary would wear float32 out.
    """
    rows, vocab = weights.shape
    padded = -(-vocab // _BLOCK) * _BLOCK
    if padded != vocab:
        weights = torch.nn.functional.pad(weights, (0, padded - vocab))
    blocks = weights.view(rows, -1, _BLOCK)
    outer = blocks.sum(-1).double().cumsum(-1)  # [B, V/32]
    total = outer[:, -1:]
    # Stay below the total, or rounding could pick a token behind the last one that has any weight.
    target = uniforms[:, None].clamp(max=1 - 2**-40) * total
    block = torch.searchsorted(outer, target, right=True)  # [B, 1]
    before = torch.where(block > 0, outer.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(-1)  # [B, 32]
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 2**-40))
    place = torch.searchsorted(inner, rest, right=True)
    return (block * _BLOCK + place)[:, 0], total[:, 0]


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
