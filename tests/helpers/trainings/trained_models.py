"""Tiny models that have learnt something: random ones say nearly the same everywhere, and hide an error.

Each learns eight rows by heart, in about a second, so that what it says next depends on all it has read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from tiny_models import BLOCKS, CONFIGS, SIZES, VOCAB
from transformers import AutoModelForCausalLM, Gemma2Config, Phi3Config

from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.types.messages import SamplingParams

CONTEXT = 256
ODD: dict[str, Any] = {
    "phi3": lambda: Phi3Config(**SIZES, **BLOCKS, num_key_value_heads=2),
    "gemma2": lambda: Gemma2Config(**SIZES, **BLOCKS, num_key_value_heads=2, head_dim=8, sliding_window=8),
}
"""Architectures that the lean forward doesn't know; gemma2 has a window, capped logits and a tied head."""
LENGTH = 64


@functools.cache
def learnt_rows() -> torch.Tensor:
    """[8, 64] ids; the rows begin alike in pairs, and go on differently."""
    dice = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCAB, (8, LENGTH), generator=dice)
    rows[1::2, :4] = rows[::2, :4]
    return rows


@functools.cache
@torch.enable_grad()
def trained_model(family: str) -> Any:
    """The tiny model of a family (tiny_models.py) after 80 steps. Shared: do not change it."""
    torch.manual_seed(0)
    config = (CONFIGS | ODD)[family]()
    config.initializer_range = 0.05
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    for _ in range(80):
        optimizer.zero_grad()
        logits = model(input_ids=learnt_rows(), use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), learnt_rows()[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    return model.eval().requires_grad_(False)


def say(
    work: Batcher, prompts: list[list[int]], *, new: int = 12, temperature: float = 0.0
) -> list[GenerationRequest]:
    """A turn for each conversation, all at once; lengths and ends differ."""
    turns = [
        new_request(
            (0, 0, member),
            prompt,
            SamplingParams(max_new_tokens=new + member, temperature=temperature, stream=member),
            frozenset(),
            CONTEXT,
        )
        for member, prompt in enumerate(prompts)
    ]
    assert all(work.admit(turn) for turn in turns)
    while live := [turn for turn in turns if turn.finish_reason is None]:
        work.step(live)
    return turns


def full_logprobs(model: Any, turn: GenerationRequest) -> torch.Tensor:
    """[sampled, V] by the model's own forward over the whole turn, without a cache."""
    ids = torch.tensor([[*turn.prompt, *turn.sampled]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(turn.prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def assert_same(model: Any, turns: list[GenerationRequest], *, within: float = 1e-5) -> None:
    for turn in turns:
        wanted = full_logprobs(model, turn)
        chosen = wanted.gather(-1, torch.tensor(turn.sampled)[:, None])[:, 0]
        assert (chosen - torch.tensor(turn.logprobs)).abs().max() <= within
        if turn.params.temperature == 0:
            assert turn.sampled == wanted.argmax(-1).tolist()
