"""Does an architecture work with our slot cache? Checked once at start, by huggingface.py.

Some models compute their own masks or positions and would be silently wrong. So a few ragged conversations
are sampled through the cache, and their log-probs compared with plain full forwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stateset_agents.backends.batching import Batcher, Turn, new_turn
from stateset_agents.backends.slots import SlotModel
from stateset_agents.errors import BackendError
from stateset_agents.messages import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_cache"]

_PROMPTS = (3, 11, 7)
_NEW = 5
_LONGEST_WINDOW = 512
"""A longer attention window is not walked to its end: on a large model that would cost seconds."""


def check_cache(model: PreTrainedModel, context_length: int) -> None:
    """Raises BackendError where cached and uncached log-probs differ (1e-3 in fp32, .25 below)."""
    slots = SlotModel(model)
    window = max((size for _, size in slots.layer_types if size <= _LONGEST_WINDOW), default=0)
    longest = max(_PROMPTS) + 3 * _NEW
    if context_length < longest:
        return
    batcher = Batcher(slots, max_cached_tokens=1 << 20)
    vocab = model.config.get_text_config().vocab_size
    dice = torch.Generator().manual_seed(0)
    reach = min(window + 2, context_length - longest)
    prompts = [
        torch.randint(vocab, (length + reach * (place == 1),), generator=dice).tolist()
        for place, length in enumerate(_PROMPTS)
    ]
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25
    for _ in range(2):  # the second turn goes on from the first one's cache
        turns = [_turn(member, prompt, context_length) for member, prompt in enumerate(prompts)]
        try:
            _run(batcher, turns)
            worst = max(_difference(slots, turn) for turn in turns)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            raise BackendError(
                f"{type(model).__name__} can't run on the batched cache ({type(error).__name__}: "
                f"{str(error).splitlines()[0]}); {_SERVED}"
            ) from error
        if not worst <= tolerance:
            raise BackendError(
                f"{type(model).__name__} gives other log-probs with the batched cache than without "
                f"(by {worst:.2g}); {_SERVED}"
            )
        prompts = [turn.ids + torch.randint(vocab, (3,), generator=dice).tolist() for turn in turns]


_SERVED = "the in-process backend serves attention-only models such as Llama, Qwen2, Qwen3, Mistral and GPT-2"


def _turn(member: int, prompt: list[int], context_length: int) -> Turn:
    params = SamplingParams(max_new_tokens=1 + member * 2, stream=member)
    return new_turn((0, 0, member), prompt, params, frozenset(), context_length)


def _run(batcher: Batcher, turns: list[Turn]) -> None:
    for turn in turns:
        batcher.admit(turn)
    while live := [turn for turn in turns if turn.finish_reason is None]:
        batcher.step(live)


def _difference(slots: SlotModel, turn: Turn) -> float:
    ids = torch.tensor(turn.ids, device=slots.device)
    logprobs = slots.full_logits(ids)[turn.num_prompt - 1 : -1].float().log_softmax(-1)
    plain = logprobs.gather(-1, ids[turn.num_prompt :, None])[:, 0].cpu()
    return float((plain - torch.tensor(turn.logprobs)).abs().max())
