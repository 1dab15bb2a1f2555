"""Replies that were sampled before, for evaluation and distillation, which ask the same thing again."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import fields
from functools import partial
from typing import Any

from stateset_agents.backends.base import is_training, weights_token
from stateset_agents.core.agent import ChatInput, MultiTurnAgent, as_messages
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import SamplingParams
from stateset_agents.types.settings import expect, expect_that, is_whole

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_Key = tuple[object, int, str]
"""What stands for the weights, their version, and a digest of the question."""


_TRAINED = "a ResponseCache gives the same reply again, and this model is being trained on what it samples"


def _question(prompt: Any, model: Any, kwargs: dict[str, Any]) -> tuple[_Key, Callable[[], Awaitable[Any]]]:
    """The key of a question to any object with `generate`, and what asks it."""
    generate: Any = getattr(model, "generate", None)
    if not callable(generate) or isinstance(model, type):
        expect("model", model, MultiTurnAgent, "give an agent, or an object with generate(prompt, ...)")
    if getattr(model, "training", False):
        raise ConfigurationError(f"{_TRAINED}, or its dropout is on: call model.eval() first")
    parts = [part.detach().flatten() for part in getattr(model, "parameters", tuple)() if part.numel()]
    weights = [float(part[len(part) // 2]) for part in parts]
    try:
        content = json.dumps([prompt, kwargs, weights], sort_keys=True).encode()
    except TypeError as error:
        raise ConfigurationError(
            f"a question must be text and its settings plain JSON values, to be known again ({error})"
        ) from None
    # A bound method holds its object, and is equal for no other.
    key = (generate, getattr(model, "version", 0), hashlib.sha256(content).hexdigest())
    return key, partial(call_user_code, generate, prompt, **kwargs)


class ResponseCache:
    """The first reply to a question is the reply to it, as long as neither model nor settings change.

    A key has the weights (a token that every push of a trainer renews, and their version), all settings of
    the agent, those of this question, and its messages. At most `max_size` replies are kept; the oldest
    leaves first, however often it was asked for. It lives in memory: conversations of an evaluation are kept
    in a file by `KeptConversations`, a judge's answers by `AnswerCache`.

    A group of identical replies teaches nothing, so a model that is being trained is refused.
    """

    def __init__(self, max_size: int = 100_000) -> None:
        expect_that(is_whole(max_size, 1), "max_size", "be a whole number from 1 on", max_size)
        self.max_size = max_size
        self._replies: OrderedDict[_Key, Any] = OrderedDict()
        self._asked: dict[_Key, asyncio.Event] = {}
        """Questions whose reply is being sampled: who asks the same meanwhile waits for it."""
        self._hits = self._misses = 0

    def __len__(self) -> int:
        return len(self._replies)

    @awaitable_or_blocking
    async def get_or_generate(self, prompt: ChatInput, model: Any, **kwargs: Any) -> Any:
        """The reply that is known, or a new one, which is then known.

        >>> completion = await cache.get_or_generate("2 + 3?", agent, temperature=0.1, stream=1)

        Args:
            prompt: A text, which is one user message, or a conversation's messages.
            model: An initialised agent, which gives a `Completion`; or any object with a method
                `generate(prompt, **kwargs)`, sync or async, which gives what that returns. A torch module is
                another model once its weights have changed (one number of each tensor is read), any object
                once its `version` has.
            **kwargs: Fields of `SamplingParams` in place of the agent's settings. Several replies to one
                question need a `stream` each. Of another model, the arguments of its `generate`.

        Raises ConfigurationError for a model that is being trained (a torch module in train mode), and for an
        unknown field; a question to another model is plain JSON.
        """
        ask: Callable[[], Awaitable[Any]]
        if not isinstance(model, MultiTurnAgent):
            key, ask = _question(prompt, model, kwargs)
        elif unknown := sorted(kwargs.keys() - _SAMPLING):
            raise ConfigurationError(
                f"{unknown[0]} is no setting of sampling: give some of {', '.join(sorted(_SAMPLING))}"
            )
        elif is_training(model.backend):
            raise ConfigurationError(
                f"{_TRAINED}: ask before or after the training, or call the agent itself"
            )
        else:
            messages = model.with_system_prompt(as_messages(prompt))
            key = self._key(model, [message.to_record() for message in messages], kwargs)
            ask = partial(model.answer, messages, sampling=kwargs)
        while (hit := self._replies.get(key)) is None and (event := self._asked.get(key)) is not None:
            await event.wait()
        if hit is not None:
            self._hits += 1
            return hit
        self._misses += 1
        self._asked[key] = asyncio.Event()
        try:
            reply = self._replies[key] = await ask()
        finally:  # also without a reply: whoever waits asks for it then
            self._asked.pop(key).set()
        while len(self._replies) > self.max_size:
            self._replies.popitem(last=False)
        return reply

    def metrics(self) -> dict[str, float]:
        """`cache/hits` and `cache/misses` since the last call, for a tracker; the check `cache` reads
        them."""
        counted = {"cache/hits": float(self._hits), "cache/misses": float(self._misses)}
        self._hits = self._misses = 0
        return counted

    def _key(self, model: MultiTurnAgent, messages: list[Any], sampling: dict[str, Any]) -> _Key:
        date = model.template.date
        asked_of = {
            "agent": model.config.model_dump(mode="json"),
            "date": None if date is None else date.isoformat(),
            "sampling": sampling,
        }
        content = json.dumps([asked_of, messages], sort_keys=True).encode()
        return weights_token(model.backend), model.backend.version, hashlib.sha256(content).hexdigest()
