"""An endpoint of every dialect whose answers come from conversations in training, one base URL for each.

`program_environment.py` opens a rollout for each program it runs. The program's requests become the
conversation's messages, the agent's replies become the answers; who samples them, and when, is the engine's
business, as in every other conversation.

    http://127.0.0.1:PORT/rollouts/ID/v1/chat/completions, .../v1/responses, .../v1/messages
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.dialects.anthropic import Messages
from stateset_agents.backends.dialects.bodies import EventStream, read_json
from stateset_agents.backends.dialects.chat import ChatCompletions
from stateset_agents.backends.dialects.errors import api_error_middleware
from stateset_agents.backends.dialects.request import (
    Answer,
    ApiError,
    ChatRequest,
    Dialect,
    as_sent,
    invalid,
    stream_events,
)
from stateset_agents.backends.dialects.responses import Responses
from stateset_agents.core.chat.history import KnownConversations, SentConversation, num_replies
from stateset_agents.core.environment import ReplyLimits
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.http_server import listen
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message

if TYPE_CHECKING:
    from aiohttp import web


_log = get_logger(__name__)
_LARGEST_BODY = 64 * 2**20
"""Bytes, unpacked: programs of one's own send what their conversations have come to."""
_MAX_STORED = 2**30
"""Characters of responses that programs go on from by their ids, of one conversation a quarter."""
_READ_TIMEOUT = 3600.0
"""Seconds: a program may think for long before it asks again on the same connection."""
_MODEL = "policy"
"""The agent's name where a client asks for models; requests may name any model."""


_PASSED_OVER = ("temperature", "top_p", "top_k", "seed")
"""Fields of a request that training chooses: it learns from what its own distribution gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTurn:
    """A request: a conversation that the agent is to go on with."""

    conversation: tuple[Message, ...]
    """All of it. Replies that the agent has given stand in it as they were sampled."""
    messages: tuple[Message, ...]
    """The messages after the reply that it continues; all of them where it continues none."""
    tools: tuple[Mapping[str, Any], ...]
    limits: ReplyLimits


@dataclass(slots=True, eq=False)
class _Request:
    request: ChatRequest
    conversation: tuple[Message, ...]
    answer: asyncio.Future[Answer]
    has_left: Callable[[], bool]
    """Tells whether the client that waits for the answer has closed its connection."""


class RolloutSession:
    """The conversations of one client with the agent, as the endpoint sees them.

    A request goes on from the latest answer whose conversation it repeats, and starts another where it
    repeats none: a client may edit its history, offer other tools, ask for another answer, or send several
    requests at once, which are answered one after another. A client that asks again for an answer that it
    lost (a retry) gets the same.
    """

    def __init__(self, id: str, url: str, *, untrained: Collection[str] = ()) -> None:
        self.id = id
        self.url = url
        """The client's base URL."""
        self._untrained = untrained
        self._requests: list[_Request] = []
        self._answered = KnownConversations[SentConversation]()
        self._waiting: asyncio.Queue[_Request] = asyncio.Queue()
        self._current: _Request | None = None
        self._num_ids = 0
        """Number of the next reply's calls at the least: clients with sub-agents take an id for one call."""
        self._over: ApiError | None = None

    @property
    def is_waiting(self) -> bool:
        """True while a request waits for its answer."""
        return any(not request.answer.done() for request in self._requests)

    async def next(self) -> ClientTurn:
        """Wait for the client's next request."""
        self._current = current = await self._waiting.get()
        fresh = current.request.messages
        if (continued := self._answered.find(fresh)) is not None:
            before, fresh = continued
            current.conversation = (*before.conversation, *fresh)
        return ClientTurn(
            conversation=current.conversation,
            messages=fresh,
            tools=current.request.tools,
            limits=replace(
                _limits(current.request.sampling),
                tool_choice=current.request.tool_choice,
                answer_schema=current.request.answer_schema,
                is_requested=True,
                trains=current.request.model not in self._untrained,
            ),
        )

    def answer(self, reply: Message, completion: Completion | None = None) -> None:
        """Answer the request that `next` gave; `completion` is what the reply was sampled as."""
        current = self._current
        if current is None or current.answer.done():
            raise RuntimeError("no request waits for an answer")
        message = as_sent(reply)
        number = max(self._num_ids, num_replies(current.request.messages))
        self._num_ids = number + 1
        calls = (replace(call, id=f"call_{number}_{n}") for n, call in enumerate(message.tool_calls))
        message = replace(message, tool_calls=tuple(calls))
        conversation_as_sent = (*current.request.messages, message)
        self._answered.add(SentConversation((*current.conversation, reply), conversation_as_sent))
        answer = Answer(model=current.request.model or _MODEL, message=message, finish_reason="stop")
        current.answer.set_result(answer.completed(message, completion))

    def end(self, why: ApiError) -> None:
        """Refuse the waiting requests, and all that come after them."""
        self._over = why
        for request in self._requests:
            if not request.answer.done():
                request.answer.set_exception(why)
                request.answer.exception()  # whoever waited may be gone

    async def ask(
        self, request: ChatRequest, *, again: bool, has_left: Callable[[], bool] = lambda: False
    ) -> Answer:
        """The answer to a request, when it is there; `again` says that it was sent before, and `has_left`
        whether its client waits no more.

        Raises ApiError where the conversation is over.
        """
        entry = self._sent_before(request) if again else None
        if entry is None:
            if self._over is not None:
                raise self._over
            answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            entry = _Request(request, request.messages, answer, has_left)
            self._requests.append(entry)
            self._waiting.put_nowait(entry)
        entry.has_left = has_left
        return await asyncio.shield(entry.answer)

    def _sent_before(self, request: ChatRequest) -> _Request | None:
        """The latest that says the same; of several sent at once the latest whose client has left it."""
        same = [
            entry
            for entry in reversed(self._requests)
            if (entry.request.messages, entry.request.tools) == (request.messages, request.tools)
        ]
        return max(same, key=lambda entry: entry.has_left(), default=None)


def _limits(sampling: Mapping[str, Any]) -> ReplyLimits:
    """The limits that a request may choose; a warning says once that training chooses the rest."""
    for name in _PASSED_OVER:
        if name in sampling:
            _warn_of_sampling(name)
    return ReplyLimits(
        max_new_tokens=sampling.get("max_tokens"), stop=sampling.get("stop", ()), with_reasoning=True
    )


def _refuse_what_no_row_keeps(request: ChatRequest) -> None:
    """Raises ApiError for what training cannot give: one reply is one turn, as it was sampled."""
    for param, value, is_kept in (
        ("n", request.num_choices, request.num_choices == 1),
        ("logprobs", True, not request.logprobs),
        ("parallel_tool_calls", False, not request.single_call),
    ):
        if not is_kept:
            text = str(value).lower()
            raise invalid(f"{param} cannot be {text} in training: leave it out", param)


@functools.cache
def _warn_of_sampling(name: str) -> None:
    """Once per process."""
    _log.warning(f"{name} of a program's requests is passed over: training chooses it (said once)")


class RolloutServer:
    """Rollouts of one event loop behind one port of this machine; it listens while any is open."""

    def __init__(self, *, ignore: Collection[str] = (), untrained: Collection[str] = ()) -> None:
        """`ignore`: fields of requests that count as absent; `untrained`: models that do not train."""
        self._ignore = frozenset(ignore)
        self._untrained = frozenset(untrained)
        self._models_of_requests: set[str] = set()
        self._has_warned = False
        self._responses = Responses(max_stored=_MAX_STORED)
        self._rollouts: dict[str, RolloutSession] = {}
        self._runner: web.AppRunner | None = None
        self._changing = asyncio.Lock()

    @property
    def is_listening(self) -> bool:
        return self._runner is not None

    async def open(self) -> RolloutSession:
        """A new rollout; its id is hard to guess, and whoever knows it may speak in it."""
        async with self._changing:
            if self._runner is None:
                self._runner = await self._start()
            port = self._runner.addresses[0][1]
            id = secrets.token_urlsafe(12)
            url = f"http://127.0.0.1:{port}/rollouts/{id}/v1"
            rollout = RolloutSession(id, url, untrained=self._untrained)
            self._rollouts[id] = rollout
            return rollout

    async def close(self, rollout: RolloutSession) -> None:
        """Forget a rollout; whoever still asks in it is refused."""
        rollout.end(ApiError("this rollout has ended", code="rollout_ended", status=404))
        self._rollouts.pop(rollout.id, None)
        self._responses.stored.forget(rollout.id)
        async with self._changing:
            if not self._rollouts and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()
                self._warn_of_missing_models()

    def _warn_of_missing_models(self) -> None:
        """Say once which of `untrained` no request has named: where one is misspelt, its replies train."""
        names = ", ".join(sorted(self._models_of_requests))
        missing = ", ".join(sorted(self._untrained - self._models_of_requests))
        if names and missing and not self._has_warned:
            self._has_warned = True
            _log.warning(
                f"untrained: no request has named {missing} yet, only {names[:200]}: a sub-agent whose "
                "name is misspelt trains"
            )

    async def _start(self) -> web.AppRunner:
        from aiohttp import web

        app = web.Application(
            middlewares=[web.middleware(api_error_middleware), HttpGuard().middleware()],
        )
        dialects: list[Dialect] = [ChatCompletions(), self._responses, Messages()]
        for dialect in dialects:
            complete = functools.partial(self._complete, dialect)
            app.router.add_post(f"/rollouts/{{id}}{dialect.path}", complete)
        app.router.add_get("/rollouts/{id}/v1/models", self._models)
        return await listen(app, "127.0.0.1", 0, read_timeout=_READ_TIMEOUT)

    def _rollout(self, http: web.Request) -> RolloutSession:
        rollout = self._rollouts.get(http.match_info["id"])
        if rollout is None:
            raise ApiError(
                "there is no such rollout, or it has ended: take the base URL from OPENAI_BASE_URL",
                code="no_such_rollout",
                status=404,
            )
        return rollout

    async def _complete(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        from aiohttp import web

        rollout = self._rollout(http)
        exchange = dialect.read(await read_json(http, _LARGEST_BODY), rollout.id, ignore=self._ignore)
        request = exchange.request
        if self._untrained and request.model:
            self._models_of_requests.add(request.model)
        _refuse_what_no_row_keeps(request)
        again = http.headers.get("x-stainless-retry-count", "0") != "0"
        answer = await rollout.ask(request, again=again, has_left=lambda: http.transport is None)
        if not request.stream:
            return web.json_response(exchange.body([answer]))
        stream = EventStream(http)
        await stream.send(stream_events(exchange, answer))
        return await stream.end(exchange.end([answer]), exchange.closing)

    async def _models(self, http: web.Request) -> web.Response:
        from aiohttp import web

        self._rollout(http)
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "stateset-agents"}
        return web.json_response({"object": "list", "data": [model]})
