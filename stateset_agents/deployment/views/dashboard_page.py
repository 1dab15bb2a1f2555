"""The page of runs and deployments as HTML. `stateset-agents dashboard` calls it."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from stateset_agents.deployment.views.dashboard_data import Deployments
from stateset_agents.reporting.html import CHART_SCRIPTS, html_page
from stateset_agents.reporting.overview import has_runs, overview_data
from stateset_agents.tracking.run_folder import replace_file

_OVERVIEW = tuple(f"overview/overview.{part}.js" for part in ("table", "curves"))
_OWN = ("deployment.charts", "deployment.tables", "dashboard")


def dashboard(
    root: str | Path, runs: dict[str, Any] | None, deployments: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """The data of the whole page. `runs`, `deployments`: None where there are none to show."""
    return {"name": Path(root).resolve().name, "runs": runs, "deployments": deployments}


def write_dashboard(root: str | Path, deployments: Deployments | None, path: str | Path) -> Path:
    """Write the page into one file that opens without a network, and return its path.

    Raises ConfigurationError if it cannot be written, JournalError for a journal that cannot be read.
    """
    path = Path(path).resolve()
    runs = overview_data(root) if has_runs(root) else None
    if runs is not None:  # the runs' own pages, seen from the file
        runs["base"] = f"{Path(os.path.relpath(Path(root).resolve(), path.parent)).as_posix()}/"
    data = dashboard(root, runs, None if deployments is None else deployments.data())
    replace_file(path, render_dashboard(data, plotly=None))
    return path


def render_dashboard(data: dict[str, Any], *, plotly: str | None, live: bool = False) -> str:
    """`plotly`: path of plotly.js for the browser; None: inside the page."""
    folder = files(__package__)
    return html_page(
        folder / "dashboard.html",
        ["page/shared/page.css", "overview/overview.css", folder / "dashboard.css"],
        [*CHART_SCRIPTS, *_OVERVIEW, *(folder / f"{name}.js" for name in _OWN)],
        data,
        plotly=plotly,
        live=live,
    )
