"""Two models behind one endpoint, for tests of prompts: `from prompted_models import PromptedModels`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, Self

from aiohttp import web
from chat_server import answer

__all__ = ["APOLOGY", "QUOTE", "PromptedModels"]

QUOTE = "Quote the order number."
APOLOGY = "Apologise for what is late."


def clerk(messages: list[Mapping[str, Any]]) -> str:
    """Does what its system prompt says, and nothing more."""
    prompt, asked = messages[0]["content"], messages[-1]["content"]
    order = re.findall(r"K\d+", asked)[0] if QUOTE in prompt else "It"
    return f"{'Sorry! ' if APOLOGY in prompt else ''}{order} is on its way."


def writer(prompt: str) -> str:
    """Adds to the instructions what the feedback says was broken, one rule at a time."""
    present = prompt.split("```")[1].strip()
    if "Broken rules: no order number" in prompt:
        return f"So:\n```\n{present}\n{QUOTE}\n```"
    if "Broken rules: no apology" in prompt:
        return f"So:\n```\n{present}\n{APOLOGY}\n```"
    raise AssertionError(prompt)


class PromptedModels:
    """`/v1/chat/completions` of the models clerk and writer; `writes` is what the latter says instead."""

    def __init__(self, writes: str | None = None, finish_reason: str = "stop", delay: float = 0.0) -> None:
        self.writes = writes
        self.finish_reason = finish_reason
        self.delay = delay
        self.bodies: list[dict[str, Any]] = []
        self.keys: dict[str, str | None] = {}
        """Model -> what was sent as its key."""
        self.wrote_again = asyncio.Event()
        """Set by the writer's second request."""

    def of(self, model: str) -> list[dict[str, Any]]:
        return [body for body in self.bodies if body["model"] == model]

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys[body["model"]] = request.headers.get("Authorization")
        if len(self.of("writer")) == 2:
            self.wrote_again.set()
        await asyncio.sleep(self.delay)
        if body["model"] == "clerk":
            return web.Response(
                text=json.dumps(answer(clerk(body["messages"]))), content_type="application/json"
            )
        if body["model"] != "writer":
            return web.Response(status=404, text="no such model")
        said = answer(writer(body["messages"][0]["content"]) if self.writes is None else self.writes)
        said["choices"][0]["finish_reason"] = self.finish_reason
        return web.Response(text=json.dumps(said), content_type="application/json")
