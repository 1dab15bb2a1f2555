"""The page of a running training, or of many, over HTTP on this machine only; for `report --live`.

`report.render` and `overview.render_overview` make the pages. Updates are server-sent events: `page` has all
data but the conversations, `conversations` says that there are new ones to fetch, `trouble` is a line on
files that cannot be read.

What is sent is made once for all clients while the files are as they were (`SharedText`), and few of them are
kept up to date (`event_stream`): clients that never read, however many, hold up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from stateset_agents.reporting.html import plotly_js
from stateset_agents.reporting.overview import (
    RunResults,
    has_runs,
    overview_data,
    read_run,
    render_overview,
    run_folders,
)
from stateset_agents.reporting.report import Recorded, page_data, render
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.runtime.http_server import listen
from stateset_agents.tracking.jsonl import damage_named, dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import StatesetError

DEFAULT_PORT = 8750
_HOST = "127.0.0.1"
_READ_TIMEOUT = 30.0
"""Seconds in which a request has to arrive, and an answer to be read."""
_POLL_SECONDS = 0.5
"""Seconds between two checks of the files."""
_CONVERSATIONS_SECONDS = 3.0
"""Seconds between two looks for new conversations, which are many bytes to fetch."""
_MAX_STREAMS = 64
"""Pages that are kept up to date at the same time."""
_STREAMS = web.AppKey("streams", list[web.Request])
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
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
    await serve_page(
        live, {"/conversations.json": live.conversations, "/steps.json": live.steps}, port, on_ready
    )


class LivePage(Protocol):
    """Handlers of the addresses that every live page has."""

    async def page(self, _: web.Request) -> web.StreamResponse: ...
    async def events(self, request: web.Request) -> web.StreamResponse: ...


async def serve_page(
    live: LivePage, others: Mapping[str, Handler], port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve a page, its script and events, and the `others` by their addresses, to this machine until
    cancelled; as `serve`."""
    app = web.Application(middlewares=[HttpGuard().middleware()])
    handlers = {"/": live.page, "/plotly.js": _plotly, "/events": live.events, **others}
    app.add_routes([web.get(address, handler) for address, handler in handlers.items()])
    app[_STREAMS] = []
    runner = await listen(app, _HOST, port, read_timeout=_READ_TIMEOUT, shutdown_timeout=0.5)
    try:
        on_ready(f"http://{_HOST}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _plotly(_: web.Request) -> web.StreamResponse:
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
        """The text in UTF-8. `states`: the states of the files as the caller sees them, equal while the files
        are unchanged. Raises the error of `make`, which is kept as a text is."""
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
        """The lock that guards `recorded`."""
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
        """Send the page's data and word of new conversations."""
        states = self.states
        page = LiveData(lambda: states("page"), self.page_json.get)
        conversations = LiveData(lambda: states("conversations"), _no_data, _CONVERSATIONS_SECONDS)
        return await send_changes(request, {"page": page, "conversations": conversations}, _POLL_SECONDS)

    def states(self, name: str) -> FileStates:
        """State of the files of a kind of event."""
        folder = self.log.folder
        if name == "page":
            return file_states(folder.metrics, folder.summary, folder.config, folder.audit, folder.rescore)
        return file_states(folder.rollouts, folder.timeline)

    def _render(self) -> str:
        """Render the page without conversations, which it fetches after the first event."""
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


async def _no_data(_: object) -> bytes:
    """The data of an event that only tells the page to fetch something."""
    return b"{}"


@dataclass(frozen=True, slots=True)
class LiveData:
    """The data of one kind of event, which is sent when the states of its files have changed."""

    states: Callable[[], object]
    data: Callable[[object], Awaitable[bytes]]
    """The data as JSON, for these states."""
    seconds: float = 0.0
    """Least seconds between two looks at its files."""


async def send_changes(
    request: web.Request, kinds: Mapping[str, LiveData], poll_seconds: float
) -> web.StreamResponse:
    """Send an event of each kind at first, and again when its files have changed, until the page is closed.

    Where files cannot be read, a `trouble` event stands in for it, once for each error.
    """
    sent_states: dict[str, object] = {}
    looked_at = dict.fromkeys(kinds, -math.inf)
    async with event_stream(request) as response:
        while True:
            for name, kind in kinds.items():
                if (now := time.monotonic()) - looked_at[name] < kind.seconds:
                    continue
                looked_at[name] = now
                try:
                    states = await asyncio.to_thread(kind.states)
                    is_new = name not in sent_states or sent_states[name] != states
                    data = await kind.data(states) if is_new else b""
                    event = b"event: %s\ndata: %s\n\n" % (name.encode(), data)
                except StatesetError as error:
                    states = str(error)
                    is_new, event = sent_states.get(name) != states, _trouble(error)
                if is_new:
                    await response.write(event)
                    sent_states[name] = states
            await response.write(b": still here\n\n")
            await asyncio.sleep(poll_seconds)
    return response


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


def _trouble(error: StatesetError) -> bytes:
    """The event that tells a page in one line what cannot be read."""
    return f"event: trouble\ndata: {dump({'text': str(error)})}\n\n".encode()


def file_states(*files: Path) -> FileStates:
    """Size and time of each file; zeros if it does not exist yet."""
    states = [file.stat() if file.exists() else None for file in files]
    return tuple((state.st_size, state.st_mtime_ns) if state else (0, 0) for state in states)


# ------------------------------------------------------------------------------ the page of many runs

_OVERVIEW_POLL_SECONDS = 3.0
"""Seconds between two checks of all runs' files."""


async def serve_overview(
    root: str | Path, *, port: int = DEFAULT_PORT, on_ready: Callable[[str], None] = print
) -> None:
    """Serve until cancelled; `on_ready` gets the address once it answers. Port 0 takes a free one.

    Raises ConfigurationError if the folder holds no run that can be read, or the port is in use.
    """
    live = LiveOverview(root)
    await live.json.get(live.states())
    await serve_page(live, {"/{run}/report.html": live.report}, port, on_ready)


class LiveOverview:
    """Handlers of the addresses; a run is read again when its files have changed."""

    def __init__(self, root: str | Path) -> None:
        self.root = root
        self._runs: dict[RunFolder, tuple[FileStates, int, RunResults]] = {}
        self._reading = threading.Lock()
        self.json = SharedText(lambda: dump(self.data()))
        self._html = SharedText(lambda: render_overview(self.data(), plotly="plotly.js", live=True))

    async def page(self, _: web.Request) -> web.StreamResponse:
        return await html_response(self._html, await asyncio.to_thread(self.states))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send the page's data, as it may have changed since the page, and again whenever a run goes on."""
        page = LiveData(self.states, self.json.get)
        return await send_changes(request, {"page": page}, _OVERVIEW_POLL_SECONDS)

    async def report(self, request: web.Request) -> web.StreamResponse:
        """A run's own page, if it has been written."""
        name = request.match_info["run"]
        folders = await asyncio.to_thread(run_folders, self.root)
        file = next((folder.report for folder in folders if folder.path.name == name), None)
        if file is None or not file.is_file():
            raise web.HTTPNotFound(text=f"there is no page of a run {name!r:.80}")
        return web.FileResponse(file, headers={"Cache-Control": "no-store"})

    def data(self) -> dict[str, Any]:
        """Return `overview_data`; runs whose files are unchanged are not read again."""
        with self._reading:
            return overview_data(self.root, read=self._read)

    def states(self) -> dict[RunFolder, FileStates]:
        """Another value when a run has gone on, or a new one has begun; empty without runs."""
        if not has_runs(self.root):
            return {}
        return {folder: _of(folder) for folder in run_folders(self.root)}

    def _read(self, log: RunLog, max_points: int) -> RunResults:
        states = _of(log.folder)
        entry = self._runs.get(log.folder)
        if entry is None or entry[:2] != (states, max_points):
            entry = (states, max_points, read_run(log, max_points))
            self._runs[log.folder] = entry
        return entry[2]


def _of(folder: RunFolder) -> FileStates:
    return file_states(folder.metrics, folder.summary, folder.config, folder.rollouts, folder.report)
