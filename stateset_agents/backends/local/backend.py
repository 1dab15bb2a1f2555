"""In-process generation with a transformers model that one worker thread owns; made by loading.py.

Callers await requests on the event loop. The scheduler (scheduler.py) hands them to the thread, which runs
them as batches (batcher.py).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

import torch
from safetensors import SafetensorError

from stateset_agents.backends.adapters import AdaptedModel, Adapter, give_own_parameters, shapes_of
from stateset_agents.backends.base import Session, Tokenizer
from stateset_agents.backends.grammars import Matcher, grammars_of
from stateset_agents.backends.linears import MatmulPrecision, usable_precision
from stateset_agents.backends.local.batcher import Batcher, Stats
from stateset_agents.backends.local.model_selection import Engine, RunningModel, select_engine
from stateset_agents.backends.local.scheduler import (
    Scheduler,
    Scheduling,
    Work,
    call,
    resolve,
)
from stateset_agents.backends.local.slot_table import Key, new_request
from stateset_agents.backends.pretrained.load_lock import load_in_thread, loading, suppress_library_logs
from stateset_agents.backends.pretrained.loading import unreadable
from stateset_agents.backends.pretrained.pictures import PictureReader, marked, sample_pictures
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer, TurnText, save_tokenizer
from stateset_agents.runtime.machine import trim_memory
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message, SamplingMask, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_log = get_logger(__name__)

_SCORE_TOKENS = 128
"""Tokens whose log-softmax is computed at once."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HuggingFaceBackend:
    """Samples many conversations at once; the cache of a conversation survives between its turns.

    For causal decoders of transformers (Llama, Qwen2, Qwen3, Mistral, GPT-2 and others). Log-probs are those
    of the distribution that was sampled from, stored as each token is drawn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: HuggingFaceTokenizer,
        *,
        scheduling: Scheduling = "deterministic",
        max_cached_tokens: int = 262_144,
        context_length: int | None = None,
        device: str | torch.device | None = None,
        dtype: Literal["fp32", "bf16", "fp16"] | None = None,
        copy_model: bool = True,
        reload: Callable[[torch.device], PreTrainedModel] | None = None,
        engine: Engine = "auto",
        fast_linears: bool = True,
        matmul_precision: MatmulPrecision = "highest",
        pictures: PictureReader | None = None,
    ) -> None:
        """The backend copies the model, in eval mode; with `copy_model=False` it takes `model` over.

        `pictures` reads those of messages, for a vision-language model; without it the model reads text.
        `reload` loads the same model in fp32, in case `model` was loaded in less.

        `max_cached_tokens` bounds the cache (conversations times the length of the longest); `context_length`
        lowers the model's own limit. `device` and `dtype` default to the model's. `engine` forces one way of
        running the model instead of the first that is correct (model_selection.py); `fast_linears=False`
        leaves fp32 products to torch (linears.py); `matmul_precision` applies to rollouts and to the
        updates of a training.
        """
        served: Any = copy.deepcopy(model) if copy_model else model
        self._reload = reload
        self._uncast: Any = None
        """The model before `dtype` rounded it, on the CPU; None if nothing was rounded."""
        if dtype and DTYPES[dtype] != torch.promote_types(DTYPES[dtype], served.dtype):
            self._uncast = copy.deepcopy(served).to("cpu")
        self._is_updated = False
        served.to(device=device or served.device, dtype=DTYPES[dtype] if dtype else served.dtype)
        self._model: PreTrainedModel = served.eval().requires_grad_(False)
        self._adapted = AdaptedModel(self._model)
        self._sharing: WeakSet[PreTrainedModel] = WeakSet()
        """Models of trainings on this one's parameters."""
        self.base = object()
        """Stands for the weights without an adapter: another object whenever they change."""
        self.tokenizer: Tokenizer = tokenizer
        self._hf_tokenizer = tokenizer.hf
        self.pictures = pictures
        """Reads the pictures of messages; None where the model reads text alone."""
        self.version = 0
        self.recommended: Mapping[str, Any] = {}
        """Training settings that the model's card recommends."""
        self.trained_tokens: frozenset[int] | None = None
        """Token ids that the model's training had; None where its folder does not say."""
        self.context_length = _context_length(self._model, context_length)
        self._num_embeddings: int = self._model.get_input_embeddings().weight.shape[0]
        self.scheduling: Scheduling = scheduling
        self._engine: Engine = engine
        self.fast_linears = fast_linears
        """True if fp32 matrix products may run by oneDNN, where that is faster."""
        self.matmul_precision = usable_precision(matmul_precision, self._model.device)
        """Precision of fp32 matrix products here, and in a training of this model."""
        self.is_exact = self._model.dtype is torch.float32 and self.matmul_precision == "highest"
        self._running: RunningModel | None = None
        self._max_cached_tokens = max_cached_tokens
        self._started_batcher: Batcher | None = None
        self._scheduler = Scheduler(scheduling)
        self._serials = itertools.count()
        self._num_threads = 1
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The worker's model. Read its config and copy it; only `update_weights` may change its weights."""
        return self._model

    @property
    def name_or_path(self) -> str:
        return str(self._model.name_or_path)

    is_repeatable = True
    """Turns wait for one another under deterministic scheduling."""

    def model_to_quantize(self) -> PreTrainedModel:
        """The worker's model: a copy in fp32 may not fit. With an adapter in use, a copy that has it."""
        return self._adapted.merged_copy(self._model.dtype) if self._adapted.adapter else self._model

    @property
    def has_adapter(self) -> bool:
        """See `AdapterBackend`."""
        return bool(self._adapted.adapter)

    def share_model(self, fits: Callable[[PreTrainedModel], bool]) -> PreTrainedModel | None:
        """The model once more, on the same frozen parameters, for a training that changes none of them; None
        where the model does not fit it, and while an adapter is in use, on which a second one would have to
        stand."""
        if self._adapted.adapter or not fits(self._model):
            return None
        # The objects, not their storages: an engine that joins weights gives them other storages later.
        memo = {id(part): part for part in (*self._model.parameters(), *self._model.buffers())}
        shared = copy.deepcopy(self._model, memo)
        self._sharing.add(shared)
        return shared

    def master_model(self) -> PreTrainedModel:
        """A copy for training, in at least fp32, of the weights before `dtype` rounded them.

        Blocking: a model that was loaded in less than fp32 is loaded again. After `update_weights` it is a
        copy of the weights in use, which are rounded; a warning says so.
        """
        is_exact = self._model.dtype == torch.promote_types(self._model.dtype, torch.float32)
        is_rounded = self._uncast is not None or not is_exact
        master: Any
        if self._adapted.adapter:
            master = self._adapted.merged_copy(torch.promote_types(self._model.dtype, torch.float32))
        elif is_rounded and not self._is_updated and self._uncast is not None:
            master = copy.deepcopy(self._uncast).to(self._model.device)
        elif is_rounded and not self._is_updated and self._reload is not None:
            master = self._reload(self._model.device)
        else:  # where it came in this dtype, there never were more exact weights
            master = copy.deepcopy(self._model)
            if is_rounded and self._is_updated:
                _log.warning(
                    f"the agent was trained before and holds its weights in {self._model.dtype}, so training "
                    "goes on from rounded ones: load the checkpoint's model/ for the exact ones"
                )
        dtype = torch.promote_types(master.dtype, torch.float32)
        trainable: PreTrainedModel = master.to(dtype).eval().requires_grad_(True)
        return trainable

    @property
    def num_conversations(self) -> int:
        """Conversations that occupy a slot of the cache."""
        return 0 if self._started_batcher is None else self._started_batcher.num_conversations

    @property
    def stats(self) -> Stats:
        """Counts since the start."""
        return Stats() if self._started_batcher is None else self._started_batcher.stats

    def counts(self) -> Mapping[str, int]:
        """`stats` by name."""
        return asdict(self.stats)

    @property
    def running(self) -> RunningModel:
        """The engine that `start` selected, and why."""
        if self._running is None:
            raise BackendError("how the model runs is chosen at the start: await backend.start() first")
        return self._running

    @property
    def _batcher(self) -> Batcher:
        if self._started_batcher is None:
            raise BackendError("the backend was not started: await backend.start() first")
        return self._started_batcher

    async def start(self) -> None:
        """Select the engine that reproduces the model's full forwards, and serve. A second call does nothing.

        Raises BackendError if no engine does, ConfigurationError if the configured `engine` does not.
        """
        if self._thread is not None:
            return
        trim_memory()  # a training before this one, in the same process, has left its own
        self._num_threads = torch.get_num_threads()
        self._scheduler.open()
        self._thread = threading.Thread(target=self._serve, name="generation", daemon=True)
        self._thread.start()
        try:
            await self._scheduler.run_job(self._select_engine)
        except BaseException:
            await self.close()
            raise

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
        pixels: Sequence[PixelValues] = (),
    ) -> Completion:
        """Sample one turn after `prompt_ids` [P]; stops at a stop id, an eos id, a stop string or a limit.

        `pixels`: the prompt's pictures, in order.
        `on_text` is called on the event loop with each piece of text. Cancelling ends the turn. Raises
        BackendError if the prompt fills the context, if the logits are NaN (then only this turn fails) or if
        the worker broke, ConfigurationError if the tokenizer gave ids that the model has no embeddings for.
        """
        self._expect_embedded(prompt_ids)
        limit = min(params.max_new_tokens, self.context_length - len(prompt_ids))
        key: Key = (0, *session) if session is not None else (1, next(self._serials), 0)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(self.tokenizer.eos_ids)
        request = new_request(
            key,
            prompt_ids,
            params,
            stop_ids,
            self.context_length,
            marked=self._marked(prompt_ids, pixels),
            pixels=pixels,
            matcher=await self._matcher(params, limit),
        )
        on_piece = None if on_text is None else partial(call, asyncio.get_running_loop(), on_text)
        text = TurnText(
            self.tokenizer,
            params.stop,
            on_piece,
            end_ids=stop_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        if params.stop or on_text is not None:
            request.text = text
        try:
            await self._scheduler.generate(request)
        finally:
            if session is None:
                self._scheduler.change_cache("release", key, lambda: self._batcher.release(key))
        # The worker sent its last piece before it woke us, and calls keep their order: `on_text` got it.
        token_ids = tuple(request.sampled)
        if request.finish_reason is None:
            raise BackendError("a turn was handed back before it ended; please report this")
        return Completion(
            message=Message(role="assistant", content=text.finish(token_ids)),
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            version_spans=request.version_spans(),
            pixels=request.pixels,
            constraint=params.constraint and replace(params.constraint, limit=limit),
            stop=text.stopped_by,
            forced=tuple(place in request.forced for place in range(len(token_ids)))
            if request.forced
            else (),
            sampling_mask=SamplingMask.of(request.kept.get(place, ()) for place in range(len(token_ids)))
            if params.carries_mask
            else None,
            begun=request.admitted_at,
        )

    async def _matcher(self, params: SamplingParams, limit: int) -> Matcher | None:
        """The matcher of a constrained turn of at most `limit` tokens. Raises ConfigurationError where a stop
        string could cut it."""
        constraint = params.constraint
        if constraint is None:
            return None
        if params.stop:
            raise ConfigurationError(
                f"stop strings {list(params.stop)} could cut a constrained reply anywhere: leave them out"
            )
        return await asyncio.to_thread(self._begun, replace(constraint, limit=limit))

    def _begun(self, constraint: Constraint) -> Matcher:
        """A matcher whose first mask has been made once: it may take as long as a few steps."""
        matcher = grammars_of(self.tokenizer).matcher(constraint)
        matcher.allowed()
        return matcher

    def _marked(self, ids: Sequence[int], pixels: Sequence[PixelValues]) -> Sequence[int]:
        """The ids as the engine takes them. Raises BackendError for pictures that are not the prompt's."""
        if self.pictures is not None:
            return marked(ids, pixels, self.pictures.place_id)
        if pixels:
            raise BackendError(f"{type(self._model).__name__} reads text alone, and a prompt has pictures")
        return ids

    async def score(
        self, ids: Sequence[int], *, temperature: float = 1.0, pixels: Sequence[PixelValues] = ()
    ) -> list[float]:
        """[T-1] log-prob of each of `ids[1:]` given the ids before it and their pictures, by one full
        forward."""
        if not 0 < len(ids) <= self.context_length:
            raise BackendError(f"scoring takes 1 to {self.context_length} tokens, got {len(ids)}")
        self._expect_embedded(ids)
        if temperature <= 0:
            raise BackendError(f"scoring needs a temperature above 0, got {temperature}")
        row = self._marked(ids, pixels)
        scores: list[float] = await self._scheduler.run_job(
            lambda: self._score(list(ids), list(row), temperature, pixels)
        )
        return scores

    def _expect_embedded(self, ids: Sequence[int]) -> None:
        """Check now: an id outside the embedding table breaks the worker, and on a GPU the whole process."""
        top = max(ids, default=0)
        if min(ids, default=0) < 0:
            raise ConfigurationError(f"the tokenizer gave token {min(ids)}: give the model's own tokenizer")
        if top >= self._num_embeddings:
            raise ConfigurationError(
                f"the tokenizer gave token {top} ({self.tokenizer.decode([top])!r}) and the model has "
                f"embeddings for {self._num_embeddings}, 0 to {self._num_embeddings - 1}: give the model's "
                f"own tokenizer, or save the model after model.resize_token_embeddings({top + 1})"
            )

    async def fork(self, session: Session, into: Session) -> None:
        """Let `into` start from a copy of `session`'s cache, made before the next step."""
        source, target = (0, *session), (0, *into)
        self._scheduler.change_cache("fork", target, lambda: self._batcher.fork(source, target))

    async def release(self, session: Session) -> None:
        key = (0, *session)
        self._scheduler.change_cache("release", key, lambda: self._batcher.release(key))

    async def sleep(self) -> None:
        """Free the memory that only generation needs until the next request; nothing cached is lost."""
        self._scheduler.change_cache("sleep", (0, 0, 0), lambda: self._batcher.sleep())

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Load new weights between two steps: a state dict, or a folder written by `save_pretrained`.

        Cached conversations are prefilled again with them. Raises BackendError, and changes nothing, if names
        or shapes differ.
        """
        if isinstance(source, Mapping):
            state = source
        else:
            state = await load_in_thread(partial(_read_folder, source, self._model))
        await self._scheduler.run_job(lambda: self._load(state, version))

    async def update_adapter(self, adapter: Adapter, version: int) -> None:
        """Sample with this adapter beside the weights from the next step on; see `AdapterBackend`."""
        await self._scheduler.run_job(lambda: self._set_adapter(adapter, version))

    async def check_health(self) -> None:
        """Raises BackendError if the worker thread accepts no requests: not started, closed, or broken."""
        self._scheduler.check()
        if self._thread is None or not self._thread.is_alive():
            raise BackendError("the generation worker is gone")

    def participate(self) -> AbstractContextManager[None]:
        """See `Backend.participate`; it has no effect under throughput scheduling."""
        return self._scheduler.participate()

    def save_pretrained(self, path: str | Path) -> None:
        """Write model, generation config and tokenizer as transformers' `from_pretrained` reads them.

        The weights are those in use, in the rollouts' dtype, or in fp32 with an adapter merged into them; a
        checkpoint's `model/` has the fp32 masters.
        Raises BackendError if the folder cannot be written.
        """
        try:
            with suppress_library_logs():
                (self.master_model() if self._adapted.adapter else self._model).save_pretrained(path)
                save_tokenizer(self._hf_tokenizer, path)
                if self.pictures is not None:
                    self.pictures.save(path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BackendError(
                f"cannot save the model to {str(path)!r} ({reason}): free the disk or choose another folder"
            ) from error

    async def close(self) -> None:
        """Stop the worker and wait for its thread; pending requests get a BackendError."""
        self._scheduler.stop("the backend was closed")
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    # --- in the worker thread ---------------------------------------------------------------------------

    def _select_engine(self) -> None:
        if self._running is None:
            self._running = select_engine(
                self._model,
                self.context_length,
                engine=self._engine,
                fast_linears=self.fast_linears,
                matmul_precision=self.matmul_precision,
                pictures=() if self.pictures is None else sample_pictures(self.pictures),
            )
            self._started_batcher = Batcher(self._running.model, max_cached_tokens=self._max_cached_tokens)

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)  # torch keeps one number per thread
        with torch.inference_mode():
            progress = True
            while (work := self._scheduler.next_work(progress)) is not None:
                try:
                    progress = self._do(work)
                except Exception as error:  # every caller must get it, whatever it is
                    reason = f"the generation worker broke: {type(error).__name__}: {error}"
                    self._scheduler.stop(reason, error)

    def _do(self, work: Work) -> bool:
        """Do this work; False if no step was run, so that only a new event can change anything."""
        for job in work.jobs:
            try:
                result = job.run()
            except Exception as error:  # belongs to the caller of this job alone
                resolve([job.future], error=_as_our_error(error))
            else:
                resolve([job.future], result)
        for request in work.cancelled:
            self._batcher.cancel(request)
        for change in work.changes:
            change()
        for pending in work.pending:
            if not pending.is_admitted:
                try:
                    pending.is_admitted = self._batcher.admit(pending.request)
                except BackendError as error:  # this request can never fit; others go on
                    self._scheduler.finish([pending], error)
        live = {
            pending.request: pending
            for pending in work.pending
            if pending.is_admitted and not pending.future.done()
        }
        if live:
            ended = self._batcher.step(list(live))
            for request in ended:
                if request.error is not None:
                    self._scheduler.finish([live[request]], request.error)
            self._scheduler.finish([live[request] for request in ended if request.error is None])
        return bool(live)

    def _score(
        self, ids: list[int], marked: list[int], temperature: float, pixels: Sequence[PixelValues]
    ) -> list[float]:
        row = torch.tensor(ids, device=self._model.device)
        logits = self._batcher.model.full_logits(torch.tensor(marked, device=row.device), pixels)[:-1]
        picked: list[float] = []
        # In chunks: a float32 copy of all logits would be the largest tensor in memory by far.
        for start in range(0, len(logits), _SCORE_TOKENS):
            chunk, following = logits[start : start + _SCORE_TOKENS], row[1:][start : start + _SCORE_TOKENS]
            scores = chunk.float() / temperature
            token_scores = scores.gather(-1, following[:, None])[:, 0]
            picked += (token_scores - scores.logsumexp(-1)).tolist()
        return picked

    def _load(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        current = {name: tensors[name] for name in self._model.state_dict() if name in tensors}  # tied: once
        missing, shapes = sorted(set(current) - set(state)), shapes_of(state)
        if missing:
            raise BackendError(
                f"the new weights lack {missing[0]} ({len(missing)} names in all); pass the whole state dict "
                f"of a {type(self._model).__name__}"
            )
        for name, tensor in current.items():
            if shapes[name].shape != tensor.shape:
                raise BackendError(
                    f"the new weights have {name} of shape {tuple(shapes[name].shape)}, the model has "
                    f"{tuple(tensor.shape)}; they come from another architecture"
                )
        for shared in self._sharing:
            give_own_parameters(shared)  # a training stands on these: they stay as they are
        self._sharing.clear()
        for name, tensor in current.items():
            tensor.copy_(state[name])
        self._batcher.model.refresh()
        self._is_updated = True
        self.base = object()
        self._set_adapter({}, version)

    def _set_adapter(self, adapter: Adapter, version: int) -> None:
        self._adapted.set(adapter)
        self._batcher.model.set_adapter(self._adapted.adapter)
        self.version = version
        self._batcher.set_version(version)


def _context_length(model: PreTrainedModel, context_length: int | None) -> int:
    """The model's own limit, or `context_length` if that is lower."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context_length is not None and context_length < 2:
        raise ConfigurationError(f"context_length must be at least 2, got {context_length}")
    if limit is None and context_length is None:
        raise ConfigurationError(
            f"{type(model).__name__} names no longest context (max_position_embeddings); set the agent's "
            "max_context_tokens, or context_length of a backend of your own"
        )
    return min(length for length in (limit, context_length) if length is not None)


def _read_folder(path: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    try:
        with loading():
            loaded = type(model).from_pretrained(path, dtype=model.dtype, local_files_only=True)
        return dict(loaded.state_dict())
    except unreadable() as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendError(f"no weights to load in {str(path)!r}: {reason}") from error


def _as_our_error(error: Exception) -> BackendError | ConfigurationError:
    if isinstance(error, BackendError | ConfigurationError):
        return error
    wrapped = BackendError(f"{type(error).__name__} in the generation worker: {error}")
    wrapped.__cause__ = error
    return wrapped
