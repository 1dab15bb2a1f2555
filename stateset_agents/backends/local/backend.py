"""In-process generation with a transformers model that one worker thread owns; made by loading.py.

Callers await turns on the event loop; the thread batches them (batcher.py) when the clock lets it
(scheduler.py).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError

from stateset_agents.backends.base import Session, Tokenizer
from stateset_agents.backends.local.batcher import Batcher, Stats
from stateset_agents.backends.local.model_selection import Engine, RunningModel, choose_path
from stateset_agents.backends.local.request import Key, Turn, new_turn
from stateset_agents.backends.local.scheduler import Clock, Scheduling, Ticket, Work, call, deliver, fail
from stateset_agents.backends.matmul_precision import MatmulPrecision, usable_precision
from stateset_agents.backends.pretrained.library_logs import quietly
from stateset_agents.backends.pretrained.load_lock import load_in_thread, loading
from stateset_agents.backends.pretrained.loading import unreadable
from stateset_agents.backends.text.tokenizers import HuggingFaceTokenizer, save_tokenizer
from stateset_agents.backends.text.turn_text import TurnText
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["DTYPES", "HuggingFaceBackend"]

_log = get_logger(__name__)

_SCORED = 128  # tokens whose log-softmax is taken at once
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HuggingFaceBackend:
    """Serves many live conversations at once; a conversation's cache survives between its turns.

    Attention-only decoders (Llama, Qwen2, Qwen3, Mistral, GPT-2 and their like). Log-probs are those of the
    distribution that was sampled from, stored as each token is drawn.
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
    ) -> None:
        """The backend keeps its own copy of the weights, in eval mode; `copy_model=False` gives `model` away.

        `reload` loads the same model in fp32, where `model` was loaded in less.

        `max_cached_tokens` bounds the cache (conversations times the longest one's length); `context_length`
        lowers the model's own. `device` and `dtype` default to the model's. `engine` names one way of running
        it instead of the first that can (model_selection.py); `fast_linears=False` leaves fp32 products to
        torch (onednn_linear.py); `matmul_precision` is that of rollouts and of a training's updates
        (matmul_precision.py).
        """
        own: Any = copy.deepcopy(model) if copy_model else model
        self._reload = reload
        self._uncast: Any = None
        """The model as it was given, on the CPU, where `dtype` rounds it."""
        if dtype and DTYPES[dtype] != torch.promote_types(DTYPES[dtype], own.dtype):
            self._uncast = copy.deepcopy(own).to("cpu")
        self._is_updated = False
        own.to(device=device or own.device, dtype=DTYPES[dtype] if dtype else own.dtype)
        self._model: PreTrainedModel = own.eval().requires_grad_(False)
        self.tokenizer: Tokenizer = tokenizer
        self._hf_tokenizer = tokenizer.hf
        self.version = 0
        self.recommended: Mapping[str, Any] = {}
        """Training settings that the model's card recommends."""
        self.context_length = _context_length(self._model, context_length)
        self._num_embeddings: int = self._model.get_input_embeddings().weight.shape[0]
        self.scheduling: Scheduling = scheduling
        self._engine: Engine = engine
        self.fast_linears = fast_linears
        """May fp32 matrix products take the fast route, where this machine has one?"""
        self.matmul_precision = usable_precision(matmul_precision, self._model.device)
        """That of fp32 matrix products here, and in a training of this model."""
        self._running: RunningModel | None = None
        self._max_cached_tokens = max_cached_tokens
        self._started: Batcher | None = None
        self._clock = Clock(scheduling)
        self._serials = itertools.count()
        self._num_threads = 1
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The worker's model, for its config and for copies; only `update_weights` changes its weights."""
        return self._model

    @property
    def is_exact(self) -> bool:
        """Are its log-probs those of an update in fp32?"""
        return self._model.dtype is torch.float32 and self.matmul_precision == "highest"

    is_repeatable = True
    """Turns wait for one another under deterministic scheduling."""

    def model_to_quantize(self) -> PreTrainedModel:
        """The worker's model: a copy in fp32 may not fit."""
        return self._model

    def master_model(self) -> PreTrainedModel:
        """A copy to train, in at least fp32, of the weights as they were before `dtype` rounded them.

        Blocking: a model that was loaded in less than fp32 is loaded once more. After `update_weights` it is
        a copy of the weights in use, which have the rollouts' rounding; a warning says so.
        """
        exact = self._model.dtype == torch.promote_types(self._model.dtype, torch.float32)
        if exact and self._uncast is None:
            master: Any = copy.deepcopy(self._model)
        elif self._is_updated:
            _log.warning(
                f"the agent was trained before and holds its weights in {self._model.dtype}, so training "
                "goes on from rounded ones: load the checkpoint's model/ for the exact ones"
            )
            master = copy.deepcopy(self._model)
        elif self._uncast is not None:
            master = copy.deepcopy(self._uncast).to(self._model.device)
        elif self._reload is not None:
            master = self._reload(self._model.device)
        else:  # it was given in this dtype: there never were other weights
            master = copy.deepcopy(self._model)
        dtype = torch.promote_types(master.dtype, torch.float32)
        trainable: PreTrainedModel = master.to(dtype).eval().requires_grad_(True)
        return trainable

    @property
    def num_conversations(self) -> int:
        """How many hold a slot of the cache now."""
        return 0 if self._started is None else self._started.num_conversations

    @property
    def stats(self) -> Stats:
        """Counts since the start."""
        return Stats() if self._started is None else self._started.stats

    def counts(self) -> Mapping[str, int]:
        """`stats` by name."""
        return asdict(self.stats)

    @property
    def running(self) -> RunningModel:
        """Which of the three ways of running the model was chosen at the start, and why."""
        if self._running is None:
            raise BackendError("how the model runs is chosen at the start: await backend.start() first")
        return self._running

    @property
    def _batcher(self) -> Batcher:
        if self._started is None:
            raise BackendError("the backend was not started: await backend.start() first")
        return self._started

    async def start(self) -> None:
        """Choose how to run the model, by what reproduces its full forwards, and serve. Twice does nothing.

        Raises BackendError where nothing does, ConfigurationError where the `engine` asked for doesn't.
        """
        if self._thread is not None:
            return
        self._num_threads = torch.get_num_threads()
        self._clock.open()
        self._thread = threading.Thread(target=self._serve, name="generation", daemon=True)
        self._thread.start()
        try:
            await self._clock.job(self._choose)
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
    ) -> Completion:
        """Sample one turn after `prompt_ids` [P]; stops at a stop id, an eos id, a stop string or a limit.

        `on_text` is called on the event loop with each piece of text. Cancelling ends the turn and frees its
        slot. Raises BackendError where the prompt fills the context, the logits are no numbers (this turn
        fails, others go on) or the worker broke, ConfigurationError where the tokenizer gave ids that the
        model has no embeddings for.
        """
        self._expect_embedded(prompt_ids)
        key: Key = (0, *session) if session is not None else (1, next(self._serials), 0)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(self.tokenizer.eos_ids)
        turn = new_turn(key, prompt_ids, params, stop_ids, self.context_length)
        if params.stop or on_text is not None:
            tell = None if on_text is None else partial(call, asyncio.get_running_loop(), on_text)
            turn.text = TurnText(self.tokenizer, params.stop, tell)
        try:
            await self._clock.turn(turn)
        finally:
            if session is None:
                self._clock.change("release", key, lambda: self._batcher.release(key))
        # A callback of the worker's last piece stands before the one that woke us, so it was called.
        return self._completion(turn, TurnText(self.tokenizer) if turn.text is None else turn.text)

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[T-1] log-prob of each of `ids[1:]` given what stands before it, by one full forward."""
        if not 0 < len(ids) <= self.context_length:
            raise BackendError(f"scoring takes 1 to {self.context_length} tokens, got {len(ids)}")
        self._expect_embedded(ids)
        if temperature <= 0:
            raise BackendError(f"scoring needs a temperature above 0, got {temperature}")
        scored: list[float] = await self._clock.job(lambda: self._score(list(ids), temperature))
        return scored

    def _expect_embedded(self, ids: Sequence[int]) -> None:
        """One look, since an index beyond the table breaks the worker, and on a GPU the whole process."""
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
        """Let `into` start from a copy of `session`'s cache (made before the next step)."""
        source, target = (0, *session), (0, *into)
        self._clock.change("fork", target, lambda: self._batcher.fork(source, target))

    async def release(self, session: Session) -> None:
        """Forget a conversation; unknown sessions are ignored."""
        key = (0, *session)
        self._clock.change("release", key, lambda: self._batcher.release(key))

    async def rest(self) -> None:
        """Free what only generation needs until the next turn, once all conversations are released."""
        self._clock.change("rest", (0, 0, 0), lambda: self._batcher.rest())

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Take new weights between two steps: a state dict, or a folder written by `save_pretrained`.

        Cached conversations are refilled under them. Raises BackendError where names or shapes differ
        (and then changes nothing).
        """
        if isinstance(source, Mapping):
            state = source
        else:
            state = await load_in_thread(partial(_read_folder, source, self._model))
        await self._clock.job(lambda: self._load(state, version))

    async def check_health(self) -> None:
        """Raises BackendError where the worker thread takes no turns: not started, closed, or broken."""
        self._clock.check()
        if self._thread is None or not self._thread.is_alive():
            raise BackendError("the generation worker is gone")

    def lane(self) -> AbstractContextManager[None]:
        """Join the logical clock (see `Backend.lane`); under throughput scheduling it changes nothing."""
        return self._clock.lane()

    def save_pretrained(self, path: str | Path) -> None:
        """Write model, generation config and tokenizer so that plain transformers loads them.

        The weights are those in use, in the rollouts' dtype; a checkpoint's `model/` has the fp32 masters.
        Raises BackendError where the folder cannot be written.
        """
        try:
            with quietly():
                self._model.save_pretrained(path)
                save_tokenizer(self._hf_tokenizer, path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BackendError(
                f"cannot save the model to {str(path)!r} ({reason}): free the disk or choose another folder"
            ) from error

    async def close(self) -> None:
        """Stop the worker and wait for it; whoever still waits for a turn gets a BackendError."""
        self._clock.stop("the backend was closed")
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    # --- in the worker thread ---------------------------------------------------------------------------

    def _choose(self) -> None:
        if self._running is None:
            self._running = choose_path(
                self._model,
                self.context_length,
                engine=self._engine,
                fast_linears=self.fast_linears,
                matmul_precision=self.matmul_precision,
            )
            self._started = Batcher(self._running.path, max_cached_tokens=self._max_cached_tokens)

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)  # torch keeps one number per thread
        with torch.inference_mode():
            progress = True
            while (work := self._clock.next(progress)) is not None:
                try:
                    progress = self._do(work)
                except Exception as error:  # whoever waits must hear of it, whatever it is
                    self._clock.stop(f"the generation worker broke: {type(error).__name__}: {error}", error)

    def _do(self, work: Work) -> bool:
        """One round; False when nothing could move until someone else does something."""
        for job in work.jobs:
            try:
                result = job.run()
            except Exception as error:  # belongs to the caller who asked for it
                fail(job.future, _as_our_error(error))
            else:
                deliver(job.future, result)
        for turn in work.cancelled:
            self._batcher.cancel(turn)
        for change in work.changes:
            change()
        for ticket in work.tickets:
            if not ticket.admitted:
                self._admit(ticket)
        live = {
            ticket.turn: ticket for ticket in work.tickets if ticket.admitted and not ticket.future.done()
        }
        if live:
            ended = self._batcher.step(list(live))
            for turn in ended:
                if turn.error is not None:  # it failed alone
                    self._clock.refuse(live[turn], turn.error)
            self._clock.done([live[turn] for turn in ended if turn.error is None])
        return bool(live)

    def _admit(self, ticket: Ticket) -> None:
        try:
            ticket.admitted = self._batcher.admit(ticket.turn)
        except BackendError as error:  # this one can never fit; the others go on
            self._clock.refuse(ticket, error)

    def _score(self, ids: list[int], temperature: float) -> list[float]:
        row = torch.tensor(ids, device=self._model.device)
        logits = self._batcher.model.full_logits(row)[:-1]
        picked: list[float] = []
        # In pieces: a float32 copy of all logits would be the largest thing in memory by far.
        for start in range(0, len(logits), _SCORED):
            piece, following = logits[start : start + _SCORED], row[1:][start : start + _SCORED]
            scores = piece.float() / temperature
            chosen = scores.gather(-1, following[:, None])[:, 0]
            picked += (chosen - scores.logsumexp(-1)).tolist()
        return picked

    def _load(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        own = {name: tensors[name] for name in self._model.state_dict() if name in tensors}  # tied ones once
        missing = sorted(set(own) - set(state))
        if missing:
            raise BackendError(
                f"the new weights lack {missing[0]} ({len(missing)} names in all); pass the whole state dict "
                f"of a {type(self._model).__name__}"
            )
        for name, held in own.items():
            if state[name].shape != held.shape:
                raise BackendError(
                    f"the new weights have {name} of shape {tuple(state[name].shape)}, the model has "
                    f"{tuple(held.shape)}; they come from another architecture"
                )
        for name, held in own.items():
            held.copy_(state[name])
        self._batcher.model.refresh()
        self._is_updated = True
        self.version = version
        self._batcher.renew(version)

    def _completion(self, turn: Turn, text: TurnText) -> Completion:
        token_ids = tuple(turn.sampled)
        if turn.finish_reason is None:
            raise BackendError("a turn was handed back before it ended; please report this")
        return Completion(
            message=Message(role="assistant", content=text.finish(token_ids)),
            prompt_ids=tuple(turn.prompt.tolist()),
            token_ids=token_ids,
            logprobs=tuple(turn.logprobs),
            finish_reason=turn.finish_reason,
            version_spans=turn.version_spans(),
            begun=turn.begun,
        )


def _context_length(model: PreTrainedModel, wanted: int | None) -> int:
    """The model's own limit, or a lower one that was asked for."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted is not None and wanted < 2:
        raise ConfigurationError(f"context_length must be at least 2, got {wanted}")
    if own is None and wanted is None:
        raise ConfigurationError(
            f"{type(model).__name__} names no longest context (max_position_embeddings); set the agent's "
            "max_context_tokens, or context_length of a backend of your own"
        )
    return min(length for length in (own, wanted) if length is not None)


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
