"""Select the engine that runs a model for generation: the fastest that is correct; for local/backend.py.

lean      our own fused forward, for the blocks of Llama and GPT-2 (fused.py)
general   transformers' own forward on batches, for attention-only models of known layer types: with our
          attention (batched.py), or else with the model's own (slots.py)
plain     one conversation at a time with the model's own cache, for all other models (unbatched.py), and for
          those that read pictures (pictured.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from stateset_agents.backends.kv_cache.slots import CachedModel, SlotModel
from stateset_agents.backends.linears.matmul_precision import MatmulPrecision
from stateset_agents.backends.linears.onednn_linear import is_available
from stateset_agents.backends.linears.packed_linear import packing
from stateset_agents.backends.local.correctness_check import check_cache, unfit_as_backend_error
from stateset_agents.backends.models.batched import BatchedModel
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.backends.models.pictured import PicturedModel
from stateset_agents.backends.models.unbatched import CacheUse, UnbatchedModel
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.logs import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_log = get_logger(__name__)

Engine: TypeAlias = Literal["auto", "lean", "general", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model, and the engine that was selected to run it."""

    name: Literal["lean", "general", "plain"]
    why: str
    """Why the faster engines were refused, or that this one was asked for."""
    linears: str
    """Which library computes its fp32 matrix products."""
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
    raise ConfigurationError(
        f"engine {engine!r} can't run {architecture} ({reasons}); leave engine at auto, which takes the "
        "fastest way that can"
    )


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
