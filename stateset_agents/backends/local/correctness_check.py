"""Does a way of running a model say what the model's own full forward says? model_selection.py asks.

Some models compute their own masks or positions and would be silently wrong over our cache. So a few ragged
conversations of two turns are sampled through it, one of them beyond the model's attention window, and their
log-probs compared with full forwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from stateset_agents.backends.kv_cache.slots import CachedModel
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.request import Turn, new_turn
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import SamplingParams

__all__ = ["check_cache", "refusing_unfit"]

_UNFIT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""What comes of a model that is run in a way it was not made for, or of a config that lacks a name."""
_PROMPTS = (3, 11, 7)
_NEW = 5
_MOST_WORK = 5e11
"""A window is walked to its end where its tokens times the model's weights are at most so many: a second or
so on a CPU. On a GPU it may be 50 times as much."""


@contextlib.contextmanager
def refusing_unfit() -> Iterator[None]:
    """Raises BackendError where what is tried in it, building a way or running it, does not fit the model."""
    try:
        yield
    except _UNFIT as error:
        reason = (str(error).splitlines() or [""])[0]
        raise BackendError(f"it can't run there ({type(error).__name__}: {reason})") from error


def check_cache(path: CachedModel, model: Any, context_length: int) -> None:
    """Raises BackendError where log-probs differ by more than 1e-3 in fp32, .25 below, or nothing runs.

    `model` is the transformers model that `path` runs. The path's slots are empty again afterwards.
    """
    longest = max(_PROMPTS) + 3 * _NEW
    if context_length < longest:
        return
    batcher = Batcher(path, max_cached_tokens=1 << 20)
    vocab = model.config.get_text_config().vocab_size
    dice = torch.Generator().manual_seed(0)
    reach = min(_longest_window(model) + 2, context_length - longest)
    prompts = [
        torch.randint(vocab, (length + reach * (place == 1),), generator=dice).tolist()
        for place, length in enumerate(_PROMPTS)
    ]
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.25
    for _ in range(2):  # the second turn goes on from the first one's cache
        turns = [_turn(member, prompt, context_length) for member, prompt in enumerate(prompts)]
        with refusing_unfit():
            _run(batcher, turns)
            worst = max(_difference(path, turn) for turn in turns)
        if not worst <= tolerance:
            raise BackendError(f"its log-probs differ from full forwards by {worst:.2g}")
        prompts = [turn.ids + torch.randint(vocab, (3,), generator=dice).tolist() for turn in turns]
    path.resize(0, 0, [])


def _longest_window(model: Any) -> int:
    """The longest of the numbers that a config calls a window or a chunk, of those that can be walked."""
    most = _MOST_WORK / model.num_parameters() * (50 if model.device.type == "cuda" else 1)
    named = model.config.get_text_config().to_dict().items()
    sizes = [size for name, size in named if ("window" in name or "chunk" in name) and type(size) is int]
    return max((size for size in sizes if size <= most), default=0)


def _turn(member: int, prompt: list[int], context_length: int) -> Turn:
    params = SamplingParams(max_new_tokens=1 + member * 2, stream=member)
    return new_turn((0, 0, member), prompt, params, frozenset(), context_length)


def _run(batcher: Batcher, turns: list[Turn]) -> None:
    for turn in turns:
        batcher.admit(turn)
    while live := [turn for turn in turns if turn.finish_reason is None]:
        for turn in batcher.step(live):
            if turn.error is not None:
                raise turn.error


def _difference(path: CachedModel, turn: Turn) -> float:
    ids = torch.tensor(turn.ids, device=path.device)
    logprobs = path.full_logits(ids)[turn.num_prompt - 1 : -1].float().log_softmax(-1)
    plain = logprobs.gather(-1, ids[turn.num_prompt :, None])[:, 0].cpu()
    return float((plain - torch.tensor(turn.logprobs)).abs().max())
