"""Select the engine that runs a model for generation: the fastest that is correct; for local/backend.py.

lean      our own fused forward, for the blocks of Llama and GPT-2 (fused.py)
general   transformers' own forward on batches, for attention-only models of known layer types: with our
          attention (batched.py), or else with the model's own (slots.py)
plain     one conversation at a time with the model's own cache, for all other models (unbatched.py), and for
          those that read pictures (unbatched.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from stateset_agents.backends.base import EngineInfo
from stateset_agents.backends.linears import MatmulPrecision, fp32_forwards, is_available, packing
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.batched import BatchedModel
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.backends.models.slots import CachedModel, SlotModel
from stateset_agents.backends.models.unbatched import CacheUse, PicturedModel, UnbatchedModel
from stateset_agents.backends.pretrained.pictures import marked, place_id_of
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# --- the check of an engine against the model's own full forward
#
# Some models compute their own masks or positions, and would be silently wrong with our cache. So the check
# samples a few conversations of two turns and of different lengths, one of them beyond the model's attention
# window, and compares their log-probs with those of full forwards in fp32. In less than fp32 the model's own
# forward rounds, too, by how much depends on the processor: there the engine's distance to the fp32 forward
# is held against the model's own.


_UNFIT = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""Raised by a model that an engine does not fit, or by a config that lacks an attribute."""
_PROMPT_LENGTHS = (3, 11, 7)
_NEW_TOKENS = (6, 8, 10)
_NEXT_TOKENS = 3
"""Number of tokens with which the second turn of each conversation begins."""
_TOLERANCE = 1e-3
"""The largest difference of a log-prob in fp32."""
_ROUNDINGS = 1.75
"""Largest ratio of the engine's root mean square error to the model's own, in less than fp32.
Where all was right the ratio was 0.8 to 1.25 (13 families, bf16, fp16), with planted faults 2.2 and more."""
_MOST_EPSILONS = 64
"""Largest root mean square error of the engine in less than fp32, in machine epsilons of the dtype: 0.5
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
    pictures_of = [pictures, pictures[:1], pictures[1:]]  # of three conversations
    prompts = [_after(*pair, model) for pair in zip(pictures_of, prompts, strict=True)]
    errors: list[Tensor] = []
    own_errors: list[Tensor] = []
    for _ in range(2):  # the second turn starts from the first one's cache
        requests = []
        for member, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=_NEW_TOKENS[member], stream=member)
            key, stop_ids = (0, 0, member), frozenset[int]()
            pixels = pictures_of[member]
            requests.append(new_request(key, prompt, params, stop_ids, context_length, pixels=pixels))
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
    """True if log-probs are as near to a forward in fp32 as the model's own and as `dtype` allows; both
    [tokens]."""
    rms, own_rms = (float(error.pow(2).mean().sqrt()) for error in (errors, own_errors))
    return rms <= _ROUNDINGS * own_rms and rms <= _MOST_EPSILONS * torch.finfo(dtype).eps


def _longest_window(model: Any) -> int:
    """The longest attention window or chunk in the config beyond which the check of an engine can afford to
    go; 0 without any."""
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
    logits = cached_model.full_logits(ids, request.pixels)[len(request.prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[len(request.prompt) :, None])[:, 0].cpu()


_log = get_logger(__name__)

Engine: TypeAlias = Literal["auto", "lean", "general", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel(EngineInfo):
    """A model, and the engine that was selected to run it."""

    model: CachedModel


def select_engine(
    model: PreTrainedModel,
    context_length: int,
    *,
    engine: Engine = "auto",
    fast_linears: bool = True,
    matmul_precision: MatmulPrecision = "highest",
    pictures: Sequence[PixelValues] = (),
) -> RunningModel:
    """The first engine whose log-probs are those of full forwards, or the one named by `engine`.

    `pictures`: two different ones to check with, of a model that reads pictures.
    Engines are checked with fp32 products; `matmul_precision` applies afterwards. The log names the selected
    engine: as a warning for plain (it is slow), as information for general, at debug level for lean.

    Raises ConfigurationError if the named engine cannot run the model, BackendError if none can.
    """
    if engine not in get_args(Engine):
        raise ConfigurationError(f"engine must be one of {', '.join(get_args(Engine))}, got {engine!r}")
    architecture = type(model).__name__
    refused: list[str] = []
    for name, variant, make in _candidates(model, fast_linears, reads_pictures=bool(pictures)):
        if engine not in ("auto", name):
            continue
        try:
            with unfit_as_backend_error():
                cached_model = make()
            check_cache(cached_model, model, context_length, pictures)
        except BackendError as error:
            refused.append(f"not {name}{variant}: {error}")
            continue
        why = "; ".join(dict.fromkeys(refused)) or ("as asked" if engine != "auto" else "the first that may")
        cached_model.set_matmul_precision(matmul_precision)
        linears = _linears(model, name, cached_model, fast_linears, matmul_precision)
        _log_at(name, engine)(f"{architecture} generates on the {name} path ({why}); linears {linears}")
        return RunningModel(name=name, why=why, linears=linears, model=cached_model)
    reasons = "; ".join(dict.fromkeys(refused))
    if engine == "auto":
        raise BackendError(
            f"{architecture} can't be served in this process ({reasons}); it serves causal language models "
            "of transformers such as Llama, Qwen2, Qwen3, Mistral and GPT-2"
        )
    raise ConfigurationError(f"engine {engine!r} can't run {architecture} ({reasons}); leave engine at auto")


def _log_at(name: str, engine: Engine) -> Callable[..., Any]:
    if name == "lean":
        return _log.debug
    return _log.warning if name == "plain" and engine == "auto" else _log.info


def _linears(
    model: PreTrainedModel, name: str, cached: CachedModel, fast_linears: bool, precision: MatmulPrecision
) -> str:
    if precision != "highest" and model.dtype is torch.float32:
        copy = (
            f" of a copy of {cached.copied_bytes / 2**20:.3g} MiB" if isinstance(cached, FusedModel) else ""
        )
        return f"at matmul_precision {precision}{copy}"
    if not fast_linears:
        return "by torch, as asked"
    packed = packing(next(model.parameters()))
    if isinstance(cached, FusedModel) and packed is not None:
        return f"by {packed}, whose packed copy of the weights takes {cached.copied_bytes / 2**20:.3g} MiB"
    is_fast = name != "plain" and model.dtype is torch.float32 and model.device.type == "cpu"
    return "by oneDNN" if is_fast and is_available() else "by torch"


_CACHE_USES: dict[str, CacheUse] = {"": "always", ", read again": "decode", ", read whole": "never"}
_Candidate: TypeAlias = tuple[Literal["lean", "general", "plain"], str, Callable[[], CachedModel]]


def _candidates(model: PreTrainedModel, fast_linears: bool, *, reads_pictures: bool) -> Iterator[_Candidate]:
    """Engines, the fastest first: name, variant, and a function that builds it."""
    unbatched: type[UnbatchedModel] = PicturedModel if reads_pictures else UnbatchedModel
    if reads_pictures:
        yield "lean", "", _refuse_pictures
        yield "general", "", _refuse_pictures
    else:
        yield "lean", "", lambda: FusedModel(model, fast_linears=fast_linears)
        yield "general", " with our attention", lambda: BatchedModel(model, fast_linears=fast_linears)
        yield "general", "", lambda: SlotModel(model, fast_linears=fast_linears)
    for variant, use in _CACHE_USES.items():
        yield "plain", variant, partial(unbatched, model, cache_use=use)


def _refuse_pictures() -> CachedModel:
    raise BackendError("the model reads pictures, which only plain passes on")
