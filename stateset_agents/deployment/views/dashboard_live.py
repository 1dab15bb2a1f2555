"""The page of runs and deployments over HTTP while they go on, on this machine only. It changes nothing.

Updates are server-sent events: `runs` has the data of all runs, `deployments` of those deployments that have
something new, `trouble` a line of text where one of both cannot be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.deployment.state import Mode
from stateset_agents.deployment.views.dashboard_data import Deployments
from stateset_agents.deployment.views.dashboard_page import dashboard, render_dashboard
from stateset_agents.reporting.live import (
    DEFAULT_PORT,
    LiveData,
    LiveOverview,
    SharedText,
    html_response,
    send_changes,
    serve_page,
)
from stateset_agents.reporting.overview import has_runs
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.serving.metrics import MetricFamily, metrics_page
from stateset_agents.tracking.jsonl import dump
from stateset_agents.types.errors import StatesetError

_FAMILIES: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("prometheus.yaml"))
_POLL_SECONDS = 0.5
"""Between two looks at the journal."""
_RUNS_SECONDS = 3.0
"""Between two looks at all runs' files."""


def prometheus_page(statuses: Sequence[Mapping[str, Any]]) -> tuple[bytes, str]:
    """The deployments as metrics in Prometheus's format, and the content type, from what `status_of` gives.

    Values that are not known yet, such as an effect before there is an interval, are left out. Raises
    ApiError, status 501, without prometheus_client.
    """
    by_id = {status["id"]: _with_labels(status) for status in statuses}
    return metrics_page(
        MetricFamily(
            name=f"stateset_deployment_{name}",
            kind=family["kind"],
            text=family["text"],
            labels=("deployment", *([family["label"]] if "label" in family else [])),
            values=tuple(
                ((id, *labels), float(value))
                for id, status in by_id.items()
                for labels, value in _values(status, family["at"].split("."))
                if value is not None
            ),
        )
        for name, family in _FAMILIES.items()
    )


def _with_labels(status: Mapping[str, Any]) -> dict[str, Any]:
    """A status, with what has labels by their values."""
    evidence, agreement = status["evidence"], status["agreement"]
    return {
        **status,
        "modes": {mode: status["mode"] == mode for mode in get_args(Mode)},
        "violations": dict(sorted(status["violations"].items())),
        "same": {name: agreement[f"same_{name}"] for name in ("calls", "reply")},
        "bounds": dict(zip(("low", "high"), evidence["interval"] or (), strict=False)),
        "decisions": {name: evidence[name] for name in ("promote", "roll_back")},
    }


def _values(value: Any, path: Sequence[str], labels: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Each value that stands at a path, with what `*` stands for in it."""
    if not path:
        yield labels, value
    elif path[0] == "*":
        for name, item in value.items():
            yield from _values(item, path[1:], (*labels, name))
    else:
        yield from _values(value[path[0]], path[1:], labels)


async def serve_dashboard(
    root: str | Path,
    deployments: Deployments | None,
    *,
    port: int = DEFAULT_PORT,
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serve until cancelled; `on_ready` gets the address once it answers. Port 0 takes a free one.

    Raises ConfigurationError if the port is in use.
    """
    live = _LiveDashboard(root, deployments)
    await serve_page(live, {"/metrics": live.metrics, "/{run}/report.html": live.report}, port, on_ready)


class _LiveDashboard:
    """Handlers of the addresses. Files are read in a thread."""

    def __init__(self, root: str | Path, deployments: Deployments | None) -> None:
        self._root = root
        self._deployments = deployments
        self._overview = LiveOverview(root)
        self._html = SharedText(self._render)

    async def page(self, _: web.Request) -> web.StreamResponse:
        try:
            states = [await asyncio.to_thread(self._state, name) for name in ("runs", "deployments")]
        except StatesetError as error:
            raise web.HTTPInternalServerError(text=str(error)) from error
        return await html_response(self._html, states)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send events as long as the page is open: first all that there is, then what is new."""
        page_items: dict[str, Any] = {}
        kinds = {
            "deployments": LiveData(
                partial(self._state, "deployments"), partial(self._new_deployments, page_items)
            ),
            "runs": LiveData(partial(self._state, "runs"), self._new_runs, _RUNS_SECONDS),
        }
        return await send_changes(request, kinds, _POLL_SECONDS)

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """The page of metrics for Prometheus; 501 without its library."""
        try:
            states = [] if self._deployments is None else await asyncio.to_thread(self._deployments.statuses)
            text, content_type = await asyncio.to_thread(prometheus_page, states)
        except ApiError as error:
            raise web.HTTPNotImplemented(text=str(error)) from error
        except StatesetError as error:
            raise web.HTTPInternalServerError(text=str(error)) from error
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def report(self, request: web.Request) -> web.StreamResponse:
        """A run's own page, if there is one."""
        if not await asyncio.to_thread(has_runs, self._root):
            raise web.HTTPNotFound(text="there is no run yet")
        return await self._overview.report(request)

    def _state(self, name: str) -> Any:
        """Another value when there is something new."""
        if name == "deployments":
            return None if self._deployments is None else self._deployments.changes()
        return self._overview.states()

    def _render(self) -> str:
        runs = self._overview.data() if has_runs(self._root) else None
        deployments = None if self._deployments is None else self._deployments.data()
        return render_dashboard(dashboard(self._root, runs, deployments), plotly="plotly.js", live=True)

    async def _new_runs(self, states: Any) -> bytes:
        return b'{"data":%s}' % (await self._overview.json.get(states) if states else b"null")

    async def _new_deployments(self, page_items: dict[str, Any], _: object) -> bytes:
        """Those that differ from the ones that the page has, `page_items` by their ids."""
        if self._deployments is None:
            return b'{"data":null}'
        deployments = await asyncio.to_thread(self._deployments.data)
        new = {item["id"]: item for item in deployments if page_items.get(item["id"]) is not item}
        page_items |= new
        return (await asyncio.to_thread(dump, {"data": list(new.values())})).encode()
