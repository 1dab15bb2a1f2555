"""The agent: a model behind a backend, a chat template, and how it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stateset_agents.backends.base import Backend, Session
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

    @model_validator(mode="after")
    def _name_given(self) -> Self:
        if not self.model_name.strip():
            raise ValueError('give a model, for example "embedded:desk"')
        return self


class MultiTurnAgent:
    """Speaks through a backend; owns no trainable weights (the trainer does).

    >>> agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk"))
    >>> await agent.initialize()
    >>> await agent.generate_response([{"role": "user", "content": "where is order K27"}])
    """

    def __init__(self, config: AgentConfig | None = None, *, backend: Backend | None = None) -> None:
        self.config = config or AgentConfig()
        self._backend = backend
        self._template: ChatTemplate | None = None
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
        """Load the model (in a thread) and start its backend; does nothing the second time.

        Raises ConfigurationError for a model that does not exist or a template that cannot be used.
        """
        if self._template is not None:
            return
        if self._backend is None:
            from stateset_agents.backends.loading import load_backend

            self._backend = await load_backend(
                self.config.model_name,
                device=self.config.device,
                dtype=self.config.dtype,
                scheduling=scheduling,
            )
        await self._backend.start()
        self._template = self._make_template()

    def _make_template(self) -> ChatTemplate:
        tokenizer = self.backend.tokenizer
        raw = getattr(tokenizer, "hf", None)
        if self.config.chat_template == "plain" or raw is None:
            if self.config.chat_template not in (None, "plain"):
                raise ConfigurationError(
                    'a jinja chat_template needs a Hugging Face tokenizer; use "plain" here'
                )
            return PlainTemplate(tokenizer)
        if self.config.chat_template is None and raw.chat_template is None:
            _log.warning(
                "the model has no chat template: using the built-in plain one; "
                "set AgentConfig(chat_template=...) to choose another",
                model=self.config.model_name,
            )
            return PlainTemplate(tokenizer)
        return JinjaTemplate(tokenizer, self.config.chat_template)

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the backend; the agent can be initialised again only with a new backend."""
        if self._backend is not None:
            await self._backend.close()

    def new_episodes(self, number: int) -> range:
        """Numbers for `number` new episodes, never given out before by this agent."""
        first, self._next_episode = self._next_episode, self._next_episode + number
        return range(first, first + number)

    def sampling(self, *, stream: int, temperature: float | None = None) -> SamplingParams:
        """How one turn of a rollout is sampled: from the full distribution at `temperature`."""
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
        return Completion(
            message=parse_reply(completion.message.content, turn),
            prompt_ids=completion.prompt_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            version_spans=completion.version_spans,
        )

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation with the agent's own system prompt in front."""
        if self.config.system_prompt is None:
            return tuple(messages)
        content, rest = self.config.system_prompt, tuple(messages)
        if rest and rest[0].role == "system":
            content, rest = f"{content}\n{rest[0].content}", rest[1:]
        return (Message(role="system", content=content), *rest)

    async def generate_response(
        self,
        messages: str | Sequence[Message | Mapping[str, Any]],
        context: str | Mapping[str, Any] | None = None,
    ) -> str:
        """The agent's answer, as text, to a conversation (a text is one user message).

        `context` is added to the system message: a text as it stands, a mapping as `key: value` lines.
        Raises ConfigurationError when the conversation leaves no room in the model's context.
        """
        if isinstance(messages, str):
            messages = [Message(role="user", content=messages)]
        talk = [item if isinstance(item, Message) else Message.from_openai(item) for item in messages]
        if not talk:
            raise ConfigurationError("messages is empty: give at least one user message")
        if context:
            text = context if isinstance(context, str) else "\n".join(f"{k}: {v}" for k, v in context.items())
            own = talk[0].content + "\n" if talk[0].role == "system" else ""
            talk = [Message(role="system", content=own + text), *talk[1 if own else 0 :]]
        ids = self.template.prompt(self.with_system_prompt(talk))
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
        """Write weights, config and tokenizer as plain transformers loads them."""
        save = getattr(self.backend, "save_pretrained", None)
        if save is None:
            raise BackendError(f"a {type(self.backend).__name__} has no weights to save")
        path = Path(path)
        await asyncio.to_thread(save, path)
        return path

    @classmethod
    async def from_pretrained(cls, path: str | Path, **settings: Any) -> MultiTurnAgent:
        """An initialised agent from a folder written by `save_pretrained` (or any local HF model)."""
        agent = cls(AgentConfig(model_name=str(path), **settings))
        await agent.initialize()
        return agent
