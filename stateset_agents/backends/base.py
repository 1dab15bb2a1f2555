"""The backend's protocols: token ids in, sampled ids with their log-probs out.

The episode (core/rollout/episode.py) calls `generate` once per agent turn, with *all* ids of the conversation
so far and with its session. A backend that keeps a cache per session prefills only the new ids. The trainer
owns the policy's weights: a backend gets them only by `update_weights`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from stateset_agents.types.errors import BackendError, ConfigurationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from stateset_agents.backends.adapters import Adapter
    from stateset_agents.backends.linears import MatmulPrecision
    from stateset_agents.backends.pretrained.pictures import PictureReader
    from stateset_agents.types.images import PixelValues
    from stateset_agents.types.messages import Completion, SamplingParams


class Session(NamedTuple):
    """A live conversation. Sessions sort by (episode, member), the order of requests in a batch."""

    episode: int
    member: int


@runtime_checkable
class Tokenizer(Protocol):
    """The members of a tokenizer that our code calls; `HuggingFaceTokenizer` adapts those of transformers."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without BOS. A control token that is written out in it stays plain text."""

    def encode_markup(self, text: str) -> list[int]:
        """Ids of trusted template text, without BOS. A control token in it becomes its own id."""

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, without encoding it; 0 is always correct."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without control tokens."""

    def decode_markup(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens as markup writes them."""

    def piece(self, id: int) -> str:
        """Text of one token with its leading space; a control token as markup writes it."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""


class Backend(Protocol):
    """Tokens in, tokens and log-probs out."""

    tokenizer: Tokenizer
    context_length: int
    """Most tokens of one conversation, prompt and completions together."""
    version: int
    """Version of the weights in use: that of the last `update_weights`, 0 before."""

    async def start(self) -> None: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Sample one turn after `prompt_ids` [P]; stops at a stop id, a stop string or `max_new_tokens`.

        `on_text` is called on the event loop with each piece of text as it is sampled, never with half a
        character; the joined pieces are the message's content: the raw text, thoughts and tool calls in it,
        without the token that ended the turn. Cancelling ends the turn.
        """

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[T-1] log-prob of each of `ids[1:]` given the ids before it."""

    async def fork(self, session: Session, into: Session) -> None:
        """Let `into` start from a copy of `session`'s cache."""

    async def release(self, session: Session) -> None:
        """Forget a conversation; unknown sessions are ignored."""

    async def sleep(self) -> None:
        """Free the memory that only generation needs: nothing will be generated until an update is done.

        Conversations that were not released lose nothing. A request that comes nevertheless is served.
        """

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Load new weights: a state dict, or a folder written by `save_pretrained`.

        A conversation that is cached with the old weights is prefilled again before its next token.
        """

    async def check_health(self) -> None:
        """Raises BackendError, with the reason, if no request can be served any more. Quick: it is polled."""

    def counts(self) -> Mapping[str, int]:
        """Totals since the start, by name; empty if the backend counts nothing. Steps log the differences."""

    def participate(self) -> AbstractContextManager[None]:
        """While inside, no decode step starts unless this participant waits for a request.

        Under `scheduling: deterministic` the engine enters one for each conversation that is played at the
        same time. So batches depend on what was said, never on how long anyone took. Elsewhere a no-op.
        """

    async def close(self) -> None: ...


@runtime_checkable
class PictureBackend(Backend, Protocol):
    """A backend whose prompts may have pictures."""

    pictures: PictureReader | None
    """Reads the pictures of messages; None where the model reads text alone."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
        pixels: Sequence[PixelValues] = (),
    ) -> Completion:
        """Like `Backend.generate`; `pixels`: the pictures in `prompt_ids`, in order."""


def picture_reader(backend: Backend) -> PictureReader | None:
    """The reader of a backend's pictures; None where it reads text alone."""
    return backend.pictures if isinstance(backend, PictureBackend) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Says how a backend runs its model."""

    name: str
    why: str
    """The reason why this engine was selected and no faster one."""
    linears: str
    """The library that computes its matrix products."""


@runtime_checkable
class SavableBackend(Backend, Protocol):
    """A backend that can write its weights."""

    @property
    def name_or_path(self) -> str:
        """The source of the weights, as transformers names it."""

    def save_pretrained(self, path: str | Path) -> None:
        """Write model and tokenizer as transformers' `from_pretrained` reads them. Blocking."""


@runtime_checkable
class TrainableBackend(Backend, Protocol):
    """A backend whose weights a trainer can copy, and replace by `update_weights`."""

    trained_tokens: frozenset[int] | None
    """Token ids that the model's trainings had; None where its folder does not say."""

    @property
    def recommended(self) -> Mapping[str, Any]:
        """Training settings that the model's card recommends."""

    @property
    def is_exact(self) -> bool:
        """True if its log-probs are those that an update in fp32 computes."""

    @property
    def is_repeatable(self) -> bool:
        """True if its requests can be scheduled so that a run is repeatable bit by bit."""

    @property
    def matmul_precision(self) -> MatmulPrecision:
        """Precision of fp32 matrix products, both of sampling and of a training of the model."""

    def master_model(self) -> PreTrainedModel:
        """A copy to train, in at least fp32. Blocking."""

    def model_to_quantize(self) -> PreTrainedModel:
        """A model with the weights in any precision, which the caller copies and does not keep. Blocking."""


@runtime_checkable
class AdapterBackend(TrainableBackend, Protocol):
    """A backend that samples with a LoRA adapter beside its weights, without a merged copy of them."""

    @property
    def base(self) -> object:
        """Stands for the weights without an adapter: another object whenever they change."""

    @property
    def has_adapter(self) -> bool:
        """True while it samples with an adapter beside these weights."""

    def share_model(self, fits: Callable[[PreTrainedModel], bool]) -> PreTrainedModel | None:
        """The model once more, on the same frozen parameters, for a training that changes none of them; None
        where the model does not fit it, so that it must have a copy. Blocking."""

    async def update_adapter(self, adapter: Adapter, version: int) -> None:
        """Sample with this adapter in place of the one before from the next step on; the caller's tensors may
        change afterwards.

        A conversation that is cached with other weights is prefilled again before its next token.
        """


@runtime_checkable
class RunningBackend(TrainableBackend, Protocol):
    """A trainable backend that has been started: only then is an engine selected."""

    @property
    def running(self) -> EngineInfo: ...


@runtime_checkable
class SharedBackend(TrainableBackend, Protocol):
    """A backend whose server is used by several processes; the first process updates its weights for all."""

    def weights_in_use(self) -> Any:
        """The values that another process's backend needs to use the same weights of the server."""

    def follow(self, shared: Any) -> None:
        """Use the weights that another process has loaded into the server."""


# --- which trainer trains a backend's model, and which weights it has

_trainers: WeakKeyDictionary[Backend, list[object]] = WeakKeyDictionary()
"""The owners of the trainers that train each backend's model now."""
_tokens: WeakKeyDictionary[Backend, object] = WeakKeyDictionary()
"""An object that stands for the weights that each backend has."""


@contextlib.contextmanager
def exclusive(backend: Backend, owner: object) -> Iterator[None]:
    """While open, no other owner's trainer may train the backend's model; the same one may enter again.

    Raises ConfigurationError while another one trains it: each would sample from the other's weights.
    """
    owners = _trainers.setdefault(backend, [])
    if any(other is not owner for other in owners):
        raise ConfigurationError(
            "another trainer is training this agent: await its end, or give each trainer an agent of its own"
        )
    owners.append(owner)
    try:
        yield
    finally:
        owners.remove(owner)


def is_training(backend: Backend) -> bool:
    """True while a trainer works on the backend's model."""
    return bool(_trainers.get(backend))


def weights_token(backend: Backend) -> object:
    """Stands for the weights the backend has now: the same object until a trainer pushes others."""
    return _tokens.setdefault(backend, object())


def new_weights(backend: Backend) -> object:
    """Note that a trainer has pushed other weights; returns their token."""
    _tokens[backend] = token = object()
    return token


def room_behind(prompt_ids: Sequence[int], context_length: int) -> int:
    """The tokens that fit behind a prompt. Raises BackendError where none does."""
    if len(prompt_ids) >= context_length:
        raise BackendError(
            f"the prompt has {len(prompt_ids)} tokens and the context holds {context_length}; end the "
            "conversation earlier, or take a longer context"
        )
    return context_length - len(prompt_ids)
