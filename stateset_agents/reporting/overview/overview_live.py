"""The page of many runs over HTTP while they go on, on this machine only; for `report FOLDER --live`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from stateset_agents.reporting.live import (
    DEFAULT_PORT,
    FileStates,
    event_stream,
    file_states,
    plotly,
    serve_routes,
)
from stateset_agents.reporting.overview.overview_data import overview_data, run_folders
from stateset_agents.reporting.overview.overview_report import render_overview
from stateset_agents.reporting.overview.run_results import RunResults, read_run
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog

__all__ = ["LiveOverview", "serve_overview"]

_POLL_SECONDS = 3.0
"""Between two checks of all runs' files."""


async def serve_overview(
    root: str | Path, *, port: int = DEFAULT_PORT, on_ready: Callable[[str], None] = print
) -> None:
    """Serve until cancelled; `on_ready` gets the address once it answers. Port 0 takes a free one.

    Raises ConfigurationError if the folder holds no run, or the port is in use.
    """
    run_folders(root)
    live = LiveOverview(root)
    routes = [
        web.get("/", live.page),
        web.get("/plotly.js", plotly),
        web.get("/events", live.events),
        web.get("/{run}/report.html", live.report),
    ]
    await serve_routes(routes, port, on_ready)


@dataclass
class LiveOverview:
    """Handlers of the addresses; a run is read again when its files have changed."""

    root: str | Path
    _known: dict[RunFolder, tuple[FileStates, int, RunResults]] = field(default_factory=dict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def page(self, _: web.Request) -> web.StreamResponse:
        data = await self.data()
        text = await asyncio.to_thread(render_overview, data, plotly="plotly.js", live=True)
        return web.Response(text=text, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send the page's data whenever a run has gone on, as long as the page is open."""
        response = await event_stream(request)
        sent = await asyncio.to_thread(self.states)
        try:
            while True:
                await response.write(b": still here\n\n")
                await asyncio.sleep(_POLL_SECONDS)
                states = await asyncio.to_thread(self.states)
                if states != sent:
                    text = await asyncio.to_thread(dump, await self.data())
                    await response.write(f"event: page\ndata: {text}\n\n".encode())
                    sent = states
        except ConnectionResetError:  # the page was closed
            return response

    async def report(self, request: web.Request) -> web.StreamResponse:
        """A run's own page, if it has been written."""
        name = request.match_info["run"]
        folders = await asyncio.to_thread(run_folders, self.root)
        file = next((folder.report for folder in folders if folder.path.name == name), None)
        if file is None or not file.is_file():
            raise web.HTTPNotFound(text=f"there is no page of a run {name!r:.80}")
        return web.FileResponse(file, headers={"Cache-Control": "no-store"})

    async def data(self) -> dict[str, Any]:
        """As `overview_data`; runs whose files are as before are not read again."""
        async with self._reading:
            return await asyncio.to_thread(overview_data, self.root, read=self._read)

    def states(self) -> dict[RunFolder, FileStates]:
        """Another value when a run has gone on, or a new one has begun."""
        return {folder: _of(folder) for folder in run_folders(self.root)}

    def _read(self, log: RunLog, max_points: int) -> RunResults:
        states = _of(log.folder)
        known = self._known.get(log.folder)
        if known is None or known[:2] != (states, max_points):
            known = (states, max_points, read_run(log, max_points))
            self._known[log.folder] = known
        return known[2]


def _of(folder: RunFolder) -> FileStates:
    return file_states(folder.metrics, folder.summary, folder.config, folder.rollouts, folder.report)
