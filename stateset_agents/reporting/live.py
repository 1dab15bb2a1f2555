"""The page of a running training over HTTP, on this machine only; for `stateset-agents report --live`.

`report.render` makes the page. Updates are server-sent events: `page` has all data but the conversations,
`conversations` says that there are new ones to fetch, `trouble` is a line on files that cannot be read.

What is sent is made once for all clients while the files are as they were (`SharedText`), and few of them are
kept up to date (`event_stream`): clients that never read, however many, hold up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from stateset_agents.reporting.html import plotly_js
from stateset_agents.reporting.page_data import page_data
from stateset_agents.reporting.report import Recorded, render
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.http_server import listen
from stateset_agents.tracking.jsonl import damage_named, dump
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import StatesetError

DEFAULT_PORT = 8750
_HOST = "127.0.0.1"
_READ_TIMEOUT = 30.0
"""Seconds in which a request has to arrive, and an answer to be read."""
_POLL_SECONDS = 0.5
"""Between two checks of the files."""
_MIN_SECONDS = {"page": 0.0, "conversations": 3.0}
"""Between two events of a kind; conversations are many bytes."""
_MAX_STREAMS = 64
"""Pages that are kept up to date at the same time."""
_STREAMS = web.AppKey("streams", list[web.Request])
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

    Raises ConfigurationError if the run cannot be read or the port is in use.
    """
    live = _Live(log, Recorded(log, conversations))
    await live.page_json.get(live.states("page"))
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
    app[_STREAMS] = []
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
class SharedText:
    """A text of some files, made in a thread by one caller for all who ask until the files change."""

    make: Callable[[], str]
    _states: object = None
    _made: bytes | StatesetError = b""
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get(self, states: object) -> bytes:
        """In UTF-8. `states`: of the files as the caller sees them, equal while they are as they were. Raises
        the error of `make`, which is kept as a text is."""
        async with self._making:
            if self._states is None or states != self._states:
                try:
                    self._made = (await asyncio.to_thread(self.make)).encode()
                except StatesetError as error:
                    self._made = error
                self._states = states
        if isinstance(self._made, StatesetError):
            raise self._made
        return self._made


async def html_response(text: SharedText, states: object) -> web.StreamResponse:
    """A page; 500 with one line where its files cannot be read."""
    return await _response(text, states, "text/html")


async def _response(text: SharedText, states: object, content_type: str) -> web.StreamResponse:
    try:
        body = await text.get(states)
    except StatesetError as error:
        raise web.HTTPInternalServerError(text=str(error)) from error
    return web.Response(
        body=body, content_type=content_type, charset="utf-8", headers={"Cache-Control": "no-store"}
    )


class _Live:
    """Handlers of the addresses."""

    def __init__(self, log: RunLog, recorded: Recorded) -> None:
        self.log = log
        self.recorded = recorded
        self._reading = threading.Lock()
        """Of `recorded`."""
        self.html = SharedText(self._render)
        self.page_json = SharedText(self._page_json)
        self.conversations_json = SharedText(self._conversations_json)

    async def page(self, _: web.Request) -> web.StreamResponse:
        return await html_response(self.html, self.states("page"))

    async def conversations(self, _: web.Request) -> web.StreamResponse:
        return await _response(self.conversations_json, self.states("conversations"), "application/json")

    async def steps(self, request: web.Request) -> web.StreamResponse:
        """The conversations of some steps, of which the page lacks some."""
        stage, query = request.query.get("stage", ""), request.query
        try:
            first, last = float(query.get("first") or "-inf"), float(query.get("last") or "inf")
        except ValueError as error:
            raise web.HTTPBadRequest(text="first and last are steps, such as 104") from error
        text = SharedText(lambda: self._steps_json(stage, (first, last)))
        return await _response(text, None, "application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send events as long as the page is open."""
        sent_states: dict[str, FileStates] = {}
        sent_at = dict.fromkeys(_MIN_SECONDS, -math.inf)
        async with event_stream(request) as response:
            while True:
                for name, seconds in _MIN_SECONDS.items():
                    states = self.states(name)
                    if sent_states.get(name) != states and time.monotonic() - sent_at[name] >= seconds:
                        await response.write(await self._event(name, states))
                        sent_states[name], sent_at[name] = states, time.monotonic()
                await response.write(b": still here\n\n")
                await asyncio.sleep(_POLL_SECONDS)
        return response

    async def _event(self, name: str, states: FileStates) -> bytes:
        try:
            data = await self.page_json.get(states) if name == "page" else b"{}"
        except StatesetError as error:
            return trouble(error)
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def states(self, name: str) -> FileStates:
        """State of the files of a kind of event."""
        folder = self.log.folder
        if name == "page":
            return file_states(folder.metrics, folder.summary, folder.config, folder.audit, folder.rescore)
        return file_states(folder.rollouts, folder.timeline)

    def _render(self) -> str:
        """Without conversations: the page fetches them after the first event."""
        with damage_named(self.log.folder.path):
            data = {**page_data(self.log), **Recorded(self.log).select()}
        return render(data, plotly="plotly.js", live=True)

    def _page_json(self) -> str:
        with damage_named(self.log.folder.path):
            return dump(page_data(self.log))

    def _conversations_json(self) -> str:
        with self._reading, damage_named(self.log.folder.path):
            self.recorded.read()
            return dump(self.recorded.select())

    def _steps_json(self, stage: str, steps: tuple[float, float]) -> str:
        with self._reading, damage_named(self.log.folder.path):
            return dump(self.recorded.of_steps(stage, steps))


@contextlib.asynccontextmanager
async def event_stream(request: web.Request) -> AsyncIterator[web.StreamResponse]:
    """A response that server-sent events are written to, until its page is closed; 503 where too many are
    open."""
    streams = request.app[_STREAMS]
    if len(streams) >= _MAX_STREAMS:
        raise web.HTTPServiceUnavailable(
            text=f"{_MAX_STREAMS} pages are kept up to date already: close one, or load this one again"
        )
    streams.append(request)
    try:
        response = web.StreamResponse(headers={"Cache-Control": "no-store"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the page was closed
            yield response
    finally:
        streams.remove(request)


def trouble(error: StatesetError) -> bytes:
    """The event that tells a page in one line what cannot be read."""
    return f"event: trouble\ndata: {dump({'text': str(error)})}\n\n".encode()


def file_states(*files: Path) -> FileStates:
    """Size and time of each file; zeros if it does not exist yet."""
    states = [file.stat() if file.exists() else None for file in files]
    return tuple((state.st_size, state.st_mtime_ns) if state else (0, 0) for state in states)
