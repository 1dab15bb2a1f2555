"""The page of many runs over HTTP while they go on, on this machine only; for `report FOLDER --live`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from stateset_agents.reporting.live import (
    DEFAULT_PORT,
    FileStates,
    SharedText,
    event_stream,
    file_states,
    html_response,
    plotly,
    serve_routes,
    trouble,
)
from stateset_agents.reporting.overview.overview_data import has_runs, overview_data, run_folders
from stateset_agents.reporting.overview.overview_report import render_overview
from stateset_agents.reporting.overview.run_results import RunResults, read_run
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import StatesetError

_POLL_SECONDS = 3.0
"""Between two checks of all runs' files."""


async def serve_overview(
    root: str | Path, *, port: int = DEFAULT_PORT, on_ready: Callable[[str], None] = print
) -> None:
    """Serve until cancelled; `on_ready` gets the address once it answers. Port 0 takes a free one.

    Raises ConfigurationError if the folder holds no run that can be read, or the port is in use.
    """
    live = LiveOverview(root)
    await live.json.get(live.states())
    routes = [
        web.get("/", live.page),
        web.get("/plotly.js", plotly),
        web.get("/events", live.events),
        web.get("/{run}/report.html", live.report),
    ]
    await serve_routes(routes, port, on_ready)


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
        sent: dict[RunFolder, FileStates] | None = None
        async with event_stream(request) as response:
            while True:
                states = await asyncio.to_thread(self.states)
                if states != sent:
                    await response.write(await self._event(states))
                    sent = states
                await response.write(b": still here\n\n")
                await asyncio.sleep(_POLL_SECONDS)
        return response

    async def _event(self, states: object) -> bytes:
        try:
            return b"event: page\ndata: %s\n\n" % await self.json.get(states)
        except StatesetError as error:
            return trouble(error)

    async def report(self, request: web.Request) -> web.StreamResponse:
        """A run's own page, if it has been written."""
        name = request.match_info["run"]
        folders = await asyncio.to_thread(run_folders, self.root)
        file = next((folder.report for folder in folders if folder.path.name == name), None)
        if file is None or not file.is_file():
            raise web.HTTPNotFound(text=f"there is no page of a run {name!r:.80}")
        return web.FileResponse(file, headers={"Cache-Control": "no-store"})

    def data(self) -> dict[str, Any]:
        """As `overview_data`; runs whose files are as before are not read again."""
        with self._reading:
            return overview_data(self.root, read=self._read)

    def states(self) -> dict[RunFolder, FileStates]:
        """Another value when a run has gone on, or a new one has begun; empty without runs."""
        if not has_runs(self.root):
            return {}
        return {folder: _of(folder) for folder in run_folders(self.root)}

    def _read(self, log: RunLog, max_points: int) -> RunResults:
        states = _of(log.folder)
        kept = self._runs.get(log.folder)
        if kept is None or kept[:2] != (states, max_points):
            kept = (states, max_points, read_run(log, max_points))
            self._runs[log.folder] = kept
        return kept[2]


def _of(folder: RunFolder) -> FileStates:
    return file_states(folder.metrics, folder.summary, folder.config, folder.rollouts, folder.report)
