"""Keeps what a deployment's conversations said, for those who asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from stateset_agents.backends.openai.protocol import Answer
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.serving.routing import AnswerOne, Router
from stateset_agents.serving.saved_conversations import save_conversation
from stateset_agents.serving.served_agent import Asked, OnDelta, ServedAgent
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)


class SavingRouter:
    """A router that also saves each conversation after each of its answers, as `load_served` reads them.

        AgentServer(SavingRouter(deployed, "talks.jsonl"))

    It stands there as the client sent it, with the first answer of the last request. A file that cannot be
    written is logged, and the client has its answer all the same.
    """

    def __init__(self, router: Router, path: str | Path) -> None:
        self._router = router
        self._path = path
        self._writing = asyncio.Lock()

    @property
    def agents(self) -> Sequence[MultiTurnAgent]:
        """Those of the router."""
        return self._router.agents

    @asynccontextmanager
    async def answering(self, asked: Asked, served: Sequence[ServedAgent]) -> AsyncIterator[AnswerOne]:
        """As the router's."""
        first: list[Answer] = []
        async with self._router.answering(asked, served) as answer:

            async def kept(number: int, on_delta: OnDelta | None = None) -> Answer:
                given = await answer(number, on_delta)
                if number == 0:
                    first.append(given)
                return given

            yield kept
        if first:
            await self._save(asked, first[-1])

    async def report_outcome(self, conversation: str, *, success: float, reward: float | None = None) -> str:
        """As the router's."""
        return await self._router.report_outcome(conversation, success=success, reward=reward)

    async def _save(self, asked: Asked, answer: Answer) -> None:
        messages = [*asked.request.messages, answer.message]
        try:
            async with self._writing:
                await asyncio.to_thread(
                    save_conversation,
                    self._path,
                    messages,
                    conversation=asked.conversation,
                    tools=asked.request.tools,
                )
        except ConfigurationError as error:
            _log.error("a conversation is not saved", why=str(error))
