"""TRL's own generation as a backend: transformers' generate, continuous batching, or TRL's vLLM.

TRL samples a batch of prompts in one call, so turns that are requested together are sampled together. It
keeps no cache between turns: each turn reads its whole conversation again (vLLM caches prefixes itself).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stateset_agents.backends.base import Backend, Session, room_behind
from stateset_agents.backends.tokenizers import TurnText
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import Completion, Message, SamplingParams, VersionSpan

if TYPE_CHECKING:
    import torch


Sampled = tuple[list[int], list[float]]
"""A reply's ids [T] and their log-probs [T]."""

_BATCH_WAIT = 0.01
"""Seconds without a new request after which a batch is sampled, if there are no participants to wait for."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingTurn:
    order: tuple[int, ...]
    prompt_ids: Sequence[int]
    reply: asyncio.Future[Sampled]


class TrlBackend:
    """Samples for rollouts; everything else is done by the agent's backend."""

    def __init__(
        self,
        backend: Backend,
        sample: Callable[[list[list[int]]], Awaitable[list[Sampled]]],
        *,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        """`sample` gets a batch of prompts; temperature and length were fixed when TRL's trainer was made."""
        self.tokenizer = backend.tokenizer
        self.context_length = backend.context_length
        self._backend = backend
        self._sample = sample
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._waiting: list[_PendingTurn] = []
        self._num_participants = 0
        self._num_requests = 0
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._backend.version

    async def start(self) -> None:
        """A batch starts with its first request."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Sample one turn together with the others that are waiting, and cut it where it is to be shorter.

        Raises ConfigurationError for another temperature or a greater length than TRL's trainer has;
        BackendError where the prompt fills the context or nothing was sampled.
        """
        if on_text is not None:
            raise ConfigurationError("TRL's generation has no streaming: use generation own")
        params.refuse_constraint("TRL's generation")
        if params.temperature != self._temperature or params.max_new_tokens > self._max_new_tokens:
            raise ConfigurationError(
                f"TRL samples at temperature {self._temperature:g}, up to {self._max_new_tokens} tokens, got "
                f"{params.temperature:g} and {params.max_new_tokens}: use generation own"
            )
        room = room_behind(prompt_ids, self.context_length)
        ids, logprobs = await self._sample_turn(prompt_ids, session)
        stops = set(params.stop_token_ids) | set(self.tokenizer.eos_ids)
        text = TurnText(
            self.tokenizer, params.stop, end_ids=stops, skip_special_tokens=params.skip_special_tokens
        )
        ends = (
            index
            for index, token in enumerate(ids, start=1)
            if token in stops or (params.stop and text.add(token))
        )
        end = next(ends, None)
        is_cut = end is None or end > min(room, params.max_new_tokens)
        token_ids = tuple(ids[: min(end or len(ids), room, params.max_new_tokens)])
        if not token_ids:
            raise BackendError("TRL sampled an empty reply: look at its generation options")
        return Completion(
            message=Message(role="assistant", content=text.finish(token_ids)),
            prompt_ids=tuple(prompt_ids),
            token_ids=token_ids,
            logprobs=tuple(logprobs[: len(token_ids)]),
            finish_reason="length" if is_cut else "stop",
            version_spans=(VersionSpan(self.version, 0, len(token_ids)),),
        )

    async def _sample_turn(self, prompt_ids: Sequence[int], session: Session | None) -> Sampled:
        loop = asyncio.get_running_loop()
        self._num_requests += 1
        order = (0, *session) if session is not None else (1, self._num_requests)
        request = _PendingTurn(order, prompt_ids, loop.create_future())
        self._waiting.append(request)
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._serve())
        return await request.reply

    async def _serve(self) -> None:
        while self._waiting:
            await self._wait_for_batch()
            batch = sorted(self._waiting, key=lambda request: request.order)
            self._waiting = []
            batch = [request for request in batch if not request.reply.done()]  # cancelled meanwhile
            if not batch:
                continue
            try:
                replies = await self._sample([list(request.prompt_ids) for request in batch])
            except Exception as error:  # each waiting turn raises it, whatever it is
                for request in batch:
                    if not request.reply.done():
                        request.reply.set_exception(_as_ours(error))
                continue
            for request, reply in zip(batch, replies, strict=True):
                if not request.reply.done():
                    request.reply.set_result(reply)

    async def _wait_for_batch(self) -> None:
        """Return when all participants wait for a turn; without any, after a moment without requests."""
        while True:
            self._arrived.clear()
            if self._num_participants and len(self._waiting) >= self._num_participants:
                return
            try:
                await asyncio.wait_for(self._arrived.wait(), None if self._num_participants else _BATCH_WAIT)
            except TimeoutError:
                return

    @contextlib.contextmanager
    def participate(self) -> Iterator[None]:
        """While open, a batch is only sampled when this participant waits for a turn, too."""
        self._num_participants += 1
        try:
            yield
        finally:
            self._num_participants -= 1
            self._arrived.set()  # the others need not wait for this one

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Score by the agent's backend."""
        return await self._backend.score(ids, temperature=temperature)

    async def fork(self, session: Session, into: Session) -> None:
        """There is no cache to copy."""

    async def release(self, session: Session) -> None:
        """There is no cache to give back."""

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """TRL's generation has the weights that TRL trains."""

    async def check_health(self) -> None:
        """A batch that fails raises in its turns."""

    def counts(self) -> Mapping[str, int]:
        """Nothing is counted."""
        return {}

    async def close(self) -> None:
        """The agent closes its backend."""


def _as_ours(error: Exception) -> Exception:
    if isinstance(error, BackendError | ConfigurationError):
        return error
    wrapped = BackendError(f"{type(error).__name__} in TRL's generation: {error}")
    wrapped.__cause__ = error
    return wrapped
