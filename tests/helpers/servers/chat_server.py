"""An OpenAI-compatible endpoint on loopback that misbehaves as told: `from chat_server import ChatServer`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

from aiohttp import web

from stateset_agents.runtime.http_guard import HttpGuard

__all__ = ["ChatServer", "Fault", "answer", "body", "cut", "hang", "status"]

Fault = Callable[[web.Request], Any]
"""Answers one request instead of the server."""


def answer(said: str | Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """What an endpoint says that behaves: a text, or the fields of a message that calls tools."""
    message = {"content": said} if isinstance(said, str) else said
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return {"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 5}, **fields}


class ChatServer:
    """Serves `/v1/chat/completions`; the n-th request meets the n-th fault, later ones are answered.

    `speak` makes the answer (a text, or a message's fields) from the last message's content. `guard`: which
    requests it answers at all.
    """

    def __init__(
        self,
        *faults: Fault | None,
        speak: Callable[[str], str | Mapping[str, Any]] = lambda prompt: "Score: 7",
        guard: HttpGuard | None = None,
    ) -> None:
        self.faults = list(faults)
        self.speak = speak
        self.guard = guard
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        """When each request came, on the event loop's clock."""
        self.num_together = 0
        self.most_together = 0
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[] if self.guard is None else [self.guard.middleware()])
        app.router.add_post("/v1/chat/completions", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.times.append(asyncio.get_running_loop().time())
        self.headers.append(dict(request.headers))
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.num_together += 1
        self.most_together = max(self.most_together, self.num_together)
        try:
            await asyncio.sleep(self.delay)
            fault = self.faults[number] if number < len(self.faults) else None
            if fault is not None:
                result = fault(request)
                made: web.StreamResponse = await result if asyncio.iscoroutine(result) else result
                return made
            text = self.speak(self.bodies[number]["messages"][-1]["content"])
            return web.Response(text=json.dumps(answer(text)), content_type="application/json")
        finally:
            self.num_together -= 1


def status(code: int, text: str = "no", **headers: str) -> Fault:
    """Answers with a status."""
    return lambda request: web.Response(
        status=code, text=text, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def body(text: str) -> Fault:
    """Answers 200 with that text."""
    return lambda request: web.Response(text=text, content_type="application/json")


async def hang(request: web.Request) -> web.Response:
    """Answers nothing for a long time."""
    await asyncio.sleep(60)
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    """Breaks off in the middle of its answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response
