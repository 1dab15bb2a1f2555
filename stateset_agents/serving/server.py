"""Serves an agent with OpenAI's chat completions and Responses, and Anthropic's Messages."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Self

from aiohttp import web

from stateset_agents.backends.base import Backend
from stateset_agents.backends.dialects.anthropic import CountBody, Messages, read_count
from stateset_agents.backends.dialects.bodies import EventStream, default_max_body, read_json
from stateset_agents.backends.dialects.chat import ChatCompletions
from stateset_agents.backends.dialects.errors import api_error_middleware, as_api_error
from stateset_agents.backends.dialects.request import Answer, ApiError, ChatRequest, Dialect, Exchange
from stateset_agents.backends.dialects.responses import Responses
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.http_server import listen
from stateset_agents.runtime.tasks import gather_or_cancel, reported
from stateset_agents.serving.limits import (
    ActiveRequests,
    AnswerQueue,
    BodyMemory,
    Limits,
    QueueEntry,
    shutting_down,
)
from stateset_agents.serving.metrics import ServerMetrics
from stateset_agents.serving.openapi import OPEN_PATHS, document
from stateset_agents.serving.routing import HEADER, AnswerOne, Router, conversation_id, read_outcome
from stateset_agents.serving.served_agent import (
    CHARACTERS_A_TOKEN,
    OnDelta,
    PendingRequest,
    ServedAgent,
)
from stateset_agents.types.errors import (
    BackendError,
    ConfigurationError,
    ContextLengthExceeded,
    JournalError,
)
from stateset_agents.types.messages import Message
from stateset_agents.types.settings import expect_that

_MAX_POLL_SECONDS, _MIN_POLL_SECONDS = 1.0, 0.05


class AgentServer:
    """Serves OpenAI's chat completions of one agent that has been initialised.

        async with AgentServer(agent, port=8000) as server:
            print(server.url)

    The agent's persona and system prompt come before the client's messages; `temperature`, `top_p`, `top_k`,
    `max_tokens`, `stop` and `seed` of a request replace the agent's own. `/openapi.json` describes requests
    and answers.
    """

    def __init__(
        self,
        agent: MultiTurnAgent | Router,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_keys: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
        limits: Limits | None = None,
        max_body: int | None = None,
        rest_after: float = 30.0,
        name: str | None = None,
    ) -> None:
        """
        Args:
            agent: Initialised; the server neither starts nor closes it. Or what shares conversations out to
                several, such as `deployment.conversations.Deployed`; then there is `POST /v1/outcomes`, too.
            host: The address to listen on. One that other machines can reach needs `api_keys`.
            port: 0 takes a free one.
            api_keys: A request has to send one of them as `Authorization: Bearer KEY` (see `http_guard`).
            allowed_hosts: Further names that a request's `Host` may have, besides this machine's.
            limits: How many answers run and wait, and their sizes.
            max_body: Most bytes of a request's body, decompressed; unset: by the model's context, 256 KiB to
                4 MiB (`bodies.default_max_body`). Larger bodies get 413.
            rest_after: Seconds without work after which the memory of the cache is freed.
            name: What clients call the model; unset: `agent.config.model_name`.
        """
        self._guard = HttpGuard.listening_on(
            host, api_keys=api_keys, allowed_hosts=allowed_hosts, without_key=OPEN_PATHS
        )
        self._router = None if isinstance(agent, MultiTurnAgent) else agent
        agents = [agent] if isinstance(agent, MultiTurnAgent) else agent.agents
        self.agent = agent = agents[0]
        self.limits = limits or Limits()
        self._served = [ServedAgent(agent, self.limits) for agent in agents]
        self.name = name or agent.config.model_name
        self.max_body = default_max_body(agent.context_length) if max_body is None else max_body
        expect_that(self.max_body >= 1, "max_body", "be bytes from 1 on", max_body)
        expect_that(rest_after > 0, "rest_after", "be seconds above 0 (inf: never)", rest_after)
        self._rest_after = rest_after
        self._idle_tasks: list[asyncio.Task[None]] = []
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._active_requests = ActiveRequests()
        self._queue = AnswerQueue(self.limits)
        self._body_memory = BodyMemory(self.limits.max_held)
        self._metrics = ServerMetrics(self._queue)
        most = self._served[0].max_output_tokens
        self._dialects: list[Dialect] = [
            ChatCompletions(max_output_tokens=most, max_choices=self.limits.effective_max_choices),
            Responses(max_output_tokens=most, max_stored=CHARACTERS_A_TOKEN * self.limits.max_remembered),
            Messages(max_output_tokens=most),
        ]

    @property
    def url(self) -> str:
        """The base URL for clients."""
        if self._runner is None:
            raise ConfigurationError("the server is not open: write async with AgentServer(agent) as server")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(
            middlewares=[
                self._metrics.middleware(),
                web.middleware(api_error_middleware),
                self._guard.middleware(),
            ],
        )
        for dialect in self._dialects:
            app.router.add_post(dialect.path, partial(self._complete, dialect))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        if self._router is not None:
            app.router.add_post("/v1/outcomes", self._outcome)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/openapi.json", self._openapi)
        self._runner = await listen(
            app, self._host, self._port, read_timeout=self.limits.read_timeout, log=_http_log()
        )
        self._idle_tasks = [
            asyncio.create_task(_sleep_when_idle(served.agent.backend, self._rest_after))
            for served in self._served
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests with 503 and wait for the active ones, streams too.

        Those that take longer end with an error; returns how many. `/ready` is 503 from now on.
        """
        return await self._active_requests.drain(seconds)

    def stop_waiting(self) -> None:
        """Let a running `drain` cancel the active requests now."""
        self._active_requests.stop_waiting()

    async def close(self) -> None:
        """Stop listening; active requests are cancelled after a second (`drain` waits for them)."""
        for task in self._idle_tasks:
            task.cancel()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _complete(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        stream, exchange = EventStream(http), None
        try:
            async with self._active_requests.request():
                with self._body_memory.body(self._client(http)) as reserve:
                    data = await read_json(http, self.max_body, reserve)
                    exchange = dialect.read(data, self._client(http))
                    return await self._respond(http, stream, exchange)
        except ConnectionError:  # the client left
            raise
        except Exception as error:
            if exchange is None or not stream.has_begun:
                raise
            return await stream.end(exchange.fail(as_api_error(error, http)))

    def _pending(self, http: web.Request, request: ChatRequest) -> PendingRequest:
        if request.model not in ("", self.name):
            raise _no_model(request.model, self.name)
        message = Message(role="assistant", content="")
        return PendingRequest(
            request=request,
            client=self._client(http),
            conversation="" if self._router is None else conversation_id(http.headers, request),
            head=Answer(model=self.name, message=message, finish_reason="stop"),
        )

    async def _respond(
        self, http: web.Request, stream: EventStream, exchange: Exchange
    ) -> web.StreamResponse:
        request = exchange.request
        pending = self._pending(http, request)
        if pending.conversation.isprintable() and pending.conversation.isascii() and pending.conversation:
            stream.headers[HEADER] = pending.conversation
        with self._queue.entries(pending.client, request.num_choices) as entries:
            async with (
                nullcontext(partial(self._served[0].answer, pending))
                if self._router is None
                else self._router.answering(pending, self._served)
            ) as answer:
                if request.stream:
                    answers = await gather_or_cancel(
                        [
                            self._stream_answer(
                                stream, exchange, replace(pending.head, index=number), answer, entry
                            )
                            for number, entry in enumerate(entries)
                        ]
                    )
                else:
                    answers = await gather_or_cancel(
                        [self._answer(answer, entry, number) for number, entry in enumerate(entries)]
                    )
            self._metrics.record_answers(answers)
            if request.stream:
                return await stream.end(exchange.end(answers), exchange.closing)
            return web.json_response(exchange.body(answers), headers=stream.headers)

    async def _count_tokens(self, http: web.Request) -> web.Response:
        """Tokens of a prompt; it waits for its turn as an answer does, since long texts take long."""
        client = self._client(http)
        async with self._active_requests.request():
            with self._body_memory.body(client) as reserve:
                pending = self._pending(http, read_count(await read_json(http, self.max_body, reserve)))
                with self._queue.entries(client) as (entry,):
                    await entry.wait()
                    with _answering_errors():
                        count = await self._served[0].num_prompt_tokens(pending)
        return web.json_response({"input_tokens": count})

    def _client(self, http: web.Request) -> str:
        """Name of the client: its key's number if there are several keys, else its address."""
        number = self._guard.key_number(http) if len(self._guard.api_keys) > 1 else None
        return f"{http.remote}" if number is None else f"key {number}"

    async def _answer(
        self, answer: AnswerOne, entry: QueueEntry, number: int, on_delta: OnDelta | None = None
    ) -> Answer:
        """An answer to a request, sampled once its turn has come."""
        since = time.monotonic()
        try:
            await entry.wait()
            self._metrics.record_wait(time.monotonic() - since)
            with _answering_errors():
                return await answer(number, on_delta)
        finally:
            entry.release()

    async def _stream_answer(
        self, stream: EventStream, exchange: Exchange, head: Answer, answer: AnswerOne, entry: QueueEntry
    ) -> Answer:
        """Text as it is sampled, tool calls when the reply is complete."""
        has_begun = False
        whole = head

        async def work(on_delta: OnDelta) -> Answer:
            return await self._answer(answer, entry, head.index, on_delta)

        async with aclosing(reported(work)) as pieces:
            async for piece in pieces:
                if not has_begun:  # errors before the first event still have a status of their own
                    await stream.send(exchange.start(head))
                    has_begun = True
                if isinstance(piece, Answer):
                    whole = piece
                    await stream.send(exchange.finish(whole))
                else:
                    await stream.send(exchange.add(head, piece))
        return whole

    async def _outcome(self, http: web.Request) -> web.Response:
        """Takes the end of a conversation, also while the server shuts down, so that none is lost."""
        assert self._router is not None
        outcome = read_outcome(await read_json(http, self.max_body))
        try:
            report = await self._router.report_outcome(
                outcome.conversation, success=float(outcome.success), reward=outcome.reward
            )
        except ConfigurationError as error:
            raise ApiError(
                str(error), code="conversation_not_found", status=404, param="conversation"
            ) from error
        except JournalError as error:
            raise ApiError(str(error), code="unhealthy", status=503, retry_after=5) from error
        return web.json_response({"conversation": outcome.conversation, "report": report})

    def _description(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "stateset-agents"}

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._description()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["id"] != self.name:
            raise _no_model(http.match_info["id"], self.name)
        return web.json_response(self._description())

    async def _health(self, http: web.Request) -> web.Response:
        """Status 200 if the server can answer at all; otherwise a supervisor should restart it."""
        await _check_health(self.agent)
        return web.json_response({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        """Status 200 if a load balancer should send it requests."""
        if self._active_requests.is_closing:
            raise shutting_down("the server is shutting down")
        await _check_health(self.agent)
        return web.json_response({"status": "ok"})

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": _VERSION})

    async def _metrics_page(self, http: web.Request) -> web.Response:
        text, content_type = self._metrics.page()
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _openapi(self, http: web.Request) -> web.Response:
        return web.json_response(
            document(
                [*(dialect.body for dialect in self._dialects), CountBody],
                version=_VERSION,
                asks_for_key=bool(self._guard.api_keys),
                takes_outcomes=self._router is not None,
            )
        )


@contextmanager
def _answering_errors() -> Iterator[None]:
    """The agent's errors as a client's."""
    try:
        yield
    except ContextLengthExceeded as error:
        raise ApiError(str(error), code="context_length_exceeded", param="messages") from error
    except ConfigurationError as error:
        raise ApiError(str(error), code="invalid_messages", param="messages") from error
    except BackendError as error:
        raise ApiError(str(error), code="backend_error", status=500) from error


async def _sleep_when_idle(backend: Backend, seconds: float) -> None:
    """Let the backend sleep whenever its counts have not changed for `seconds`; runs until it is cancelled.

    A turn that comes at the same moment is served all the same.
    """
    loop = asyncio.get_running_loop()
    last_counts, since, is_asleep = dict(backend.counts()), loop.time(), True
    while True:
        await asyncio.sleep(min(_MAX_POLL_SECONDS, max(seconds / 4, _MIN_POLL_SECONDS)))
        counts = dict(backend.counts())
        if counts != last_counts:
            last_counts, since, is_asleep = counts, loop.time(), False
        elif not is_asleep and loop.time() - since >= seconds:
            await backend.sleep()
            is_asleep = True


def _http_log() -> logging.Logger:
    """aiohttp's log without its tracebacks for bytes that are no HTTP, which port scanners send."""
    from aiohttp.http_exceptions import HttpProcessingError

    def is_ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    log = logging.Logger("stateset_agents.serving.http")
    log.parent = logging.getLogger("stateset_agents")
    log.addFilter(is_ours)
    return log


_VERSION = importlib.metadata.version("stateset-agents")


def _no_model(name: str, served: str) -> ApiError:
    return ApiError(
        f"there is no model {name!r:.80} here: ask for {served!r}",
        code="model_not_found",
        status=404,
        param="model",
    )


async def _check_health(agent: MultiTurnAgent) -> None:
    """Raises ApiError, status 503, if the agent's backend can serve no request any more."""
    try:
        await agent.check_health()
    except BackendError as error:
        raise ApiError(str(error), code="unhealthy", status=503, retry_after=5) from error
