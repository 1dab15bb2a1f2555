"""A chat-completions endpoint whose answers come from conversations in training, one base URL for each.

`external_program.py` opens a rollout for each program it runs. The program's requests become the
conversation's messages, the agent's replies become the answers; who samples them, and when, is the engine's
business, as in every other conversation.

    http://127.0.0.1:PORT/rollouts/ID/v1/chat/completions
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.openai.bodies import read_json
from stateset_agents.backends.openai.chat_body import RolloutBody
from stateset_agents.backends.openai.event_stream import EventStream
from stateset_agents.backends.openai.protocol import (
    Answer,
    ApiError,
    ChatRequest,
    as_sent,
    chunks,
    completion_body,
    openai_error_middleware,
    read_request,
    usage_chunk,
)
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.types.messages import Completion, Message

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["ClientTurn", "RolloutServer", "RolloutSession"]

_LARGEST_BODY = 64 * 2**20
"""Bytes, unpacked: programs of one's own send what their conversations have come to."""
_MODEL = "policy"
"""What the agent in training is called where a client asks; requests may name any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTurn:
    """What a client sent: new messages to answer."""

    messages: tuple[Message, ...]
    """Those that are new."""
    tools: tuple[Mapping[str, Any], ...]


class RolloutSession:
    """One conversation between a client and the agent, as the endpoint sees it.

    What has been said stays said: the tokens of every reply are trained as they were sampled, so a request
    must hold the conversation as it stands and go on from there. One request at a time; a client that asks
    again for an answer that it lost (a retry) gets the same.
    """

    def __init__(self, id: str, url: str) -> None:
        self.id = id
        self.url = url
        """What a client takes for its base URL."""
        self._history: tuple[Message, ...] = ()
        """As the client has them, replies included."""
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._request: ChatRequest | None = None
        """The last one that was taken."""
        self._answer: asyncio.Future[Answer] | None = None
        """To that request."""
        self._turns: asyncio.Queue[ClientTurn] = asyncio.Queue()
        self._over: ApiError | None = None

    @property
    def is_waiting(self) -> bool:
        """Does a request wait for its answer?"""
        return self._answer is not None and not self._answer.done()

    async def next(self) -> ClientTurn:
        """What the client asks next."""
        return await self._turns.get()

    def answer(self, reply: Message, completion: Completion | None = None) -> None:
        """Answer the waiting request; `completion` is what the reply was sampled as."""
        if self._answer is None or self._answer.done() or self._request is None:
            raise RuntimeError("no request waits for an answer")
        sent = as_sent(reply)
        self._history += (sent,)
        self._answer.set_result(
            Answer(
                id=f"chatcmpl-{secrets.token_hex(12)}",
                model=self._request.model or _MODEL,
                message=sent,
                finish_reason=Answer.reason(sent, completion.finish_reason if completion else "stop"),
                prompt_tokens=len(completion.prompt_ids) if completion else 0,
                completion_tokens=len(completion.token_ids) if completion else 0,
            )
        )

    def end(self, why: ApiError) -> None:
        """Refuse the waiting request, and all that come after it."""
        self._over = why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(why)
            self._answer.exception()  # whoever waited may be gone

    async def ask(self, request: ChatRequest, *, again: bool) -> Answer:
        """The answer to a request, when it is there; `again` says that it was sent before.

        Raises ApiError for one that cannot be answered in this conversation.
        """
        same = self._request is not None and self._request.messages == request.messages
        if not (again and same and self._answer is not None):
            if self._over is not None:
                raise self._over
            turn = self._read(request)
            self._history, self._tools, self._request = request.messages, request.tools, request
            self._answer = asyncio.get_running_loop().create_future()
            self._turns.put_nowait(turn)
        return await asyncio.shield(self._answer)

    def _read(self, request: ChatRequest) -> ClientTurn:
        if self.is_waiting:
            raise _refused(
                "parallel_requests",
                "another request of this rollout waits for its answer: send one at a time, or run the "
                "parallel part as a program of its own",
            )
        if request.sampling:
            name = min(request.sampling)
            raise _refused(
                "sampling_parameter",
                f"{name} is the training's to choose (AgentConfig and TrainingConfig say how replies are "
                f'sampled): leave it out, or have it passed over by ExternalProgram(ignore=["{name}"])',
                name,
            )
        for index, (known, sent) in enumerate(zip(self._history, request.messages, strict=False)):
            if known != sent:
                raise _refused(
                    "history_rewritten",
                    f"messages[{index}] ({sent.role}) is not what stands in this rollout, and what has been "
                    "said is trained as it was said: send all earlier messages unchanged, each reply as it "
                    "came, and new ones after them",
                )
        fresh = request.messages[len(self._history) :]
        if not fresh:
            raise _refused(
                "nothing_new",
                f"the {len(request.messages)} messages have been answered, and a rollout has one answer to "
                "each: append the reply and what comes after it",
            )
        if self._history and any(message.role == "assistant" for message in fresh):
            raise _refused(
                "history_rewritten",
                "the new messages hold one of the assistant that the agent in training did not say: only its "
                "own replies can be trained, leave others out",
            )
        if self._history and request.tools != self._tools:
            raise _refused(
                "tools_changed",
                "the tools are not those of the first request, which the agent has read: offer the same ones "
                "in every request of a rollout",
                "tools",
            )
        return ClientTurn(messages=self._named(fresh), tools=request.tools)

    def _named(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Tool results with their tool's name, which OpenAI's shape leaves to the call."""
        names = {call.id: call.name for message in self._history for call in message.tool_calls}
        return tuple(
            replace(message, name=names.get(message.tool_call_id or ""))
            if message.role == "tool" and message.name is None
            else message
            for message in messages
        )


def _refused(code: str, message: str, param: str | None = "messages") -> ApiError:
    return ApiError(message, code=code, param=param)


class RolloutServer:
    """Rollouts of one event loop behind one port of this machine; it listens while any is open."""

    def __init__(self, *, ignore: Collection[str] = ()) -> None:
        """`ignore`: fields of requests that count as absent."""
        self._ignore = frozenset(ignore)
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
            rollout = RolloutSession(id, f"http://127.0.0.1:{port}/rollouts/{id}/v1")
            self._rollouts[id] = rollout
            return rollout

    async def close(self, rollout: RolloutSession) -> None:
        """Forget a rollout; whoever still asks in it is refused."""
        rollout.end(ApiError("this rollout has ended", code="rollout_ended", status=404))
        self._rollouts.pop(rollout.id, None)
        async with self._changing:
            if not self._rollouts and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    async def _start(self) -> web.AppRunner:
        from aiohttp import web

        app = web.Application(
            middlewares=[web.middleware(openai_error_middleware), HttpGuard().middleware()],
        )
        app.router.add_post("/rollouts/{id}/v1/chat/completions", self._complete)
        app.router.add_get("/rollouts/{id}/v1/models", self._models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        except BaseException:
            await runner.cleanup()
            raise
        return runner

    def _rollout(self, http: web.Request) -> RolloutSession:
        rollout = self._rollouts.get(http.match_info["id"])
        if rollout is None:
            raise ApiError(
                "there is no such rollout, or it has ended: take the base URL from OPENAI_BASE_URL, and ask "
                "before the program ends",
                code="no_such_rollout",
                status=404,
            )
        return rollout

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        from aiohttp import web

        rollout = self._rollout(http)
        request = read_request(await read_json(http, _LARGEST_BODY), body=RolloutBody, ignore=self._ignore)
        again = http.headers.get("x-stainless-retry-count", "0") != "0"
        answer = await rollout.ask(request, again=again)
        if not request.stream:
            return web.json_response(completion_body(answer))
        stream = EventStream(http)
        for data in chunks(answer):
            await stream.send(data)
        if request.include_usage:
            await stream.send(usage_chunk(answer))
        return await stream.end()

    async def _models(self, http: web.Request) -> web.Response:
        from aiohttp import web

        self._rollout(http)
        model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "stateset-agents"}
        return web.json_response({"object": "list", "data": [model]})
