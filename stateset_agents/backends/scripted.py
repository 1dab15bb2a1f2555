"""A backend that answers from a script, for tests and demos, without weights and torch."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stateset_agents.backends.base import Session, Tokenizer, room_behind
from stateset_agents.backends.tokenizers import ByteTokenizer, TurnText
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import Completion, FinishReason, Message, SamplingParams, VersionSpan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedRequest:
    """The argument of a script function: one turn of one conversation."""

    text: str
    """The prompt, decoded without control tokens."""
    prompt_ids: tuple[int, ...]
    session: Session | None
    turn: int
    """Index of the turn in its session, from 0."""
    params: SamplingParams


Reply = str | Exception
Script = (
    Sequence[Reply]
    | Mapping[Session, Sequence[Reply]]
    | Callable[[ScriptedRequest], Reply | Awaitable[Reply]]
)
"""Turn t gets `script[t]`, `script[session][t]`, or the function's result; exceptions are raised."""


class ScriptedBackend:
    """Replies as its script says.

    >>> backend = ScriptedBackend(["Which order?", "Refunded."])
    >>> backend = ScriptedBackend(lambda request: "Refunded." if "K27" in request.text else "Which order?")
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        context_length: int = 1_000_000,
        delay: float | Callable[[ScriptedRequest], float] = 0.0,
    ) -> None:
        """`delay`: seconds that a turn takes, or a function of the request that returns them."""
        if isinstance(script, str):
            raise ConfigurationError(f"a script is a list of replies or a function, got the text {script!r}")
        self.tokenizer: Tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.context_length = context_length
        self.version = 0
        self.requests: deque[ScriptedRequest] = deque(maxlen=1000)
        """The last thousand requests, in the order of arrival."""
        self._script = script
        self._delay = delay
        self._turns: dict[Session | None, int] = {}

    async def start(self) -> None:
        """Do nothing: a script is always ready."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """The script's next reply, with an end-of-turn token, cut after `max_new_tokens`; log-probs are 0.

        With `on_text`, other tasks of the event loop run between two tokens, as with a model. Raises
        BackendError if the script has no reply for this turn or the prompt fills the context.
        """
        params.refuse_constraint("a script")
        room = room_behind(prompt_ids, self.context_length)
        turn = self._turns.get(session, 0)
        self._turns[session] = turn + 1
        request = ScriptedRequest(
            text=self.tokenizer.decode(prompt_ids),
            prompt_ids=tuple(prompt_ids),
            session=session,
            turn=turn,
            params=params,
        )
        self.requests.append(request)
        delay = self._delay(request) if callable(self._delay) else self._delay
        if delay > 0:
            await asyncio.sleep(delay)
        reply = await self._reply(request)
        if isinstance(reply, Exception):
            raise reply
        ids = [*self.tokenizer.encode(reply), *self.tokenizer.eos_ids[:1]]
        limit = min(params.max_new_tokens, room)
        finish: FinishReason = "stop" if len(ids) <= limit else "length"
        text = TurnText(
            self.tokenizer,
            params.stop,
            on_text,
            end_ids=self.tokenizer.eos_ids,
            skip_special_tokens=params.skip_special_tokens,
        )
        for index, token in enumerate(ids[:limit]) if params.stop or on_text else ():
            if token not in self.tokenizer.eos_ids and text.add(token):
                ids, finish = ids[: index + 1], "stop"
                break
            if on_text is not None:
                await asyncio.sleep(0)
        token_ids = tuple(ids[:limit])
        return Completion(
            message=Message(role="assistant", content=text.finish(token_ids)),
            prompt_ids=request.prompt_ids,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            finish_reason=finish,
            version_spans=(VersionSpan(self.version, 0, len(token_ids)),),
            stop=text.stopped_by,
        )

    async def _reply(self, request: ScriptedRequest) -> Reply:
        if callable(self._script):
            answer = self._script(request)
            return await answer if inspect.isawaitable(answer) else answer
        lines: Sequence[Reply]
        if isinstance(self._script, Mapping):
            if request.session is None or request.session not in self._script:
                raise BackendError(f"the script has no entry for session {request.session}; add one")
            lines = self._script[request.session]
        else:
            lines = self._script
        if request.turn >= len(lines):
            raise BackendError(
                f"the script has {len(lines)} replies and turn {request.turn + 1} was asked for; "
                "add a reply or pass a function"
            )
        return lines[request.turn]

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[T-1] zeros, as the log-probs of `generate`."""
        return [0.0] * max(0, len(ids) - 1)

    async def fork(self, session: Session, into: Session) -> None:
        """Let `into` continue at the turn that `session` has reached."""
        self._turns[into] = self._turns.get(session, 0)

    async def release(self, session: Session) -> None:
        self._turns.pop(session, None)

    async def sleep(self) -> None:
        """There is no memory to free."""

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Keep the version; a script has no weights."""
        self.version = version

    async def check_health(self) -> None:
        """A script does not break."""

    def counts(self) -> Mapping[str, int]:
        """An empty mapping: a script counts nothing."""
        return {}

    def participate(self) -> AbstractContextManager[None]:
        """A no-op: replies are not batched."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing: a script holds no resources."""
