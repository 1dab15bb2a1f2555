"""Warm-up: supervised steps on demonstrations, with a loss on the agent's own tokens only."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from stateset_agents.embedded.demonstrations import VALUE
from stateset_agents.embedded.tokenizer import END, ROLE_TOKENS
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive

__all__ = ["TrainingRow", "WarmUp", "encode_dialogue", "warm_up"]

_VALUE = re.compile(rf"Ġ?(?:[A-Z]|{VALUE})")
"""Tokens that the agent copies; an order id is a letter and a pair of digits."""
_INVENTED_WEIGHT = 0.2
"""Weight of a value without an earlier occurrence (a guess, a lie): it looks like a wrong copy, so there is
little to learn from it."""
_SORTED_BATCHES = 8
"""How many batches are sorted by length together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """The tokens of one dialogue."""

    ids: tuple[int, ...]  # [T]
    weights: tuple[float, ...]  # [T]
    """Of each token in the loss: 0 outside the agent's turns; its end-of-turn token counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The settings of a warm-up; the defaults are those of the shipped model."""

    steps: int = 1200
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.98)
    max_grad_norm: float = 1.0
    value_weight: float = 4.0
    """Weight of the tokens of ids, numbers, items, cities and days: copying is hardest to learn."""


def encode_dialogue(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, value_weight: float = 4.0
) -> TrainingRow:
    """The row of one dialogue: the prompt and all deltas of `JinjaTemplate`, concatenated."""
    openai: list[Any] = [message.to_openai() for message in messages]
    text = tokenizer.apply_chat_template(openai, tokenize=False)
    ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
    weights, is_agent, earlier = [], False, set()
    for token in tokenizer.convert_ids_to_tokens(ids):
        weight = 1.0
        if _VALUE.fullmatch(token):
            weight = value_weight if token in earlier else _INVENTED_WEIGHT
        weights.append(weight if is_agent else 0.0)
        earlier.add(token)
        if token == ROLE_TOKENS["assistant"]:
            is_agent = True
        elif token == END:
            is_agent = False
    return TrainingRow(ids=tuple(ids), weights=tuple(weights))


def warm_up(
    model: Qwen3ForCausalLM,
    rows: Sequence[TrainingRow],
    settings: WarmUp,
    *,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Train `model` in place and return the loss of every step.

    AdamW without weight decay, linear warm-up, then a cosine to a tenth. `on_step(step, loss)` is called
    after each step.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0
    )
    order = torch.Generator().manual_seed(derive(seed, "warm-up order"))
    schedule = _batches([len(row.ids) for row in rows], settings, order)
    losses = []
    model.train()
    for step, indices in enumerate(schedule):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(step, settings)
        loss = _loss(model, [rows[index] for index in indices])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
        if on_step is not None:
            on_step(step + 1, losses[-1])
    model.train(False)
    return losses


def _rate(step: int, settings: WarmUp) -> float:
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _batches(lengths: Sequence[int], settings: WarmUp, order: torch.Generator) -> list[list[int]]:
    """Indices of the rows of every step: all rows in random order, epoch after epoch.

    Rows of one batch are about equally long, because padding costs as much as text.
    """
    total = settings.steps * settings.batch_size
    indices: list[int] = []
    while len(indices) < total:
        indices.extend(torch.randperm(len(lengths), generator=order).tolist())
    batches: list[list[int]] = []
    size, span = settings.batch_size, _SORTED_BATCHES * settings.batch_size
    for start in range(0, total, span):
        by_length = sorted(indices[start : min(start + span, total)], key=lambda index: lengths[index])
        groups = [by_length[first : first + size] for first in range(0, len(by_length), size)]
        batches.extend(groups[index] for index in torch.randperm(len(groups), generator=order).tolist())
    return batches


def _loss(model: Qwen3ForCausalLM, rows: Sequence[TrainingRow]) -> torch.Tensor:
    """Weighted mean of -log p over the agent's tokens; logits are computed only for tokens with a weight."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    weights = torch.zeros(len(rows), longest)
    for index, row in enumerate(rows):  # padding at the end, which a causal model never attends to
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        weights[index, : len(row.ids)] = torch.tensor(row.weights)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets, weights = ids[:, 1:], weights[:, 1:]
    is_trained = weights > 0
    logits = model.lm_head(hidden[is_trained])
    nll = functional.cross_entropy(logits, targets[is_trained], reduction="none")
    return (nll * weights[is_trained]).sum() / weights[is_trained].sum()
