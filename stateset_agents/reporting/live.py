"""The page of a run that goes on, over HTTP on this machine alone. `stateset-agents report --live` serves it.

The page is `render`'s; what is new comes as server-sent events: `page` holds everything but the
conversations, `conversations` says that there are others to fetch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from stateset_agents.reporting.content import content
from stateset_agents.reporting.conversations import MOST_CONVERSATIONS, Conversations
from stateset_agents.reporting.report import browsable, no_conversations, plotly_js, render
from stateset_agents.reporting.timeline import Timeline
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

__all__ = ["DEFAULT_PORT", "serve"]

DEFAULT_PORT = 8750
_HOST = "127.0.0.1"
_PAUSE = 0.5
"""Seconds between two looks at the files."""
_BETWEEN = {"page": 0.0, "conversations": 3.0}
"""Seconds between two events of a kind; conversations are many bytes."""
_Stamp = tuple[tuple[int, int], ...]


async def serve(
    log: RunLog,
    *,
    port: int = DEFAULT_PORT,
    conversations: int = MOST_CONVERSATIONS,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve until cancelled; `on_ready` hears the address once it answers. Port 0 takes a free one.

    Raises ConfigurationError when the port is taken.
    """
    live = _Live(log, Conversations(log.folder, conversations), Timeline(log.folder))
    app = web.Application(middlewares=[HttpGuard().middleware()])
    app.add_routes(
        [
            web.get("/", live.page),
            web.get("/plotly.js", live.plotly),
            web.get("/events", live.events),
            web.get("/conversations.json", live.conversations),
        ]
    )
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, _HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigurationError(
                f"port {port} cannot be used ({error.strerror or error}): choose another with --port, or 0"
            ) from error
        on_ready(f"http://{_HOST}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@dataclass
class _Live:
    """What the addresses answer with; files are read in a thread, one reader at a time."""

    log: RunLog
    kept: Conversations
    timeline: Timeline

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()

    async def page(self, _: web.Request) -> web.StreamResponse:
        text = await asyncio.to_thread(self._render)
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def plotly(self, _: web.Request) -> web.StreamResponse:
        script, _version = await asyncio.to_thread(plotly_js)
        return web.Response(text=script, content_type="text/javascript")

    async def conversations(self, _: web.Request) -> web.StreamResponse:
        async with self._reading:
            text = await asyncio.to_thread(self._browsed)
        return web.Response(text=text, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """What is new, as long as the page is open."""
        response = web.StreamResponse(headers={"Cache-Control": "no-store"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        seen: dict[str, _Stamp] = {}
        sent = dict.fromkeys(_BETWEEN, -math.inf)
        try:
            while True:
                for name, stamp in self._stamps().items():
                    if seen.get(name) != stamp and time.monotonic() - sent[name] >= _BETWEEN[name]:
                        data = await asyncio.to_thread(self._content) if name == "page" else "{}"
                        await response.write(f"event: {name}\ndata: {data}\n\n".encode())
                        seen[name], sent[name] = stamp, time.monotonic()
                await response.write(b": still here\n\n")
                await asyncio.sleep(_PAUSE)
        except ConnectionResetError:  # the page was closed
            return response

    def _stamps(self) -> dict[str, _Stamp]:
        """Which state of the files each event is about."""
        folder = self.log.folder
        page = (folder.metrics, folder.summary, folder.config)
        return {"page": _stamp(*page), "conversations": _stamp(folder.rollouts, folder.timeline)}

    def _render(self) -> str:
        """Without conversations: the page fetches them when its first event says so."""
        return render(content(self.log), no_conversations(), plotly="plotly.js", live=True)

    def _content(self) -> str:
        return dump(content(self.log))

    def _browsed(self) -> str:
        return dump(browsable(self.log, self.kept, self.timeline))


def _stamp(*files: Path) -> _Stamp:
    """Size and time of each; of one that is not there yet, zeros."""
    states = [file.stat() if file.exists() else None for file in files]
    return tuple((state.st_size, state.st_mtime_ns) if state else (0, 0) for state in states)
