"""Which of three ways a model is run for generation: the first that passes its check; for local/backend.py.

lean      a forward of our own, for Llama's and GPT-2's blocks (fused.py)
general   transformers' own forward over our slots, for attention-only models of known layer types: with our
          attention in it (general.py), or else with the model's own (slots.py)
plain     one conversation at a time over the model's own cache, for all the rest (unbatched.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from stateset_agents.backends.kv_cache.slots import CachedModel, SlotModel
from stateset_agents.backends.local.correctness_check import check_cache, refusing_unfit
from stateset_agents.backends.matmul_precision import MatmulPrecision
from stateset_agents.backends.models.fused import LeanModel
from stateset_agents.backends.models.general import GeneralModel
from stateset_agents.backends.models.unbatched import PlainModel
from stateset_agents.backends.onednn_linear import is_available
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.logs import get_logger

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Engine", "RunningModel", "choose_path"]

_log = get_logger(__name__)

Engine: TypeAlias = Literal["auto", "lean", "general", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model and the way of running it that was chosen."""

    name: Literal["lean", "general", "plain"]
    why: str
    """What spoke against those before it, or what it saves."""
    linears: str
    """By what its fp32 matrix products are made."""
    path: CachedModel


def choose_path(
    model: PreTrainedModel,
    context_length: int,
    *,
    engine: Engine = "auto",
    fast_linears: bool = True,
    matmul_precision: MatmulPrecision = "highest",
) -> RunningModel:
    """The first way that says what full forwards say, or the one that `engine` names.

    It is compared in fp32, and multiplies in `matmul_precision` afterwards.

    Says which in the log: a warning for the plain path (it is slow), information for the general one, and at
    debug level for the lean one, which is what anyone would expect.

    Raises ConfigurationError where the one that was named cannot, BackendError where none can.
    """
    if engine not in get_args(Engine):
        raise ConfigurationError(f"engine must be one of {', '.join(get_args(Engine))}, got {engine!r}")
    architecture = type(model).__name__
    refused: list[str] = []
    for name, how, make in _ways(model, fast_linears):
        if engine not in ("auto", name):
            continue
        try:
            with refusing_unfit():
                way = make()
            check_cache(way, model, context_length)
        except BackendError as error:
            refused.append(f"not {name}{how}: {error}")
            continue
        why = "; ".join(dict.fromkeys(refused)) or ("as asked" if engine != "auto" else "the first that may")
        way.multiply_in(matmul_precision)
        linears = _linears(model, name, way, fast_linears, matmul_precision)
        _say(name, engine)(f"{architecture} generates on the {name} path ({why}); linears {linears}")
        return RunningModel(name=name, why=why, linears=linears, path=way)
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


def _say(name: str, engine: Engine) -> Callable[..., Any]:
    if name == "lean":
        return _log.debug
    return _log.warning if name == "plain" and engine == "auto" else _log.info


def _linears(
    model: PreTrainedModel, name: str, way: CachedModel, wanted: bool, precision: MatmulPrecision
) -> str:
    if precision != "highest" and model.dtype is torch.float32:
        copy = f" of a copy of {way.copied_bytes / 2**20:.3g} MiB" if isinstance(way, LeanModel) else ""
        return f"at matmul_precision {precision}{copy}"
    if not wanted:
        return "by torch, as asked"
    if not is_available() or model.dtype != torch.float32 or model.device.type != "cpu" or name == "plain":
        return "by torch"
    if isinstance(way, LeanModel):
        return f"by oneDNN, whose packed copy of the weights takes {way.copied_bytes / 2**20:.3g} MiB"
    return "by oneDNN"


_Way: TypeAlias = tuple[Literal["lean", "general", "plain"], str, Callable[[], CachedModel]]


def _ways(model: PreTrainedModel, fast_linears: bool) -> Iterator[_Way]:
    """Each with what sets it apart from others of its name, the fastest first."""
    yield "lean", "", lambda: LeanModel(model, fast_linears=fast_linears)
    yield "general", " with our attention", lambda: GeneralModel(model, fast_linears=fast_linears)
    yield "general", "", lambda: SlotModel(model, fast_linears=fast_linears)
    yield "plain", "", lambda: PlainModel(model, reading="on")
    yield "plain", ", read again", lambda: PlainModel(model, reading="again")
    yield "plain", ", read whole", lambda: PlainModel(model, reading="whole")
