"""A conversation between a person and an agent that may call tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, Self

from stateset_agents.backends.base import Session
from stateset_agents.backends.text.streaming import streamed
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.reply_parsing import certain_words, read_completion
from stateset_agents.core.chat.system_message import Context, Talk, as_messages, with_context
from stateset_agents.core.tools import Tool, Toolbox
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message, ToolCall

__all__ = ["ChatSession", "Event", "ToolRunner"]

_GRACE_SECONDS = 1.0
Event = str | ToolCall | Message
"""What happens during an answer: a piece of the agent's words, a call it asks for, or a tool's answer."""


class ToolRunner(Protocol):
    """Runs the calls of one reply; a `Toolbox` is one."""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """What the agent is told about the tools (OpenAI's shape)."""
        ...

    async def call_all(self, calls: Sequence[ToolCall]) -> Sequence[Message]:
        """One tool message for each call, in order."""
        ...


class ChatSession:
    """Holds the history; runs the tools the agent asks for until it answers in words.

        async with ChatSession(agent, tools=[look_up]) as chat:
            print(await chat.send("where is order K27?"))
            async for event in chat.stream("and K28?"):
                ...  # str: a piece of the answer; ToolCall: a call; Message: a tool's answer

    An answer that is left early (a break, a cancelled task, a tool that breaks) stays in the history as far
    as it came: finished rounds of tools and the words so far. If there is neither, what the person said is
    taken back, too.
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        *,
        tools: ToolRunner | Sequence[Tool | Callable[..., Any]] = (),
        context: Context = None,
        messages: Talk = (),
        max_rounds: int = 8,
    ) -> None:
        """`context` goes into the system message, as in `generate_response`. `messages`: a conversation to go
        on with, taken as it stands. After `max_rounds` rounds of tools without an answer in words the answer
        is left off."""
        if max_rounds < 1:
            raise ConfigurationError(f"max_rounds must be at least 1, got {max_rounds!r}")
        if messages and context:
            raise ConfigurationError(
                "context belongs to the system message of a new conversation, and messages were given: "
                "put it into theirs"
            )
        self.agent = agent
        self.messages: tuple[Message, ...]
        """Everything said so far, the system message included."""
        if messages:
            self.messages = tuple(as_messages(messages))
        else:
            self.messages = agent.with_system_prompt(with_context((), context))
        self._tools: ToolRunner = Toolbox(tools) if isinstance(tools, Sequence) else tools
        self._schemas = self._tools.schemas
        self._max_rounds = max_rounds
        self._session = Session(agent.new_episodes(1)[0], 0)
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let the backend forget the conversation; a closed one can go on, at the price of a new prefill."""
        await self.agent.backend.release(self._session)

    async def send(self, text: str) -> str:
        """The agent's answer in words to what a person says; "" where it left off without one."""
        async with aclosing(self.stream(text)) as events:
            async for _ in events:
                pass
        return self.messages[-1].content

    async def stream(self, text: str) -> AsyncGenerator[Event]:
        """The answer as it comes about.

        Raises ConfigurationError where the conversation has no room in the context, EnvironmentFailure where
        a tool breaks.
        """
        try:  # Python closes a stream that was left by `break` a moment later
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise ConfigurationError(
                "this chat's last answer is still under way: wait for it, or leave it"
            ) from None
        before = self.messages
        self.messages = (*before, Message(role="user", content=text))
        said = ""
        try:
            for _ in range(self._max_rounds):
                said = raw = ""
                reply = Message(role="assistant", content="")
                async with aclosing(streamed(self._speak)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, Completion):
                            reply = self._read(piece)
                            words = reply.content
                        else:
                            raw += piece
                            words = certain_words(raw)
                        before_this, said = said, words
                        if len(words) > len(before_this):
                            yield words[len(before_this) :]
                if not reply.tool_calls:
                    self.messages = (*self.messages, reply)
                    return
                for call in reply.tool_calls:
                    yield call
                results = await self._tools.call_all(reply.tool_calls)
                self.messages = (*self.messages, reply, *results)
                said = ""
                for result in results:
                    yield result
        finally:
            self._leave_off(before, said)
            self._turn.release()

    async def _speak(self, on_text: Callable[[str], None]) -> Completion:
        return await self.agent.answer(self.messages, self._schemas, session=self._session, on_text=on_text)

    def _read(self, completion: Completion) -> Message:
        turn = sum(message.role == "assistant" for message in self.messages)
        return read_completion(completion, turn).message

    def _leave_off(self, before: tuple[Message, ...], said: str) -> None:
        """Have the history end with the agent's words, whatever happened."""
        if self.messages[-1].role == "assistant":
            return
        if said or self.messages[-1].role == "tool":
            self.messages = (*self.messages, Message(role="assistant", content=said))
        else:
            self.messages = before
