"""One HTML page per run, made from its folder alone. `stateset-agents report` and the trainer call it.

The page opens from disk and loads nothing from any network. All data of the run is in it, compressed; its
script shows it as text, never as markup. plotly.js comes from the plotly package: either inside the page,
compressed to two fifths of its size, so that the page can be moved or mailed alone, or in a file beside the
run.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from stateset_agents.reporting.html import html_page, plotly_js
from stateset_agents.reporting.page_data import page_data
from stateset_agents.reporting.rollouts.conversations import MAX_CONVERSATIONS, Conversations
from stateset_agents.reporting.rollouts.distributions import Distributions
from stateset_agents.reporting.rollouts.timeline import Timeline
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.tracking.run_log import RunLog

__all__ = ["Recorded", "render", "write_report"]

_SCRIPTS = (
    *(f"page/shared/page.{part}js" for part in ("", "state.", "export.", "charts.")),
    *(f"page/page.{part}.js" for part in ("measured", "distributions", "numeric", "timeline", "verdicts")),
    *(
        f"page/conversations/page.{part}.js"
        for part in ("search", "conversations", "rows", "parting", "tokens")
    ),
    "page/page.start.js",
)
_HINT = "copy the run to a folder you may write"


def write_report(
    run_path: str | Path, *, shared_assets: bool = False, conversations: int = MAX_CONVERSATIONS
) -> Path:
    """Write `report.html` into a run folder and return its path.

    `shared_assets` keeps plotly.js once in the folder around the run instead of in the page. The page has at
    most `conversations`. Of a running training it has the parts that exist so far. Raises ConfigurationError
    if the folder is no run, or cannot be read or written.
    """
    log = RunLog.open(run_path)
    with damage_named(log.folder.path):
        recorded = Recorded(log, conversations)
        recorded.read()
        data = {**page_data(log), **recorded.select()}
    shared = None
    if shared_assets:
        script, version = plotly_js()
        shared = log.folder.path.parent / f"plotly-{version}.min.js"
        if not shared.exists():
            replace_file(shared, script, _HINT)
    page = render(data, plotly=f"../{shared.name}" if shared else None)
    replace_file(log.folder.report, page, _HINT)
    return log.folder.report


class Recorded:
    """The data of the page's conversations, distributions and timeline, of the lines that were read."""

    def __init__(self, log: RunLog, conversations: int = MAX_CONVERSATIONS) -> None:
        """`conversations`: at most so many in the page."""
        self._log = log
        self._conversations = Conversations(log.folder, conversations)
        self._distributions = Distributions(log.folder)
        self._timeline = Timeline(log.folder)

    def read(self) -> None:
        """Read the lines that were added. Raises ConfigurationError on another schema version."""
        for part in (self._conversations, self._distributions, self._timeline):
            part.read()

    def select(self) -> dict[str, Any]:
        """As the page takes it."""
        token_texts = self._log.tokens()
        selected = self._conversations.select(token_texts)
        used_ids = {id for conversation in selected for id in conversation["token_ids"]}
        return {
            "total": self._conversations.total,
            "moved": asdict(self._conversations.transitions()),
            "tokens": {id: text for id, text in token_texts.items() if id in used_ids},
            "conversations": selected,
            "distributions": self._distributions.select(),
            "timeline": self._timeline.select(),
        }


def render(data: dict[str, Any], *, plotly: str | None, live: bool = False) -> str:
    """The page as HTML. `plotly`: path of plotly.js for the browser; None: inside the page."""
    return html_page(
        "page/page.html",
        ["page/shared/page.css"],
        _SCRIPTS,
        data,
        plotly=plotly,
        live=live,
        numeric="numeric" in data,
    )
