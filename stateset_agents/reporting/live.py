"""The page of a running training over HTTP, on this machine only; for `stateset-agents report --live`.

`report.render` makes the page. Updates are server-sent events: `page` has all data but the conversations,
`conversations` says that there are new ones to fetch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from stateset_agents.reporting.html import plotly_js
from stateset_agents.reporting.page_data import page_data
from stateset_agents.reporting.report import Recorded, render
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.http_server import listen
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_log import RunLog

__all__ = ["DEFAULT_PORT", "FileStates", "event_stream", "file_states", "plotly", "serve", "serve_routes"]

DEFAULT_PORT = 8750
_HOST = "127.0.0.1"
_READ_TIMEOUT = 30.0
"""Seconds in which a request has to arrive, and an answer to be read."""
_POLL_SECONDS = 0.5
"""Between two checks of the files."""
_MIN_SECONDS = {"page": 0.0, "conversations": 3.0}
"""Between two events of a kind; conversations are many bytes."""
FileStates = tuple[tuple[int, int], ...]
"""Size and time of files."""


async def serve(
    log: RunLog,
    *,
    port: int = DEFAULT_PORT,
    conversations: int | None = None,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve until cancelled; `on_ready` gets the address once it answers. Port 0 takes a free one.

    Raises ConfigurationError if the port is in use.
    """
    live = _Live(log, Recorded(log, conversations))
    routes = [
        web.get("/", live.page),
        web.get("/plotly.js", plotly),
        web.get("/events", live.events),
        web.get("/conversations.json", live.conversations),
        web.get("/steps.json", live.steps),
    ]
    await serve_routes(routes, port, on_ready)


async def serve_routes(routes: Sequence[web.RouteDef], port: int, on_ready: Callable[[str], None]) -> None:
    """Serve to this machine until cancelled; as `serve`."""
    app = web.Application(middlewares=[HttpGuard().middleware()])
    app.add_routes(routes)
    runner = await listen(app, _HOST, port, read_timeout=_READ_TIMEOUT, shutdown_timeout=0.5)
    try:
        on_ready(f"http://{_HOST}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def plotly(_: web.Request) -> web.StreamResponse:
    """The script as the page asks for it."""
    script, _version = await asyncio.to_thread(plotly_js)
    return web.Response(text=script, content_type="text/javascript")


@dataclass
class _Live:
    """Handlers of the addresses; files are read in a thread, by one reader at a time."""

    log: RunLog
    recorded: Recorded

    def __post_init__(self) -> None:
        self._reading = asyncio.Lock()

    async def page(self, _: web.Request) -> web.StreamResponse:
        text = await asyncio.to_thread(self._render)
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def conversations(self, _: web.Request) -> web.StreamResponse:
        async with self._reading:
            text = await asyncio.to_thread(self._conversation_json)
        return web.Response(text=text, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def steps(self, request: web.Request) -> web.StreamResponse:
        """The conversations of some steps, of which the page lacks some."""
        stage, query = request.query.get("stage", ""), request.query
        try:
            first, last = float(query.get("first") or "-inf"), float(query.get("last") or "inf")
        except ValueError as error:
            raise web.HTTPBadRequest(text="first and last are steps, such as 104") from error
        async with self._reading:
            found = await asyncio.to_thread(self.recorded.of_steps, stage, (first, last))
        text = await asyncio.to_thread(dump, found)
        return web.Response(text=text, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send events as long as the page is open."""
        response = await event_stream(request)
        sent_states: dict[str, FileStates] = {}
        sent_at = dict.fromkeys(_MIN_SECONDS, -math.inf)
        try:
            while True:
                for name, states in self._file_states().items():
                    if (
                        sent_states.get(name) != states
                        and time.monotonic() - sent_at[name] >= _MIN_SECONDS[name]
                    ):
                        data = await asyncio.to_thread(self._page_json) if name == "page" else "{}"
                        await response.write(f"event: {name}\ndata: {data}\n\n".encode())
                        sent_states[name], sent_at[name] = states, time.monotonic()
                await response.write(b": still here\n\n")
                await asyncio.sleep(_POLL_SECONDS)
        except ConnectionResetError:  # the page was closed
            return response

    def _file_states(self) -> dict[str, FileStates]:
        """State of the files of each kind of event."""
        folder = self.log.folder
        page = (folder.metrics, folder.summary, folder.config, folder.audit, folder.rescore)
        return {"page": file_states(*page), "conversations": file_states(folder.rollouts, folder.timeline)}

    def _render(self) -> str:
        """Without conversations: the page fetches them after the first event."""
        nothing_read = Recorded(self.log).select()
        return render(page_data(self.log), nothing_read, plotly="plotly.js", live=True)

    def _page_json(self) -> str:
        return dump(page_data(self.log))

    def _conversation_json(self) -> str:
        self.recorded.read()
        return dump(self.recorded.select())


async def event_stream(request: web.Request) -> web.StreamResponse:
    """A response that server-sent events are written to."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = "text/event-stream"
    await response.prepare(request)
    return response


def file_states(*files: Path) -> FileStates:
    """Size and time of each file; zeros if it does not exist yet."""
    states = [file.stat() if file.exists() else None for file in files]
    return tuple((state.st_size, state.st_mtime_ns) if state else (0, 0) for state in states)
