"""A conversation between a person and an agent that may call tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Self

from stateset_agents.backends.base import Session
from stateset_agents.core.agent import ChatInput, Context, MultiTurnAgent, add_context, as_messages
from stateset_agents.core.chat.history import ChatHistory
from stateset_agents.core.environment import Conversation
from stateset_agents.core.tools import Tool, Toolbox
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message, ToolCall

_GRACE_SECONDS = 1.0
_CONTEXTS = 4
"""Number of turns that a chat remembers as they were sampled, each with its prompt: it goes on from the
last, or from one before where an answer was left."""
Event = str | ToolCall | Message
"""An event during an answer: a piece of the agent's text, a tool call, or a tool's answer."""


class ToolRunner(Protocol):
    """Runs the calls of one reply; a `Toolbox` is one."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The tools' descriptions for the agent, in OpenAI's format."""
        ...

    async def call_all(self, calls: Sequence[ToolCall]) -> Sequence[Message]:
        """Returns a tool message for each call, in order."""
        ...


class ChatSession:
    """Holds the history, and runs the agent's tool calls until it answers with text.

        async with ChatSession(agent, tools=[look_up]) as chat:
            print(await chat.send("where is order K27?"))
            async for event in chat.stream("and K28?"):
                ...  # str: a piece of the answer; ToolCall: a call; Message: a tool's answer

    Of an answer that ends early (a break, a cancelled task, a tool that fails) the history keeps the finished
    rounds of tools and the text so far. If there is neither, the user's message is removed, too.
    The agent's thoughts are no events: they are kept in `messages`, where its chat template finds them.
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        *,
        tools: ToolRunner | Sequence[Tool | Callable[..., Any]] = (),
        context: Context = None,
        messages: ChatInput = (),
        max_rounds: int = 8,
    ) -> None:
        """`context` goes into the system message, as in `generate_response`. `messages`: a conversation to
        continue, used unchanged. An answer without text ends after `max_rounds` rounds of tools."""
        if max_rounds < 1:
            raise ConfigurationError(f"max_rounds must be at least 1, got {max_rounds!r}")
        if messages and context:
            raise ConfigurationError(
                "context is for new conversations, and messages were given: put it into theirs"
            )
        self.agent = agent
        self.messages: tuple[Message, ...]
        """The conversation so far, with the system message."""
        if messages:
            self.messages = tuple(as_messages(messages))
        else:
            self.messages = agent.with_system_prompt(add_context((), context))
        self._tools: ToolRunner = Toolbox(tools) if isinstance(tools, Sequence) else tools
        self._schemas = self._tools.schemas
        self._max_rounds = max_rounds
        self._session = Session(agent.new_episodes(1)[0], 0)
        self._history: ChatHistory | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Free the conversation's cache. It can be continued nevertheless, after a new prefill."""
        await self.agent.backend.release(self._session)

    async def send(self, text: str) -> str:
        """The text of the agent's answer to a user's text; "" if it stopped without one."""
        async with aclosing(self.stream(text)) as events:
            async for _ in events:
                pass
        return self.messages[-1].content

    async def stream(self, text: str) -> AsyncGenerator[Event]:
        """The events of the answer, as they happen.

        Raises ConfigurationError if the conversation does not fit the context, EnvironmentFailure if a tool
        fails.
        """
        try:  # Python closes a stream a moment after a `break`
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise ConfigurationError(
                "this chat's last answer is still under way: wait for it, or leave it"
            ) from None
        before = self.messages
        self.messages = (*before, Message(role="user", content=text))
        words: list[str] = []
        try:
            for _ in range(self._max_rounds):
                words, reply = [], Message(role="assistant", content="")
                async with aclosing(self.agent.stream_words(self._generate, calls=True)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Completion):
                            reply = piece.message
                        else:
                            words.append(piece)
                            yield piece
                if not reply.tool_calls:
                    self.messages = (*self.messages, reply)
                    return
                for call in reply.tool_calls:
                    yield call
                results = await self._tools.call_all(reply.tool_calls)
                self.messages = (*self.messages, reply, *results)
                words = []
                for result in results:
                    yield result
        finally:
            self._complete_history(before, "".join(words))
            self._turn.release()

    async def _generate(self, on_text: Callable[[str], None]) -> Completion:
        if self._history is None:  # an agent that was not initialised yet has none
            self._history = self.agent.history(max_tokens=_CONTEXTS * self.agent.context_length)
        return await self.agent.answer(
            self.messages,
            self._schemas,
            history=self._history,
            session=self._session,
            on_text=on_text,
            calls=True,
        )

    def _complete_history(self, before: tuple[Message, ...], text_so_far: str) -> None:
        """Make the history end with a message of the agent, also after an interrupted answer."""
        if self.messages[-1].role == "assistant":
            return
        if text_so_far or self.messages[-1].role == "tool":
            self.messages = (*self.messages, Message(role="assistant", content=text_so_far))
        else:
            self.messages = before


class ConversationTools:
    """An environment's tools, for a chat in which a person plays the user.

    Steps a conversation with the agent's tool calls alone: its simulated user gets no messages.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.schemas: Sequence[Mapping[str, Any]] = conversation.tools
        self._conversation = conversation
        self._is_over = False

    async def call_all(self, calls: Sequence[ToolCall]) -> Sequence[Message]:
        """The environment's answers. Raises ConfigurationError after it has ended the conversation."""
        if self._is_over:
            raise ConfigurationError(
                "the environment has ended this conversation: start a new one, or give it more max_turns"
            )
        reply = Message(role="assistant", content="", tool_calls=tuple(calls))
        observation = await self._conversation.step(reply)
        self._is_over = observation.terminated or observation.truncated
        return observation.messages
