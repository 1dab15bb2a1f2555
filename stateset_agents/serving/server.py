"""Serves an agent with OpenAI's chat-completions API."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Self

from aiohttp import web

from stateset_agents.backends.base import Backend
from stateset_agents.backends.openai.bodies import default_max_body, read_json
from stateset_agents.backends.openai.chat_body import body_for
from stateset_agents.backends.openai.event_stream import EventStream
from stateset_agents.backends.openai.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    as_api_error,
    as_sent,
    chunk,
    chunks,
    completion_body,
    openai_error_middleware,
    read_request,
    usage_chunk,
)
from stateset_agents.backends.text.streaming import streamed
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.serving.active_requests import ActiveRequests, shutting_down
from stateset_agents.serving.client_histories import ClientHistories, ClientHistory
from stateset_agents.serving.limits import AnswerQueue, BodyMemory, Limits, QueueEntry
from stateset_agents.serving.metrics import ServerMetrics
from stateset_agents.serving.openapi import OPEN_PATHS, document
from stateset_agents.types.errors import BackendError, ConfigurationError, ContextLengthExceeded
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.seeds import derive

__all__ = ["AgentServer"]

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
        agent: MultiTurnAgent,
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
            agent: Initialised; the server neither starts nor closes it.
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
        self.agent = agent
        self.limits = limits or Limits()
        self.name = name or agent.config.model_name
        self.max_body = default_max_body(agent.context_length) if max_body is None else max_body
        if self.max_body < 1:
            raise ConfigurationError(f"max_body must be bytes from 1 on, got {max_body!r}")
        if not rest_after > 0:
            raise ConfigurationError(f"rest_after must be seconds above 0 (inf: never), got {rest_after!r}")
        self._rest_after = rest_after
        self._idle_task: asyncio.Task[None] | None = None
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._active_requests = ActiveRequests()
        self._queue = AnswerQueue(self.limits)
        self._body_memory = BodyMemory(self.limits.max_held)
        self._histories: ClientHistories | None = None
        """Unset where every prompt is the template's rendering of what the client sends."""
        if agent.config.history in ("keep", "compact"):
            self._histories = ClientHistories(agent, max_tokens=self.limits.max_remembered)
        self._metrics = ServerMetrics(self._queue)
        self._max_output_tokens = self.limits.max_output_tokens or agent.context_length
        self._body = body_for(
            max_output_tokens=self._max_output_tokens, max_choices=self.limits.effective_max_choices
        )

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
                web.middleware(openai_error_middleware),
                self._guard.middleware(),
            ],
        )
        app.on_response_prepare.append(self._disconnect_stalled_readers)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/openapi.json", self._openapi)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,
            keepalive_timeout=self.limits.read_timeout,  # also for a request whose headers never end
            lingering_time=1.0,  # to read the remainder of a refused body
            logger=_http_log(),
            auto_decompress=False,
            read_bufsize=2**16,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        except (OSError, OverflowError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"cannot listen on {self._host}:{self._port}: {reason}; choose another port"
            ) from error
        self._idle_task = asyncio.create_task(_sleep_when_idle(self.agent.backend, self._rest_after))
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
        if self._idle_task is not None:
            self._idle_task.cancel()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        stream = EventStream(http)
        try:
            async with self._active_requests.request():
                with self._body_memory.body(self._client(http)) as reserve:
                    return await self._respond(http, stream, reserve)
        except ConnectionError:  # the client left
            raise
        except Exception as error:
            if not stream.has_begun:
                raise
            return await stream.fail(as_api_error(error, http))

    async def _respond(
        self, http: web.Request, stream: EventStream, reserve: Callable[[int], None]
    ) -> web.StreamResponse:
        """`reserve`: see `BodyMemory.body`."""
        request = read_request(await self._read(http, reserve), body=self._body)
        if request.model not in ("", self.name):
            raise _no_model(request.model, self.name)
        with self._queue.entries(self._client(http), request.num_choices) as entries:
            parsed = self._parse(request, self._client(http))
            if request.stream:
                return await self._stream(stream, parsed, entries)
            answers = await gather_or_cancel(
                [self._answer(parsed, entry, number) for number, entry in enumerate(entries)]
            )
            self._metrics.record_answers(answers)
            return web.json_response(completion_body(*answers))

    async def _read(self, http: web.Request, reserve: Callable[[int], None]) -> Any:
        """The body's JSON; raises ApiError, status 408, if it takes too long to arrive."""
        try:
            async with asyncio.timeout(self.limits.read_timeout):
                return await read_json(http, self.max_body, reserve)
        except TimeoutError as error:
            raise ApiError(
                f"the body did not come within {self.limits.read_timeout:g} seconds",
                code="request_timeout",
                status=408,
            ) from error

    async def _disconnect_stalled_readers(self, http: web.Request, _: web.StreamResponse) -> None:
        """Otherwise the connection of a client that reads nothing of its answer would stay open for ever.

        Only Linux can close it (TCP_USER_TIMEOUT, https://man7.org/linux/man-pages/man7/tcp.7.html).
        """
        connection = http.transport and http.transport.get_extra_info("socket")
        if connection and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(round(1000 * self.limits.read_timeout), 2**31 - 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(milliseconds, 1))

    def _client(self, http: web.Request) -> str:
        """Name of the client: its key's number if there are several keys, else its address."""
        number = self._guard.key_number(http) if len(self._guard.api_keys) > 1 else None
        return f"{http.remote}" if number is None else f"key {number}"

    def _parse(self, request: ChatRequest, client: str) -> _ParsedRequest:
        return _ParsedRequest(
            request=request,
            history=None if self._histories is None else self._histories.of(client),
            messages=self.agent.with_system_prompt(request.messages),
            sampling={
                "max_new_tokens": min(self.agent.config.max_new_tokens, self._max_output_tokens),
                **_sampling(request.sampling),
            },
            head=Answer(
                id=f"chatcmpl-{secrets.token_hex(12)}",
                model=self.name,
                message=Message(role="assistant", content=""),
                finish_reason="stop",
            ),
        )

    async def _answer(
        self,
        parsed: _ParsedRequest,
        entry: QueueEntry,
        number: int,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """One of the answers to a request, sampled once its turn has come."""
        since = time.monotonic()
        try:
            await entry.wait()
            self._metrics.record_wait(time.monotonic() - since)
            messages = parsed.messages if parsed.history is None else parsed.history.restored(parsed.messages)
            completion = await self.agent.answer(
                messages,
                parsed.request.tools,
                history=None if parsed.history is None else parsed.history.turns,
                on_text=on_text,
                sampling=parsed.sampling_of(number),
            )
        except ContextLengthExceeded as error:
            raise ApiError(str(error), code="context_length_exceeded", param="messages") from error
        except ConfigurationError as error:
            raise ApiError(str(error), code="invalid_messages", param="messages") from error
        except BackendError as error:
            raise ApiError(str(error), code="backend_error", status=500) from error
        finally:
            entry.release()
        answer = self._to_answer(parsed, completion, number)
        if parsed.history is not None:
            is_whole = answer.message == as_sent(completion.message)  # else only its first call was sent
            reply = completion.message if is_whole else answer.message
            parsed.history.add([*parsed.messages, answer.message], (*messages, reply))
        return answer

    def _to_answer(self, parsed: _ParsedRequest, completion: Completion, number: int) -> Answer:
        message = as_sent(completion.message)
        if parsed.request.single_call:
            message = replace(message, tool_calls=message.tool_calls[:1])
        return replace(
            parsed.head,
            index=number,
            message=message,
            finish_reason=Answer.reason(message, completion.finish_reason),
            logprobs=self._logprobs(completion) if parsed.request.logprobs else None,
            prompt_tokens=len(completion.prompt_ids),
            completion_tokens=len(completion.token_ids),
        )

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        """One entry in OpenAI's format for each sampled token, end-of-turn tokens included."""
        piece = self.agent.backend.tokenizer.piece
        entries = []
        for token, logprob in zip(map(piece, completion.token_ids), completion.logprobs, strict=True):
            # Part of a character has no bytes of its own. JSON has no infinity: OpenAI sends -9999.
            utf8_bytes = None if "\ufffd" in token else list(token.encode())
            entries.append(
                {
                    "token": token,
                    "logprob": min(max(logprob, -9999.0), 0.0),
                    "bytes": utf8_bytes,
                    "top_logprobs": [],
                }
            )
        return entries

    async def _stream(
        self, stream: EventStream, parsed: _ParsedRequest, entries: Sequence[QueueEntry]
    ) -> web.StreamResponse:
        """Text as it is sampled, tool calls when the reply is complete."""
        answers = await gather_or_cancel(
            [self._stream_answer(stream, parsed, entry, number) for number, entry in enumerate(entries)]
        )
        self._metrics.record_answers(answers)
        if parsed.request.include_usage:
            await stream.send(usage_chunk(*answers))
        return await stream.end()

    async def _stream_answer(
        self, stream: EventStream, parsed: _ParsedRequest, entry: QueueEntry, number: int
    ) -> Answer:
        head = replace(parsed.head, index=number)
        said = self.agent.template.parser.stream(calls=bool(parsed.request.tools))
        has_begun = False
        answer = head
        pieces = streamed(lambda on_text: self._answer(parsed, entry, number, on_text))
        async with aclosing(pieces):
            async for piece in pieces:
                if not has_begun:  # errors before the first event still have a status of their own
                    await stream.send(chunk(head, {"role": "assistant", "content": ""}))
                    has_begun = True
                if isinstance(piece, Answer):
                    answer = piece
                    sent = replace(head.message, content=said.content, reasoning=said.reasoning)
                    for data in chunks(answer, sent=sent):
                        await stream.send(data)
                    continue
                said.add(piece)
                if delta := said.delta():
                    await stream.send(chunk(head, delta))
        return answer

    def _description(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "stateset-agents"}

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._description()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["id"] != self.name:
            raise _no_model(http.match_info["id"], self.name)
        return web.json_response(self._description())

    async def _health(self, http: web.Request) -> web.Response:
        """Can it answer at all? If not, a supervisor should restart it."""
        await _check_health(self.agent)
        return web.json_response({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        """Should a load balancer send it requests?"""
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
            document(self._body, version=_VERSION, asks_for_key=bool(self._guard.api_keys))
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedRequest:
    """A request as it is passed to the agent."""

    request: ChatRequest
    messages: tuple[Message, ...]
    sampling: Mapping[str, Any]
    history: ClientHistory | None
    """What the client's earlier answers were sampled as."""
    head: Answer
    """The fields that all its answers have in common."""

    def sampling_of(self, number: int) -> Mapping[str, Any]:
        """Sampling settings of answer `number`: each answer has its own random stream."""
        if "seed" not in self.request.sampling or not number:
            return self.sampling
        return {**self.sampling, "stream": derive(self.request.sampling["seed"], "response", number)}


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The validated fields of a request as those of `SamplingParams`."""
    changes = {name: fields[name] for name in ("top_k",) if name in fields}
    changes |= {name: float(fields[name]) for name in ("temperature", "top_p") if name in fields}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields:
            changes["max_new_tokens"] = fields[name]
    if "seed" in fields:
        changes["stream"] = derive(fields["seed"], "response")
    if "stop" in fields:
        stop = fields["stop"]
        changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return changes


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
