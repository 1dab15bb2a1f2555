"""Does an engine give the log-probs of the model's own full forward? Called by model_selection.py.

Some models compute their own masks or positions, and would be silently wrong with our cache. So the check
samples a few conversations of two turns and of different lengths, one of them beyond the model's attention
window, and compares their log-probs with those of full forwards in fp32.

In less than fp32 the model's own forward rounds, too, by how much depends on the processor. There the
engine's distance to the fp32 forward is held against the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stateset_agents.backends.kv_cache.slots import CachedModel
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.fp32_forwards import fp32_forwards
from stateset_agents.backends.local.request import GenerationRequest, new_request
from stateset_agents.backends.pretrained.pictures import marked, place_id_of
from stateset_agents.types.errors import BackendError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import SamplingParams

_UNFIT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""Raised by a model that an engine does not fit, or by a config that lacks an attribute."""
_PROMPT_LENGTHS = (3, 11, 7)
_NEW_TOKENS = (6, 8, 10)
_NEXT_TOKENS = 3
"""What the second turn of each conversation begins with."""
_TOLERANCE = 1e-3
"""The largest difference of a log-prob in fp32."""
_ROUNDINGS = 1.75
"""In less than fp32: by how much the engine's root mean square error may be larger than the model's own.
Where all was right the ratio was 0.8 to 1.25 (13 families, bf16, fp16), with planted faults 2.2 and more."""
_MOST_EPSILONS = 64
"""In less than fp32: the largest root mean square error of the engine, in machine epsilons of the dtype: 0.5
in bf16, 0.06 in fp16. Where all was right it was 0.2 to 10.5, SmolLM2's the largest, and 48 once (Qwen3-Next
with random weights in fp16)."""
_MAX_WORK = 5e11
"""An attention window is checked to its end if its tokens times the model's weights are at most this: about a
second on a CPU. On a GPU the limit is 50 times as high."""


@contextlib.contextmanager
def unfit_as_backend_error() -> Iterator[None]:
    """Raises BackendError if the engine that the body builds or runs does not fit the model."""
    try:
        yield
    except _UNFIT as error:
        reason = (str(error).splitlines() or [""])[0]
        raise BackendError(f"it can't run there ({type(error).__name__}: {reason})") from error


def check_cache(
    cached_model: CachedModel, model: Any, context_length: int, pictures: Sequence[PixelValues] = ()
) -> None:
    """Raises BackendError if log-probs are not those of full forwards, or if nothing runs.

    In fp32 they may differ by 1e-3. In less, the root mean square of their differences to a forward in fp32
    may be 1.75 times that of the model's own forward, and at most 64 machine epsilons.

    `model` is the transformers model that `cached_model` runs. Its slots are empty again afterwards. Of a
    model that reads pictures, the first conversation begins with all of `pictures`, the others with one each.
    """
    picture_tokens = sum(len(item.token_ids) for item in pictures)
    longest = max(_PROMPT_LENGTHS) + 2 * max(_NEW_TOKENS) + _NEXT_TOKENS + picture_tokens
    if context_length < longest:
        return
    batcher = Batcher(cached_model, max_cached_tokens=1 << 20)
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    beyond_window = min(_longest_window(model) + 2, context_length - longest)
    prompts = [
        torch.randint(vocab, (length + beyond_window * (index == 1),), generator=generator).tolist()
        for index, length in enumerate(_PROMPT_LENGTHS)
    ]
    is_exact = model.dtype in (torch.float32, torch.float64)
    seen = [pictures, pictures[:1], pictures[1:]]  # of three conversations
    prompts = [_after(*pair, model) for pair in zip(seen, prompts, strict=True)]
    errors: list[Tensor] = []
    own_errors: list[Tensor] = []
    for _ in range(2):  # the second turn starts from the first one's cache
        requests = [
            _request(member, prompt, seen[member], context_length) for member, prompt in enumerate(prompts)
        ]
        with unfit_as_backend_error():
            _run(batcher, requests)
            for request in requests:
                exact = own = _full_logprobs(cached_model, request)
                if not is_exact:
                    with fp32_forwards(model, model.dtype):
                        exact = _full_logprobs(cached_model, request)
                errors.append(torch.tensor(request.logprobs) - exact)
                own_errors.append(own - exact)
        later = [torch.randint(vocab, (_NEXT_TOKENS,), generator=generator).tolist() for _ in requests]
        prompts = [
            request.ids + (_words(more, model) if pictures else more)
            for request, more in zip(requests, later, strict=True)
        ]
    largest = float(torch.cat(errors).abs().max())
    if not largest <= _TOLERANCE and not _is_rounding(torch.cat(errors), torch.cat(own_errors), model.dtype):
        raise BackendError(f"its log-probs differ from full forwards by {largest:.2g}")
    cached_model.resize(0, 0, [])


def _is_rounding(errors: Tensor, own_errors: Tensor, dtype: torch.dtype) -> bool:
    """Are log-probs as near to a forward in fp32 as the model's own forward, and as `dtype` allows? Both
    [tokens]."""
    rms, own_rms = (float(error.pow(2).mean().sqrt()) for error in (errors, own_errors))
    return rms <= _ROUNDINGS * own_rms and rms <= _MOST_EPSILONS * torch.finfo(dtype).eps


def _longest_window(model: Any) -> int:
    """The longest attention window or chunk in the config that is short enough to check; 0 without any."""
    affordable = _MAX_WORK / model.num_parameters() * (50 if model.device.type == "cuda" else 1)
    settings = model.config.get_text_config().to_dict().items()
    sizes = [size for name, size in settings if ("window" in name or "chunk" in name) and type(size) is int]
    return max((size for size in sizes if size <= affordable), default=0)


def _after(pictures: Sequence[PixelValues], prompt: list[int], model: Any) -> list[int]:
    """A prompt behind pictures, whose places are marked; a model without any keeps its prompt."""
    if not pictures:
        return prompt
    place_id = place_id_of(model)
    assert place_id is not None  # who gives pictures has asked
    tokens = [id for item in pictures for id in item.token_ids]
    return marked(tokens, pictures, place_id) + _words(prompt, model)


def _words(ids: list[int], model: Any) -> list[int]:
    """Ids none of which stands for a picture."""
    vocab = model.config.get_text_config().vocab_size
    return [(id + 1) % vocab if id == place_id_of(model) else id for id in ids]


def _request(
    member: int, prompt: list[int], pictures: Sequence[PixelValues], context_length: int
) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=_NEW_TOKENS[member], stream=member)
    return new_request((0, 0, member), prompt, params, frozenset(), context_length, pixels=pictures)


def _run(batcher: Batcher, requests: list[GenerationRequest]) -> None:
    for request in requests:
        batcher.admit(request)
    while live := [request for request in requests if request.finish_reason is None]:
        for request in batcher.step(live):
            if request.error is not None:
                raise request.error


def _full_logprobs(cached_model: CachedModel, request: GenerationRequest) -> Tensor:
    """[sampled] of a request's sampled tokens, by the model's own forward."""
    ids = torch.tensor(request.ids, device=cached_model.device)
    logits = cached_model.full_logits(ids, request.pixels)[request.num_prompt - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[request.num_prompt :, None])[:, 0].cpu()
