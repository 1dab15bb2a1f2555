"""What a backend is: token ids in, sampled ids with their log-probs out.

The episode (core/rollout/episode.py) calls `generate` once per agent turn with *all* ids of the conversation
so far and the conversation's session; a backend that keeps a cache per session prefills only what is
new. The trainer owns the policy's weights: a backend receives them only by `update_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from stateset_agents.backends.matmul_precision import MatmulPrecision
    from stateset_agents.types.messages import Completion, SamplingParams

__all__ = ["Backend", "EngineInfo", "Session", "SharedBackend", "Tokenizer", "TrainableBackend"]


class Session(NamedTuple):
    """One live conversation. Sessions sort: the engine takes work in (episode, member) order."""

    episode: int
    member: int


@runtime_checkable
class Tokenizer(Protocol):
    """The little that our code asks of a tokenizer; transformers' tokenizers satisfy it by an adapter."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and control tokens written out in it stay plain text."""
        ...

    def encode_markup(self, text: str) -> list[int]:
        """Ids of trusted template text, in which control tokens are control tokens; no BOS added."""
        ...

    def least_tokens(self, text: str) -> int:
        """A number that the tokens of a text are never below, told without encoding it; 0 is always true."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        ...

    def piece(self, id: int) -> str:
        """What one token says, with its leading space; a control token as it is written in markup."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        ...


class Backend(Protocol):
    """Tokens in, tokens and log-probs out."""

    tokenizer: Tokenizer
    context_length: int
    """Most tokens of one conversation, prompt and completions together."""
    version: int
    """Of the weights in use: what the last `update_weights` said, 0 before."""

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
        character; the pieces laid end to end are the message's content. Cancelling ends the turn.
        """
        ...

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[T-1] log-prob of each of `ids[1:]` given what stands before it."""
        ...

    async def fork(self, session: Session, into: Session) -> None:
        """Let `into` start from a copy of `session`'s cache."""
        ...

    async def release(self, session: Session) -> None:
        """Forget a conversation; unknown sessions are ignored."""
        ...

    async def rest(self) -> None:
        """No turn is asked for until an update is through: free what only generation needs.

        Nothing of a conversation that was not released is lost, and a turn that comes all the same is served.
        """
        ...

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Take new weights: a state dict, or a folder written by `save_pretrained`.

        Conversations that are cached under the old weights are refilled before they go on.
        """
        ...

    async def check_health(self) -> None:
        """Raises BackendError where no turn can be served any more, and says why; quick, for it is polled."""
        ...

    def counts(self) -> Mapping[str, int]:
        """What was done since the start, by name; empty where nobody counts. Steps log the differences."""
        ...

    def lane(self) -> AbstractContextManager[None]:
        """Join the logical clock: while inside, no decode step starts unless this lane awaits a turn.

        Under `scheduling: deterministic` the engine holds one lane per concurrent conversation, so
        the batches depend on what was said, never on how long anyone took. A no-op elsewhere.
        """
        ...

    async def close(self) -> None: ...


class EngineInfo(Protocol):
    """How a model is run."""

    @property
    def name(self) -> str: ...

    @property
    def why(self) -> str:
        """Why in this way and in no faster one."""
        ...

    @property
    def linears(self) -> str:
        """Who multiplies its matrices."""
        ...


@runtime_checkable
class TrainableBackend(Backend, Protocol):
    """A backend whose weights a trainer can have, and give back by `update_weights`."""

    @property
    def recommended(self) -> Mapping[str, Any]:
        """Training settings that the model's card recommends."""
        ...

    @property
    def is_exact(self) -> bool:
        """Are its log-probs those of an update in fp32?"""
        ...

    @property
    def is_repeatable(self) -> bool:
        """Can its turns be scheduled so that a run repeats bit by bit?"""
        ...

    @property
    def matmul_precision(self) -> MatmulPrecision:
        """Of fp32 matrix products in this process, here and in a training of the model."""
        ...

    @property
    def running(self) -> EngineInfo: ...

    def master_model(self) -> PreTrainedModel:
        """A copy to train, in at least fp32. Blocking."""
        ...

    def model_to_quantize(self) -> PreTrainedModel:
        """A model with the weights in any precision, which is copied and not kept. Blocking."""
        ...


@runtime_checkable
class SharedBackend(TrainableBackend, Protocol):
    """One server behind the backends of several processes: the first process updates it for all."""

    def weights_in_use(self) -> Any:
        """What another process's backend needs to use the same weights of the server."""
        ...

    def follow(self, shared: Any) -> None:
        """Use the weights that another process has put there."""
        ...
