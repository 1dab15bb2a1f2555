"""The agent: a model behind a backend, with a chat template and its sampling settings."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from stateset_agents.backends.base import (
    Backend,
    PictureBackend,
    SavableBackend,
    Session,
    Tokenizer,
    TrainableBackend,
    picture_reader,
)
from stateset_agents.backends.tokenizers import save_tokenizer
from stateset_agents.core.agent_config import MOST_CACHED, check_context
from stateset_agents.core.agent_config import AgentConfig as AgentConfig
from stateset_agents.core.chat.history import ChatHistory, Prompt, num_replies
from stateset_agents.core.chat.plain_template import PlainTemplate, chatml_text, is_plain
from stateset_agents.core.chat.rendering import PinnedTemplate, write_template
from stateset_agents.core.chat.reply_grammar import AnswerFormat, ReplyGrammar
from stateset_agents.core.chat.template import ChatTemplate, JinjaTemplate, ToolSchemas
from stateset_agents.core.environment import ReplyLimits
from stateset_agents.core.model_card import Origin, write_card
from stateset_agents.runtime.tasks import LoopShare, reported
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import GREEDY_BELOW, Completion, Message, SamplingParams
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ChatInput = str | Sequence[Message | Mapping[str, Any]]
"""A conversation as callers give it; a text is one user message."""
Context = str | Mapping[str, Any] | None
"""Facts that the agent should know: a text as it stands, a mapping as `key: value` lines."""


def as_messages(messages: ChatInput) -> list[Message]:
    """Raises ConfigurationError for an empty conversation and for what is no message."""
    if isinstance(messages, str):
        messages = [Message(role="user", content=messages)]
    if isinstance(messages, Mapping | Message) or (messages and not hasattr(messages, "__len__")):
        raise ConfigurationError(
            f"messages must be a text or a list of messages, got one {type(messages).__name__}"
        )
    if not messages:
        raise ConfigurationError("messages is empty: give at least one user message")
    return [item if isinstance(item, Message) else Message.from_openai(item) for item in messages]


def add_context(messages: Sequence[Message], context: Context) -> Sequence[Message]:
    """The context stands at the end of the system message."""
    if not context:
        return messages
    if isinstance(context, Mapping):
        as_json = partial(json.dumps, ensure_ascii=False, default=str)
        context = "\n".join(
            f"{key}: {value if isinstance(value, str) else as_json(value)}" for key, value in context.items()
        )
    if not isinstance(context, str):
        raise ConfigurationError(f"context must be a text or a mapping, got {type(context).__name__}")
    return _with_system(messages, context, before=False)


def add_system_prompt(messages: Sequence[Message], config: AgentConfig) -> tuple[Message, ...]:
    """Persona and system prompt stand at the head of the system message."""
    persona = (config.persona or "").strip().rstrip(".")
    who = f"You are {persona}." if persona else ""
    present = "\n".join(line for line in (who, config.system_prompt) if line)
    return _with_system(messages, present, before=True) if present else tuple(messages)


def _with_system(messages: Sequence[Message], text: str, *, before: bool) -> tuple[Message, ...]:
    """The conversation with `text` in its system message, before or after what that says already."""
    if not messages or messages[0].role != "system":
        return (Message(role="system", content=text), *messages)
    present = messages[0].content
    lines = [line for line in ((text, present) if before else (present, text)) if line]
    return (replace(messages[0], content="\n".join(lines)), *messages[1:])


_log = get_logger(__name__)
_MOST_CONSTRAINTS, _MOST_WRITTEN = 1024, 2**22
"""Grammars that are kept, and characters of the tools and schemas that they are kept by."""
_MUCH_TEXT = 10_000
"""Characters; tokenising more would block the event loop for a noticeable time."""
_tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
"""One thread: a long text may take a hundred times its size in memory while it is tokenised."""
_SHARE_SECONDS = 0.01
"""Time of each round of the event loop that prompts may take: a hundred branches begin at once."""


class MultiTurnAgent:
    """Generates replies through a backend; the trainable weights are the trainer's.

    >>> agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk"))
    >>> await agent.initialize()
    >>> await agent.generate_response([{"role": "user", "content": "where is order K27"}])
    """

    def __init__(self, config: AgentConfig | None = None, *, backend: Backend | None = None) -> None:
        """`backend` stands for the model that `config.model_name` would load."""
        if config is not None:
            expect("config", config, AgentConfig, 'write AgentConfig(model_name="embedded:desk")')
        self.config = config or AgentConfig()
        self._backend = backend
        self._template: ChatTemplate | None = None
        self._date = self.config.template_date
        """The day that the template was told to tell; None: that of a model's own training, or today."""
        self.is_running = False
        """True if it has been initialised and not closed since."""
        self._starting = asyncio.Lock()
        self._next_episode = 0
        self._responses = count()
        self._prompting = LoopShare(_SHARE_SECONDS)
        self._constraints: dict[str, Constraint] = {}
        """By tools and what is asked for."""
        self.call_bias = 0.0
        """Nats by which a reply that may call or speak is drawn to call; a training sets it, see
        `TrainingConfig.call_bias`."""
        self._has_warned_of_window = False
        self.origin: Origin | None = None
        """The run and step that its weights come from, for their model card; the trainer sets it."""

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            raise BackendError("the agent has no model yet: await agent.initialize() first")
        return self._backend

    @property
    def model(self) -> PreTrainedModel:
        """The network that speaks. Raises BackendError where it runs elsewhere, or in no process."""
        model: PreTrainedModel | None = getattr(self.backend, "model", None)
        if model is None:
            raise BackendError(
                f"{type(self.backend).__name__} has no model in this process: load one by a folder or a name"
            )
        return model

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            raise BackendError("the agent has no chat template yet: await agent.initialize() first")
        return self._template

    @property
    def context_length(self) -> int:
        """The most tokens that one conversation may have."""
        limit = self.backend.context_length
        return limit if self.config.max_context_tokens is None else min(limit, self.config.max_context_tokens)

    @property
    def loads_model(self) -> bool:
        """True where `initialize` will load the model that the settings name."""
        return self._backend is None

    async def initialize(
        self, *, scheduling: Literal["deterministic", "throughput"] = "deterministic"
    ) -> None:
        """Load the model (in a thread) and start its backend; does nothing while it runs.

        Raises ConfigurationError for a model that does not exist or a template that cannot be used.
        """
        async with self._starting:
            if self.is_running:
                return
            if self._backend is None:
                from stateset_agents.backends.loading import load_backend

                self._backend = await load_backend(
                    self.config.model_name,
                    device=self.config.device,
                    dtype=self.config.dtype,
                    scheduling=scheduling,
                    engine=self.config.engine,
                    fast_linears=self.config.fast_linears,
                    matmul_precision=self.config.matmul_precision,
                    max_cached_tokens=self.config.max_cached_tokens or MOST_CACHED,
                    context_length=self.config.max_context_tokens,
                )
            check_context(self.config, self._backend.context_length)
            if self._template is None:
                self._template = self._make_template(self._backend.tokenizer, self._date)
                if self._date is not None and self._template.date is None:
                    _log.warning(
                        "template_date has no effect: the chat template tells no date; leave it out",
                        template_date=self._date.isoformat(),
                    )
            await self._backend.start()
            self.is_running = True

    def pin_date(self, date: datetime.date) -> None:
        """Let the chat template tell this day from the next conversation on, where it tells one.

        Trainings call it: theirs is the day on which they began.
        """
        if self.template.date is not None and date != self._date:
            self._date = date
            self._template = self._make_template(self.backend.tokenizer, date)

    def _make_template(self, tokenizer: Tokenizer, date: datetime.date | None) -> ChatTemplate:
        """The template that `AgentConfig.chat_template` names, or the tokenizer's own; if both are one
        text, it has the arguments and the day of the training that wrote it."""
        raw = getattr(tokenizer, "hf", None)
        setting, present = self.config.chat_template, None if raw is None else raw.chat_template
        if raw is None and setting not in (None, "plain"):
            raise ConfigurationError(
                f"chat_template needs a Hugging Face tokenizer, not {type(tokenizer).__name__}: leave it out"
            )
        if setting is None and raw is not None and not present:
            _log.warning(
                "the model has no chat template: using plain; set AgentConfig.chat_template for another",
                model=self.config.model_name,
            )
        if setting == "plain" or (setting is None and (not present or is_plain(tokenizer))):
            if self.config.chat_template_kwargs:
                raise ConfigurationError(
                    "chat_template_kwargs is a jinja template's, and this agent's is plain: leave it out"
                )
            return PlainTemplate(tokenizer)
        text = chatml_text(tokenizer) if setting == "chatml" else setting
        if isinstance(present, str) and text == PinnedTemplate.read(present).text:
            text = present
        return JinjaTemplate(
            tokenizer,
            text,
            arguments=self.config.chat_template_kwargs,
            date=date,
            allow_hidden_tools=self.config.allow_hidden_tools,
            pictures=picture_reader(self.backend),
        )

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the backend, its thread included; `initialize` starts it again with the weights it has."""
        self.is_running = False
        if self._backend is not None:
            await self._backend.close()

    def new_episodes(self, number: int) -> range:
        """Numbers for `number` new episodes, never given out before by this agent."""
        first, self._next_episode = self._next_episode, self._next_episode + number
        return range(first, first + number)

    def sampling(self, *, stream: int, temperature: float | None = None) -> SamplingParams:
        """Sampling parameters of one turn at `temperature` (unset: 1)."""
        if temperature is not None and temperature < 0:
            raise ConfigurationError(f"temperature must be at least 0 (greedy), got {temperature!r}")
        return SamplingParams(
            max_new_tokens=self.config.max_new_tokens,
            temperature=1.0 if temperature is None else temperature,
            top_k=self.config.top_k,
            top_p=self.config.top_p,
            stop_token_ids=self.template.stop_ids,
            stop=self.config.stop,
            skip_special_tokens=self.template.parser.skip_special_tokens,
            stream=stream,
        )

    async def reply(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        turn: int = 0,
        tools: ToolSchemas = (),
        pixels: Sequence[PixelValues] = (),
        on_text: Callable[[str], None] | None = None,
        calls: bool = True,
    ) -> Completion:
        """One agent turn after the conversation's ids [P], thoughts and tool calls read out of its text.

        Some models write all arguments of a call as text: only `tools` tell their types. `pixels`: the
        pictures in `ids`, in order. `on_text` gets the raw text as it is sampled. With `calls` False what
        looks like a call stays in the words.
        """
        backend = self.backend
        if pixels:
            assert isinstance(backend, PictureBackend)  # its reader made the pixels
            completion = await backend.generate(ids, params, session=session, on_text=on_text, pixels=pixels)
        else:
            completion = await backend.generate(ids, params, session=session, on_text=on_text)
        return self.template.parser.read_completion(completion, turn=turn, tools=tools, calls=calls)

    async def constraint(self, tools: ToolSchemas, limits: ReplyLimits) -> Constraint | None:
        """The grammar of a reply that may call these tools, by `AgentConfig.constrain` and what the
        conversation asks for; None: none.

        Raises ConfigurationError where the settings allow none, and for a grammar that cannot be made of the
        chat template or of a schema.
        """
        mode, choice = self.config.constrain, limits.tool_choice
        answer = AnswerFormat(
            schema=limits.answer_schema, between=limits.answer_between, thinks=limits.thinks
        )
        wants = not answer.is_free or choice != "auto"
        if wants and mode != "strict" and not limits.is_requested:
            raise ConfigurationError(
                f"the environment asks for {answer if choice == 'auto' else f'tool_choice {choice}'}, and "
                f"AgentConfig.constrain is {mode}: set it to strict, or take that out of the environment"
            )
        tools = tools if limits.callable_tools is None else limits.callable_tools
        if (choice == "none" and answer.is_free) or (not wants and (mode == "off" or not tools)):
            return None
        key = repr((tools, choice, answer, limits.parallel_tool_calls))
        if key not in self._constraints:
            grammar = ReplyGrammar.of(self.template)
            if tools or choice not in ("auto", "none"):
                make = partial(
                    grammar.of_calls, tools, choice, answer=answer, parallel=limits.parallel_tool_calls
                )
            else:
                make = partial(grammar.of_words, answer)
            num_characters = sum(map(len, self._constraints))
            if len(self._constraints) >= _MOST_CONSTRAINTS or num_characters > _MOST_WRITTEN:
                self._constraints.clear()
            self._constraints[key] = await asyncio.to_thread(make)
        return ReplyGrammar.of(self.template).raised(self._constraints[key], self.call_bias)

    def speaker(self, session: Session, *, stream: int, temperature: float | None = None) -> TokenSpeaker:
        """The agent's side of one conversation of a rollout; turn t samples from `derive(stream, t)`."""
        return TokenSpeaker(self, session, stream, temperature)

    def participate(self) -> AbstractContextManager[None]:
        """Takes part in the backend's batches while open; see `Backend.participate`."""
        return self.backend.participate()

    async def release(self, session: Session) -> None:
        """Let the backend forget a conversation."""
        await self.backend.release(session)

    def history(self, *, max_tokens: int | None = None, summarizes: bool = True) -> ChatHistory:
        """The prompts of one conversation's turns, read as `AgentConfig.history` says; see `ChatHistory`."""
        return ChatHistory(
            self.template, self.config, self.context_length, max_tokens=max_tokens, summarizes=summarizes
        )

    async def next_prompt(
        self, history: ChatHistory, messages: Sequence[Message], tools: ToolSchemas = ()
    ) -> Prompt:
        """`history.next`; long messages are tokenised in a thread, one after another, and of many short ones
        some in each round of the event loop.

        The members of a group open alike, and the ids of the first serve the others.
        """
        place = history.place(messages)
        size = len(repr(tools)) if tools and len(place.unread) == len(place.messages) else 0
        for message in place.unread:  # 20: about how many characters a template adds to a message
            size += 20 + len(message.content) + (len(repr(message.tool_calls)) if message.tool_calls else 0)
        next_prompt = partial(history.next, place, tools)
        if size > _MUCH_TEXT:
            return await asyncio.get_running_loop().run_in_executor(_tokenizing, next_prompt)
        return await self._prompting.run(next_prompt)

    def with_system_prompt(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation with the agent's own persona and system prompt in front."""
        return add_system_prompt(messages, self.config)

    async def generate_response(self, messages: ChatInput, context: Context = None) -> str:
        """The agent's answer in words, without its thoughts, to a conversation (a text is one user message).

        `context` is added to the system message: a text as it stands, a mapping as `key: value` lines.
        Tools are not offered; `ChatSession` offers them. Raises ConfigurationError when the conversation is
        empty or leaves no room in the model's context.
        """
        completion = await self.answer(self._prompted(messages, context))
        return completion.message.content

    async def stream_response(self, messages: ChatInput, context: Context = None) -> AsyncGenerator[str]:
        """The answer that `generate_response` would give, piece by piece as it is sampled.

            async for piece in agent.stream_response("where is my order?"):
                print(piece, end="", flush=True)

        A piece never ends inside a character. Leaving the loop ends the generation.
        """
        prompted = self._prompted(messages, context)
        answer = self.stream_words(lambda on_text: self.answer(prompted, on_text=on_text), calls=False)
        async with aclosing(answer) as pieces:
            async for piece in pieces:
                if isinstance(piece, str):
                    yield piece

    async def stream_words(
        self, answer: Callable[[Callable[[str], None]], Awaitable[Completion]], *, calls: bool
    ) -> AsyncGenerator[str | Completion]:
        """The words of an answer as they become certain, then the completion.

        `answer` passes its raw text to its callback; `calls` as in `ReplyParser.stream`.
        """
        stream, num_sent = self.template.parser.stream(calls=calls), 0
        async with aclosing(reported(answer)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    words = piece.message.content[num_sent:]
                else:
                    stream.add(piece)
                    words = stream.delta().get("content", "")
                if words:
                    yield words
                    num_sent += len(words)
                if isinstance(piece, Completion):
                    yield piece

    async def answer(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas = (),
        *,
        history: ChatHistory | None = None,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
        sampling: Mapping[str, Any] | None = None,
        calls: bool | None = None,
    ) -> Completion:
        """One turn, with the settings for people, after messages that are shown as they stand.

        `history`: the turns before, which keeps this one, too; without it `AgentConfig.history` sees a
        conversation that nobody has answered yet. `sampling`: fields of `SamplingParams` that take the place
        of the settings for people; not for a summary, which the agent writes for itself, from a random stream
        of its own. A temperature below 1e-5 is taken as 0, greedy, as vLLM does: logits over it would
        overflow. (Rollouts sample at the temperature that training names, whatever it is.)

        Thoughts are read out of the reply, and tool calls if `calls` (unset: where tools are offered); else
        what looks like a call stays in the words. `on_text` gets the raw text: `template.parser.stream` tells
        which words are certain. Raises ContextLengthExceeded where the messages leave no room to answer.
        """
        history = history or self.history()
        answering = dict(sampling or {})
        stream = answering.pop("stream", derive(self.config.seed, "response", next(self._responses)))
        for part in count():
            prompt = await self.next_prompt(history, messages, tools)
            params = self.sampling(
                stream=derive(stream, "summary", part) if prompt.asks_summary else stream,
                temperature=self.config.temperature,
            )
            if not prompt.asks_summary:
                params = replace(params, **answering)
            if 0 < params.temperature < GREEDY_BELOW:
                params = replace(params, temperature=0.0)
            room = self.context_length - len(prompt.ids)
            params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
            completion = await self.reply(
                prompt.ids,
                params,
                session=session,
                turn=num_replies(prompt.messages),
                tools=tools,
                pixels=prompt.pixels,
                on_text=None if prompt.asks_summary else on_text,
                calls=bool(tools) if calls is None else calls,
            )
            history.add(prompt, completion)
            if not prompt.asks_summary:
                break
        self._warn_of_window(prompt)
        return completion

    def _prompted(self, messages: ChatInput, context: Context) -> tuple[Message, ...]:
        return self.with_system_prompt(add_context(as_messages(messages), context))

    def _warn_of_window(self, prompt: Prompt) -> None:
        if self.config.history == "slide" and prompt.view.num_replaced and not self._has_warned_of_window:
            self._has_warned_of_window = True
            left_out = prompt.view.num_replaced - len(prompt.view.replacement)
            _log.warning(
                f"the conversation outgrew the context of {self.context_length} tokens: the oldest "
                f"{left_out} of its {len(prompt.messages)} messages are left out (said once)"
            )

    async def check_health(self) -> None:
        """Raises BackendError where no turn can be served any more: the worker broke, say."""
        await self.backend.check_health()

    async def save_pretrained(self, path: str | Path) -> Path:
        """Write weights, config and tokenizer as plain transformers loads them, and a model card; the
        folder's path.

        They are the weights it generates with, in `config.dtype`; the fp32 masters of a training are in its
        checkpoint's `model/`.
        The chat template is the one it speaks with, `chat_template_kwargs` and the day of its training in it,
        and its turn ends stand in the generation config. Raises BackendError for a backend without weights,
        ConfigurationError where the path is a file.
        """
        backend = self.backend
        if not isinstance(backend, SavableBackend):
            raise BackendError(f"a {type(backend).__name__} has no weights to save")
        path = Path(path)
        if path.is_file():
            raise ConfigurationError(f"cannot save a model to {str(path)!r}, which is a file: give a folder")
        await asyncio.to_thread(backend.save_pretrained, path)
        self._write_words(path)
        origin = self.origin or Origin(base=backend.name_or_path)
        await asyncio.to_thread(write_card, path, origin, agent=self.config)
        return path

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer, what reads pictures, and the chat template as `save_pretrained` does, beside
        weights. Blocking; a tokenizer that is not transformers' is left out. Raises OSError where the disk
        cannot take it."""
        raw, pictures = getattr(self.backend.tokenizer, "hf", None), picture_reader(self.backend)
        if raw is None:
            return
        save_tokenizer(raw, folder)
        if pictures is not None:
            pictures.save(folder)
        self._write_words(folder)

    def _write_words(self, folder: Path) -> None:
        """The chat template, and which tokens the model knows, where that is known."""
        write_template(folder, self.template.written(), self.template.stop_ids)
        ids = self.backend.trained_tokens if isinstance(self.backend, TrainableBackend) else None
        if ids is not None:
            (folder / "trained_tokens.json").write_text(f"{json.dumps(sorted(ids))}\n", encoding="utf-8")

    @classmethod
    async def from_pretrained(cls, path: str | Path, **settings: Any) -> MultiTurnAgent:
        """An initialised agent from a folder written by `save_pretrained` (or any local HF model).

        `settings` are `AgentConfig`'s; the folder does not hold those of the agent that was saved.
        """
        agent = cls(AgentConfig(model_name=str(path), **settings))
        await agent.initialize()
        return agent


class TokenSpeaker:
    """A `MultiTurnAgent` in one conversation of a rollout: every token is kept as it was sampled."""

    def __init__(
        self, agent: MultiTurnAgent, session: Session, stream: int, temperature: float | None
    ) -> None:
        self.metadata: Mapping[str, Any] = {}
        self._agent = agent
        self._session = session
        self._stream = stream
        self._temperature = temperature
        history = agent.history()
        self.add = history.add
        """Goes on from a turn."""
        self.next_prompt = partial(agent.next_prompt, history)
        """The prompt before the next turn; raises ContextLengthExceeded and ConversationRefused."""

    async def reply(self, prompt: Prompt, *, turn: int, limits: ReplyLimits) -> Completion:
        """One turn within the agent's own limits and these, and within the context."""
        agent = self._agent
        params = agent.sampling(stream=derive(self._stream, turn), temperature=self._temperature)
        room = agent.context_length - len(prompt.ids)
        most = min(params.max_new_tokens, limits.max_new_tokens or params.max_new_tokens, room)
        constraint = None if prompt.asks_summary else await agent.constraint(prompt.tools, limits)
        params = replace(
            params,
            max_new_tokens=most,
            stop=params.stop + limits.stop,
            constraint=constraint,
            return_sampling_mask=True,
        )
        return await agent.reply(
            prompt.ids,
            params,
            session=self._session,
            turn=num_replies(prompt.messages),
            tools=prompt.tools,
            pixels=prompt.pixels,
        )
