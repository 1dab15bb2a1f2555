"""An agent behind OpenAI's chat-completions interface: what it was trained for, any client can ask it."""

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
from stateset_agents.core.chat.reply_parsing import certain_words, parse_reply
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.serving.idle import rest_when_idle
from stateset_agents.serving.limits import Held, Limits, Place, Queue
from stateset_agents.serving.metrics import Metrics
from stateset_agents.serving.openapi import OPEN_PATHS, document
from stateset_agents.serving.under_way import UnderWay
from stateset_agents.types.errors import BackendError, ConfigurationError, ContextLengthExceeded
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.seeds import derive

__all__ = ["AgentServer"]


class AgentServer:
    """Serves OpenAI's chat completions of one agent that has been initialised, and says how it is.

        async with AgentServer(agent, port=8000) as server:
            print(server.url)

    Persona and system prompt of the agent stand before the client's messages; `temperature`, `top_p`,
    `top_k`, `max_tokens`, `stop` and `seed` of a request take the place of the agent's own. `/openapi.json`
    says what a request may hold and how it is answered.
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
            host: The address to listen on. Others than this machine's own need `api_keys`.
            port: 0 takes a free one.
            api_keys: A request has to send one of them as `Authorization: Bearer KEY` (see `http_guard`).
            allowed_hosts: Names besides this machine's that may stand in a request's `Host`.
            limits: What it takes on at once.
            max_body: Bytes that a request's body may have, unpacked; unset: by the model's context, 256 KiB
                to 4 MiB (`bodies.default_max_body`). Larger ones get 413.
            rest_after: Seconds without work after which the cache's memory goes back to the system.
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
        self._resting: asyncio.Task[None] | None = None
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None
        self._under_way = UnderWay()
        self._queue = Queue(self.limits)
        self._held = Held(self.limits.max_held)
        self._metrics = Metrics(self._queue)
        self._max_output_tokens = self.limits.max_output_tokens or agent.context_length
        self._body = body_for(max_output_tokens=self._max_output_tokens, max_choices=self.limits.most_choices)

    @property
    def url(self) -> str:
        """What a client takes for its base URL."""
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
        app.on_response_prepare.append(self._hang_up_on_who_does_not_read)
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
            keepalive_timeout=self.limits.read_timeout,  # also of a request whose headers never end
            lingering_time=1.0,  # for the rest of a body that was refused
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
        self._resting = asyncio.create_task(rest_when_idle(self.agent.backend, self._rest_after))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests with 503 and wait for the answers under way, streams too.

        Those that take longer end with an error. Returns how many did. `/ready` is 503 from now on.
        """
        return await self._under_way.drain(seconds)

    def hurry(self) -> None:
        """Let a drain wait no longer."""
        self._under_way.hurry()

    async def close(self) -> None:
        """Stop listening; answers under way are broken off after a second (`drain` waits for them)."""
        if self._resting is not None:
            self._resting.cancel()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        stream = EventStream(http)
        try:
            async with self._under_way.request():
                with self._held.body(self._client(http)) as take:
                    return await self._respond(http, stream, take)
        except ConnectionError:  # the client left
            raise
        except Exception as error:
            if not stream.has_begun:
                raise
            return await stream.fail(as_api_error(error, http))

    async def _respond(
        self, http: web.Request, stream: EventStream, take: Callable[[int], None]
    ) -> web.StreamResponse:
        """`take`: see `limits.Held`."""
        request = read_request(await self._read(http, take), body=self._body)
        if request.model not in ("", self.name):
            raise _no_model(request.model, self.name)
        with self._queue.places(self._client(http), request.num_choices) as places:
            asked = self._asked(request)
            if request.stream:
                return await self._stream(stream, asked, places)
            work = [self._answer(asked, place, number) for number, place in enumerate(places)]
            answers = await gather_or_cancel(work)
            self._metrics.answered(answers)
            return web.json_response(completion_body(*answers))

    async def _read(self, http: web.Request, take: Callable[[int], None]) -> Any:
        """The body's JSON; raises ApiError where it takes too long to come."""
        try:
            async with asyncio.timeout(self.limits.read_timeout):
                return await read_json(http, self.max_body, take)
        except TimeoutError as error:
            raise ApiError(
                f"the body did not come within {self.limits.read_timeout:g} seconds",
                code="request_timeout",
                status=408,
            ) from error

    async def _hang_up_on_who_does_not_read(self, http: web.Request, _: web.StreamResponse) -> None:
        """Else a connection whose client reads nothing of its answer stays for ever.

        Only Linux ends it (TCP_USER_TIMEOUT, https://man7.org/linux/man-pages/man7/tcp.7.html).
        """
        found = http.transport and http.transport.get_extra_info("socket")
        if found and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = min(round(1000 * self.limits.read_timeout), 2**31 - 1)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(milliseconds, 1))

    def _client(self, http: web.Request) -> str:
        """Who asks: by key, where clients have keys of their own, else by address."""
        number = self._guard.key_number(http) if len(self._guard.api_keys) > 1 else None
        return f"{http.remote}" if number is None else f"key {number}"

    def _asked(self, request: ChatRequest) -> _Asked:
        return _Asked(
            request=request,
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
        asked: _Asked,
        place: Place,
        number: int,
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """One of the answers to a request, once its turn has come."""
        since = time.monotonic()
        try:
            await place.granted()
            self._metrics.waited(time.monotonic() - since)
            completion = await self.agent.answer(
                asked.messages, asked.request.tools, on_text=on_text, sampling=asked.sampling_of(number)
            )
        except ContextLengthExceeded as error:
            raise ApiError(str(error), code="context_length_exceeded", param="messages") from error
        except ConfigurationError as error:
            raise ApiError(str(error), code="invalid_messages", param="messages") from error
        except BackendError as error:
            raise ApiError(str(error), code="backend_error", status=500) from error
        finally:
            place.leave()
        return self._answered(asked, completion, number)

    def _answered(self, asked: _Asked, completion: Completion, number: int) -> Answer:
        turn = sum(message.role == "assistant" for message in asked.messages)
        raw = completion.message.content
        # Without tools there is nothing to call, and what looks like a call is words.
        message = parse_reply(raw, turn) if asked.request.tools else Message(role="assistant", content=raw)
        message = as_sent(message)
        if asked.request.single_call:
            message = replace(message, tool_calls=message.tool_calls[:1])
        return replace(
            asked.head,
            index=number,
            message=message,
            finish_reason=Answer.reason(message, completion.finish_reason),
            logprobs=self._logprobs(completion) if asked.request.logprobs else None,
            prompt_tokens=len(completion.prompt_ids),
            completion_tokens=len(completion.token_ids),
        )

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        """Of every sampled token, those that ended the turn included, as OpenAI has them."""
        piece = self.agent.backend.tokenizer.piece
        entries = []
        for token, logprob in zip(map(piece, completion.token_ids), completion.logprobs, strict=True):
            # Half a character has no text of its own, and JSON has no infinity: OpenAI says -9999.
            written = None if "\ufffd" in token else list(token.encode())
            entries.append(
                {
                    "token": token,
                    "logprob": min(max(logprob, -9999.0), 0.0),
                    "bytes": written,
                    "top_logprobs": [],
                }
            )
        return entries

    async def _stream(
        self, stream: EventStream, asked: _Asked, places: Sequence[Place]
    ) -> web.StreamResponse:
        """Words as they are sampled, tool calls when the reply is whole."""
        work = [self._streamed(stream, asked, place, number) for number, place in enumerate(places)]
        answers = await gather_or_cancel(work)
        self._metrics.answered(answers)
        if asked.request.include_usage:
            await stream.send(usage_chunk(*answers))
        return await stream.end()

    async def _streamed(self, stream: EventStream, asked: _Asked, place: Place, number: int) -> Answer:
        head = replace(asked.head, index=number)
        raw = sent = ""
        begun = False
        answer = head
        work = streamed(lambda on_text: self._answer(asked, place, number, on_text))
        async with aclosing(work) as pieces:
            async for piece in pieces:
                if not begun:  # errors before the first word still have a status
                    await stream.send(chunk(head, {"role": "assistant", "content": ""}))
                    begun = True
                if isinstance(piece, Answer):
                    answer = piece
                    for data in chunks(answer, sent=sent):
                        await stream.send(data)
                    continue
                raw += piece
                words = certain_words(raw) if asked.request.tools else raw
                if len(words) > len(sent):
                    await stream.send(chunk(head, {"content": words[len(sent) :]}))
                    sent = words
        return answer

    def _described(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": 0, "owned_by": "stateset-agents"}

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _model(self, http: web.Request) -> web.Response:
        if http.match_info["id"] != self.name:
            raise _no_model(http.match_info["id"], self.name)
        return web.json_response(self._described())

    async def _health(self, http: web.Request) -> web.Response:
        """Can it answer at all? A supervisor starts it anew where it cannot."""
        await _check_health(self.agent)
        return web.json_response({"status": "ok"})

    async def _ready(self, http: web.Request) -> web.Response:
        """Should a load balancer send it requests?"""
        if self._under_way.is_closing:
            raise ApiError("the server is shutting down", code="shutting_down", status=503, retry_after=5)
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


def _http_log() -> logging.Logger:
    """aiohttp's log without what strangers send that is no HTTP, a traceback for each."""
    from aiohttp.http_exceptions import HttpProcessingError

    def is_ours(record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

    log = logging.Logger("stateset_agents.serving.http")
    log.parent = logging.getLogger("stateset_agents")
    log.addFilter(is_ours)
    return log


_VERSION = importlib.metadata.version("stateset-agents")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request as the agent gets it."""

    request: ChatRequest
    messages: tuple[Message, ...]
    sampling: Mapping[str, Any]
    head: Answer
    """What its answers have in common."""

    def sampling_of(self, number: int) -> Mapping[str, Any]:
        """The `number`-th answer has a random stream of its own."""
        if "seed" not in self.request.sampling or not number:
            return self.sampling
        return {**self.sampling, "stream": derive(self.request.sampling["seed"], "response", number)}


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """A request's checked fields as those of `SamplingParams`."""
    changes = {name: given[name] for name in ("top_k",) if name in given}
    changes |= {name: float(given[name]) for name in ("temperature", "top_p") if name in given}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            changes["max_new_tokens"] = given[name]
    if "seed" in given:
        changes["stream"] = derive(given["seed"], "response")
    if "stop" in given:
        stop = given["stop"]
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
    """Raises ApiError of status 503 where the agent's backend can answer nobody any more."""
    try:
        await agent.check_health()
    except BackendError as error:
        raise ApiError(str(error), code="unhealthy", status=503, retry_after=5) from error
