"""Routing of requests where there is more than one agent, ids of conversations, and their outcomes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from stateset_agents.backends.dialects.request import Answer, ApiError, ChatRequest, validated
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.serving.saved_conversations import save_conversation
from stateset_agents.serving.served_agent import OnDelta, PendingRequest, ServedAgent
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Message


class AnswerOne(Protocol):
    """Gives one answer to a request; its text goes to `on_delta` as it is sampled."""

    async def __call__(self, number: int, on_delta: OnDelta | None = None) -> Answer: ...


class Router(Protocol):
    """Sends each conversation to one of several agents, and learns how it ended."""

    @property
    def agents(self) -> Sequence[MultiTurnAgent]:
        """All initialised. The first gives the server its name, its limits and its health."""
        ...

    def answering(
        self, pending: PendingRequest, served: Sequence[ServedAgent]
    ) -> AbstractAsyncContextManager[AnswerOne]:
        """A context around all answers to one request; `served`: the agents, in their order."""
        ...

    async def report_outcome(self, conversation: str, *, success: float, reward: float | None = None) -> str:
        """Takes the end of a conversation; says that it was `counted`, or came `again`, or `late`.

        Raises ConfigurationError for a conversation that was never assigned, JournalError where it could not
        be written down.
        """
        ...


class OutcomeBody(BaseModel):
    """The end of a conversation, as a client reports it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    conversation: str = Field(
        min_length=1, max_length=256, description="its id: `X-Conversation-Id` of its answers"
    )
    success: bool | Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        description="true, false, or from 0 to 1"
    )
    reward: float | None = Field(
        default=None, allow_inf_nan=False, description="kept with it; decisions do not use it"
    )


def read_outcome(data: Any) -> OutcomeBody:
    """The outcome in a JSON body; raises ApiError for what is none."""
    return validated(OutcomeBody, data)


# --- ids of conversations: a client sends all of one each time, and rarely says its name ---

HEADER = "X-Conversation-Id"
"""Header of a request, and of its answer where the id can stand in one."""
_MAX_LENGTH = 256


def conversation_id(headers: Mapping[str, str], request: ChatRequest) -> str:
    """The header `X-Conversation-Id`, else `metadata.conversation_id`, else `user`, else a hash of the
    messages up to the user's first, which all requests of a conversation have in common.

    Raises ApiError for an id that is no text of 1 to 256 characters.
    """
    for name, id in (
        (HEADER, headers.get(HEADER)),
        ("metadata.conversation_id", request.metadata.get("conversation_id")),
        ("user", request.user or None),
    ):
        if id is None:
            continue
        if not isinstance(id, str) or not 1 <= len(id) <= _MAX_LENGTH or not _is_unicode(id):
            raise ApiError(
                f"{name} must be a text of 1 to {_MAX_LENGTH} characters, got {id!r:.60}",
                code="invalid_conversation_id",
                param=name.partition(".")[0],
            )
        return id
    return f"opening-{_opening(request)}"


def _opening(request: ChatRequest) -> str:
    """128 bits of BLAKE2b of roles and texts."""
    opening: list[Message] = []
    for message in request.messages:
        opening.append(message)
        if message.role == "user":
            break
    text = json.dumps([(message.role, message.content) for message in opening])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_unicode(text: str) -> bool:
    """False for a header with bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- saved conversations ---

_log = get_logger(__name__)


class SavingRouter:
    """A router that also saves each conversation after each of its answers, as `load_served` reads them.

        AgentServer(SavingRouter(deployed, "talks.jsonl"))

    It stands there as the client sent it, with the first answer of the last request. A file that cannot be
    written is logged, and the client has its answer all the same.
    """

    def __init__(self, router: Router, path: str | Path) -> None:
        self.agents = router.agents
        self._router = router
        self._path = path
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def answering(
        self, pending: PendingRequest, served: Sequence[ServedAgent]
    ) -> AsyncIterator[AnswerOne]:
        """The router's context, in which the first answer is kept."""
        first: list[Answer] = []
        async with self._router.answering(pending, served) as answer:

            async def kept(number: int, on_delta: OnDelta | None = None) -> Answer:
                reply = await answer(number, on_delta)
                if number == 0:
                    first.append(reply)
                return reply

            yield kept
        if first:
            await self._save(pending, first[-1])

    async def report_outcome(self, conversation: str, *, success: float, reward: float | None = None) -> str:
        """Pass the outcome on to the router."""
        return await self._router.report_outcome(conversation, success=success, reward=reward)

    async def _save(self, pending: PendingRequest, answer: Answer) -> None:
        messages = [*pending.request.messages, answer.message]
        try:
            async with self._writing:
                await asyncio.to_thread(
                    save_conversation,
                    self._path,
                    messages,
                    conversation=pending.conversation,
                    tools=pending.request.tools,
                )
        except ConfigurationError as error:
            _log.error("a conversation is not saved", why=str(error))
