"""The agent: a model behind a backend, a chat template, and how it speaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from stateset_agents.backends.base import Backend, Session, Tokenizer
from stateset_agents.core.chat_template import ChatTemplate, JinjaTemplate, PlainTemplate, parse_reply
from stateset_agents.errors import BackendError, ConfigurationError
from stateset_agents.messages import Completion, Message, SamplingParams
from stateset_agents.settings import Settings
from stateset_agents.streams import derive
from stateset_agents.tracking.logging import get_logger

__all__ = ["AgentConfig", "MultiTurnAgent"]

_log = get_logger(__name__)


class AgentConfig(Settings):
    """Which model speaks, and how."""

    model_name: str = Field(
        default="gpt2",
        description='"embedded:desk", a Hugging Face name, or a local folder.',
    )
    system_prompt: str | None = Field(
        default=None, description="Stands before the environment's own system message."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Most tokens of one agent turn.")
    max_context_tokens: int | None = Field(
        default=None, ge=2, description="Most tokens of one conversation; the model's own limit when unset."
    )
    temperature: float = Field(default=1.0, ge=0.0, description="Of generate_response; 0 is greedy.")
    top_k: int = Field(default=0, ge=0, description="Of generate_response; 0 keeps every token.")
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="Of generate_response; 1 keeps every token."
    )
    chat_template: str | None = Field(
        default=None,
        description='Jinja text, or "plain" for role-prefixed lines; unset: the tokenizer\'s own.',
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="Of the rollout weights; auto is fp32 on CPU, bf16 on GPUs that have it."
    )
    seed: int = Field(default=0, description="Of generate_response's sampling.")

    @field_validator("model_name")
    @classmethod
    def _name_given(cls, name: str) -> str:
        if not name.strip():
            raise ValueError('give a model, for example "embedded:desk"')
        return name


class MultiTurnAgent:
    """Speaks through a backend; owns no trainable weights (the trainer does).

    >>> agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk"))
    >>> await agent.initialize()
    >>> await agent.generate_response([{"role": "user", "content": "where is order K27"}])
    """

    def __init__(self, config: AgentConfig | None = None, *, backend: Backend | None = None) -> None:
        """`backend` stands for the model that `config.model_name` would load."""
        self.config = config or AgentConfig()
        self._backend = backend
        self._template: ChatTemplate | None = None
        self._running = False
        self._starting = asyncio.Lock()
        self._next_episode = 0
        self._responses = count()

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise BackendError("the agent has no model yet: await agent.initialize() first")
        return self._backend

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise BackendError("the agent has no chat template yet: await agent.initialize() first")
        return self._template

    @property
    def context_length(self) -> int:
        """Most tokens of one conversation."""
        own = self.backend.context_length
        return own if self.config.max_context_tokens is None else min(own, self.config.max_context_tokens)

    async def initialize(
        self, *, scheduling: Literal["deterministic", "throughput"] = "deterministic"
    ) -> None:
        """Load the model (in a thread) and start its backend; does nothing while it runs.

        Raises ConfigurationError for a model that does not exist or a template that cannot be used.
        """
        async with self._starting:
            if self._running:
                return
            if self._backend is None:
                from stateset_agents.backends.loading import load_backend

                self._backend = await load_backend(
                    self.config.model_name,
                    device=self.config.device,
                    dtype=self.config.dtype,
                    scheduling=scheduling,
                )
            if self._template is None:
                self._template = self._make_template(self._backend.tokenizer)
            await self._backend.start()
            self._running = True

    def _make_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        raw = getattr(tokenizer, "hf", None)
        wanted = self.config.chat_template
        if wanted == "plain":
            return PlainTemplate(tokenizer)
        if raw is None:
            if wanted is not None:
                raise ConfigurationError(
                    "a jinja chat_template needs a Hugging Face tokenizer, "
                    f"{type(tokenizer).__name__} is none: leave chat_template unset"
                )
            return PlainTemplate(tokenizer)
        if wanted is None and not raw.chat_template:
            _log.warning(
                "the model has no chat template: using the built-in plain one; "
                "set AgentConfig.chat_template to choose another",
                model=self.config.model_name,
            )
            return PlainTemplate(tokenizer)
        return JinjaTemplate(tokenizer, wanted)

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the backend, its thread included; `initialize` starts it again with the weights it has."""
        self._running = False
        if self._backend is not None:
            await self._backend.close()

    def new_episodes(self, number: int) -> range:
        """Numbers for `number` new episodes, never given out before by this agent."""
        first, self._next_episode = self._next_episode, self._next_episode + number
        return range(first, first + number)

    def sampling(self, *, stream: int, temperature: float | None = None) -> SamplingParams:
        """How one turn of a rollout is sampled: from the full distribution at `temperature` (unset: 1)."""
        if temperature is not None and temperature < 0:
            raise ConfigurationError(f"temperature must be at least 0 (greedy), got {temperature!r}")
        return SamplingParams(
            max_new_tokens=self.config.max_new_tokens,
            temperature=1.0 if temperature is None else temperature,
            stop_token_ids=self.template.stop_ids,
            stream=stream,
        )

    async def reply(
        self, ids: Sequence[int], params: SamplingParams, *, session: Session | None = None, turn: int = 0
    ) -> Completion:
        """One agent turn after the conversation's ids [P], tool calls read out of its text."""
        completion = await self.backend.generate(ids, params, session=session)
        return replace(completion, message=parse_reply(completion.message.content, turn))

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation with the agent's own system prompt in front."""
        if not self.config.system_prompt:
            return tuple(messages)
        return _with_system(messages, self.config.system_prompt, before=True)

    async def generate_response(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
        context: str | Mapping[str, Any] | None = None,
    ) -> str:
        """The agent's answer, as text, to a conversation (a text is one user message).

        `context` is added to the system message: a text as it stands, a mapping as `key: value` lines.
        Tools are not offered. Raises ConfigurationError when the conversation is empty or leaves no room
        in the model's context.
        """
        talk = self.with_system_prompt(_with_context(_as_messages(messages), context))
        ids = self.template.prompt(talk)
        if len(ids) >= self.context_length:
            raise ConfigurationError(
                f"the conversation has {len(ids)} tokens and the model's context {self.context_length}: "
                "shorten the messages or raise max_context_tokens"
            )
        params = SamplingParams(
            max_new_tokens=min(self.config.max_new_tokens, self.context_length - len(ids)),
            temperature=self.config.temperature,
            top_k=self.config.top_k,
            top_p=self.config.top_p,
            stop_token_ids=self.template.stop_ids,
            stream=derive(self.config.seed, "response", next(self._responses)),
        )
        completion = await self.backend.generate(ids, params)
        return completion.message.content

    async def save_pretrained(self, path: str | Path) -> Path:
        """Write weights, config and tokenizer as plain transformers loads them; the folder's path.

        The weights are those it speaks with, in `config.dtype` (bf16 on GPUs that have it); the fp32 masters
        of a training stand in its checkpoint's `model/`.
        A jinja template given as `AgentConfig(chat_template=...)` is saved as the tokenizer's own. Raises
        BackendError for a backend without weights, ConfigurationError where the path is a file.
        """
        save = getattr(self.backend, "save_pretrained", None)
        if save is None:
            raise BackendError(f"a {type(self.backend).__name__} has no weights to save")
        path = Path(path)
        if path.is_file():
            raise ConfigurationError(f"cannot save a model to {str(path)!r}, which is a file: give a folder")
        await asyncio.to_thread(save, path)
        if isinstance(self._template, JinjaTemplate) and self.config.chat_template is not None:
            (path / "chat_template.jinja").write_text(self._template.text, encoding="utf-8")
        return path

    @classmethod
    async def from_pretrained(cls, path: str | Path, **settings: Any) -> MultiTurnAgent:
        """An initialised agent from a folder written by `save_pretrained` (or any local HF model).

        `settings` are `AgentConfig`'s; the folder does not hold those of the agent that was saved.
        """
        agent = cls(AgentConfig(model_name=str(path), **settings))
        await agent.initialize()
        return agent


def _as_messages(messages: str | Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    if isinstance(messages, str):
        messages = [Message(role="user", content=messages)]
    if isinstance(messages, Mapping | Message):
        raise ConfigurationError(
            f"messages must be a text or a list of messages, got one {type(messages).__name__}"
        )
    if not messages:
        raise ConfigurationError("messages is empty: give at least one user message")
    return [item if isinstance(item, Message) else Message.from_openai(item) for item in messages]


def _with_context(messages: Sequence[Message], context: str | Mapping[str, Any] | None) -> Sequence[Message]:
    if not context:
        return messages
    if isinstance(context, Mapping):
        context = "\n".join(f"{key}: {_shown(value)}" for key, value in context.items())
    if not isinstance(context, str):
        raise ConfigurationError(f"context must be a text or a mapping, got {type(context).__name__}")
    return _with_system(messages, context, before=False)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _with_system(messages: Sequence[Message], text: str, *, before: bool) -> tuple[Message, ...]:
    """The conversation with `text` in its system message, before or after what that says already."""
    if not messages or messages[0].role != "system":
        return (Message(role="system", content=text), *messages)
    own = messages[0].content
    lines = [line for line in ((text, own) if before else (own, text)) if line]
    return (replace(messages[0], content="\n".join(lines)), *messages[1:])
