"""An agent behind OpenAI's chat-completions interface: what it was trained for, any client can ask it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from stateset_agents.backends.streaming import streamed
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.reply_parsing import certain_words, parse_reply
from stateset_agents.errors import BackendError, ConfigurationError
from stateset_agents.http_guard import HttpGuard
from stateset_agents.messages import Completion, Message
from stateset_agents.serving.chat_completions import (
    Answer,
    ApiError,
    ChatRequest,
    as_sent,
    chunk,
    chunks,
    in_openai_s_format,
    read_json,
    read_request,
    whole,
)
from stateset_agents.streams import derive

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["AgentServer"]


class AgentServer:
    """Serves `/v1/chat/completions` and `/v1/models` of one agent that has been initialised.

        async with AgentServer(agent, port=8000) as server:
            print(server.url)

    Persona and system prompt of the agent stand before the client's messages; `temperature`, `top_p`,
    `max_tokens`, `stop` and `seed` of a request take the place of the agent's own.
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_keys: Sequence[str] = (),
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """
        Args:
            agent: Initialised; the server neither starts nor closes it.
            host: The address to listen on. Others than this machine's own need `api_keys`.
            port: 0 takes a free one.
            api_keys: A request has to send one of them as `Authorization: Bearer KEY` (see `http_guard`).
            allowed_hosts: Names besides this machine's that may stand in a request's `Host`.
        """
        self._guard = HttpGuard.listening_on(host, api_keys=api_keys, allowed_hosts=allowed_hosts)
        self.agent = agent
        self._host = host
        self._port = port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """What a client takes for its base URL."""
        if self._runner is None:
            raise ConfigurationError("the server is not open: write async with AgentServer(agent) as server")
        return f"http://{self._host}:{self._runner.addresses[0][1]}/v1"

    async def __aenter__(self) -> Self:
        from aiohttp import web

        app = web.Application(
            client_max_size=64 * 2**20,
            middlewares=[web.middleware(in_openai_s_format), self._guard.middleware()],
        )
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self.close()
            raise ConfigurationError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}; choose another port"
            ) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening; answers under way are broken off after a second."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        from aiohttp import web

        request = read_request(await read_json(http))
        messages = self.agent.with_system_prompt(request.messages)
        sampling = _sampling(request.sampling)
        head = Answer(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            model=request.model or self.agent.config.model_name,
            message=Message(role="assistant", content=""),
            finish_reason="stop",
        )
        try:
            if request.stream:
                return await self._stream(http, request, messages, sampling, head)
            completion = await self.agent.answer(messages, request.tools, sampling=sampling)
        except (ConfigurationError, BackendError) as error:
            raise _told(error) from error
        return web.json_response(whole(_answered(head, completion, messages)))

    async def _stream(
        self,
        http: web.Request,
        request: ChatRequest,
        messages: tuple[Message, ...],
        sampling: Mapping[str, Any],
        head: Answer,
    ) -> web.StreamResponse:
        """Words as they are sampled, tool calls when the reply is whole."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

        async def send(data: Mapping[str, Any]) -> None:
            if not response.prepared:  # errors before the first word still have a status
                await response.prepare(http)
                await send(chunk(head, {"role": "assistant", "content": ""}))
            await response.write(f"data: {json.dumps(data)}\n\n".encode())

        raw = said = ""
        work = streamed(
            lambda on_text: self.agent.answer(messages, request.tools, on_text=on_text, sampling=sampling)
        )
        async with aclosing(work) as pieces:
            async for piece in pieces:
                if isinstance(piece, Completion):
                    answer = _answered(head, piece, messages)
                    for data in chunks(answer, include_usage=request.include_usage, said=said):
                        await send(data)
                    continue
                raw += piece
                words = certain_words(raw)
                if len(words) > len(said):
                    await send(chunk(head, {"content": words[len(said) :]}))
                    said = words
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _models(self, http: web.Request) -> web.Response:
        from aiohttp import web

        name = self.agent.config.model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "stateset-agents"}
        return web.json_response({"object": "list", "data": [model]})


def _answered(head: Answer, completion: Completion, messages: tuple[Message, ...]) -> Answer:
    turn = sum(message.role == "assistant" for message in messages)
    message = as_sent(parse_reply(completion.message.content, turn))
    return replace(
        head,
        message=message,
        finish_reason=Answer.reason(message, completion.finish_reason),
        prompt_tokens=len(completion.prompt_ids),
        completion_tokens=len(completion.token_ids),
    )


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields as those of `SamplingParams`; raises ApiError for values that cannot be."""
    changes: dict[str, Any] = {}
    for name, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        whole_number = number and isinstance(value, int)
        if name == "temperature" and number and value >= 0:
            changes["temperature"] = float(value)
        elif name == "top_p" and number and 0 < value <= 1:
            changes["top_p"] = float(value)
        elif name in ("max_tokens", "max_completion_tokens") and whole_number and value >= 1:
            changes["max_new_tokens"] = value
        elif name == "seed" and whole_number:
            changes["stream"] = derive(value, "response")
        elif name == "stop" and (stop := _stop(value)):
            changes["stop"] = stop
        else:
            told = f"{name} cannot be {json.dumps(value):.60}: give {_SAMPLING[name]}"
            raise ApiError(told, code="invalid_request", param=name)
    return changes


_SAMPLING = {
    "temperature": "a number of at least 0",
    "top_p": "a number above 0 and up to 1",
    "max_tokens": "a whole number of at least 1",
    "max_completion_tokens": "a whole number of at least 1",
    "seed": "a whole number",
    "stop": "a text or a list of texts, none of them empty",
}


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    fits = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    return tuple(texts) if fits else ()


def _told(error: ConfigurationError | BackendError) -> ApiError:
    if isinstance(error, BackendError):
        return ApiError(str(error), code="backend_error", status=500)
    return ApiError(str(error), code="invalid_request", param="messages")
