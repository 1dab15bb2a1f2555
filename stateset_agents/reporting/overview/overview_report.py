"""Write the page of all runs in a folder. `stateset-agents report FOLDER` calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stateset_agents.reporting.html import html_page, plotly_js
from stateset_agents.reporting.overview.overview_data import overview_data
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_SHARED = tuple(f"page/shared/page.{part}js" for part in ("", "state.", "export.", "charts."))
_OWN = (
    "page/conversations/page.search.js",
    *(f"overview/overview.{part}js" for part in ("table.", "held_out.", "curves.", "")),
)


def write_overview(root: str | Path, *, shared_assets: bool = False) -> Path:
    """Write `report.html` into a folder of runs and return its path.

    `shared_assets` keeps plotly.js beside it instead of in the page. Raises ConfigurationError if the folder
    holds no run, or cannot be read or written.
    """
    data = overview_data(root)
    for name, reason in data["damaged"]:
        _log.warning("a run is left out", run=name, reason=reason)
    path = Path(root).resolve() / "report.html"
    plotly = None
    if shared_assets:
        script, version = plotly_js()
        plotly = f"plotly-{version}.min.js"
        if not (path.parent / plotly).exists():
            replace_file(path.parent / plotly, script)
    replace_file(path, render_overview(data, plotly=plotly))
    return path


def render_overview(data: dict[str, Any], *, plotly: str | None, live: bool = False) -> str:
    """The page as HTML. `plotly`: path of plotly.js for the browser; None: inside the page."""
    styles = ["page/shared/page.css", "overview/overview.css"]
    return html_page("overview/overview.html", styles, [*_SHARED, *_OWN], data, plotly=plotly, live=live)
