"""One HTML page per run, made from its folder alone. `stateset-agents report` and the trainer call it.

The page opens from disk and loads nothing from any network. All data of the run is in it, compressed; its
script shows it as text, never as markup. plotly.js comes from the plotly package: either inside the page,
compressed to two fifths of its size, so that the page can be moved or mailed alone, or in a file beside the
run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stateset_agents.reporting.html import html_page, plotly_js
from stateset_agents.reporting.page_data import page_data
from stateset_agents.reporting.rollouts.conversations import Conversations
from stateset_agents.reporting.rollouts.distributions import Distributions
from stateset_agents.reporting.rollouts.timeline import Timeline
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.tracking.run_log import RunLog

MAX_BYTES = 8_000_000
"""Of a page with plotly.js in it, unless the number of conversations is given."""

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
    run_path: str | Path, *, shared_assets: bool = False, conversations: int | None = None
) -> Path:
    """Write `report.html` into a run folder and return its path.

    `shared_assets` keeps plotly.js once in the folder around the run instead of in the page. The page has at
    most `conversations`; with None all that keep it within `MAX_BYTES`. Of a running training it has the
    parts that exist so far. Raises ConfigurationError if the folder is no run, or cannot be read or written.
    """
    log = RunLog.open(run_path)
    shared = None
    if shared_assets:
        script, version = plotly_js()
        shared = log.folder.path.parent / f"plotly-{version}.min.js"
        if not shared.exists():
            replace_file(shared, script, _HINT)
    plotly = f"../{shared.name}" if shared else None
    with damage_named(log.folder.path):
        recorded, data = Recorded(log, conversations), page_data(log)
        recorded.read()
        size = len(render({**data, **recorded.without_conversations()}, plotly=plotly).encode())
        left = MAX_BYTES - size
        while True:
            browser_data = recorded.select(left)
            page = render({**data, **browser_data}, plotly=plotly)
            excess = len(page.encode()) - MAX_BYTES  # compressed in another order, they may take 1 % more
            if conversations is not None or excess <= 0 or not browser_data["conversations"]:
                break
            left -= 2 * excess
    replace_file(log.folder.report, page, _HINT)
    return log.folder.report


class Recorded:
    """The data of the page's conversations, distributions and timeline, of the lines that were read."""

    def __init__(self, log: RunLog, conversations: int | None = None) -> None:
        """`conversations`: at most so many in the page; None: as many bytes as `select` says."""
        self._log = log
        self._conversations = Conversations(log.folder, conversations)
        self._distributions = Distributions(log.folder)
        self._timeline = Timeline(log.folder)

    def read(self) -> None:
        """Read the lines that were added. Raises ConfigurationError on another schema version."""
        for part in (self._conversations, self._distributions, self._timeline):
            part.read()

    def select(self, page_bytes: float | None = None) -> dict[str, Any]:
        """As the page takes it. `page_bytes`: as in `Conversations.select`."""
        token_texts = self._log.tokens()
        selected = self._conversations.select(token_texts, page_bytes=page_bytes)
        return self.without_conversations() | _with_texts(selected, token_texts)

    def of_steps(self, stage: str, steps: tuple[float, float]) -> dict[str, Any]:
        """The conversations of these steps or of another stage than training, with what their tokens say."""
        token_texts = self._log.tokens()
        return _with_texts(self._conversations.of_steps(stage, steps, token_texts), token_texts)

    def without_conversations(self) -> dict[str, Any]:
        """What the page has beside them, and what the tokens of all of them say."""
        return {
            "total": self._conversations.total,
            "counts": self._conversations.counts,
            "moved": asdict(self._conversations.transitions()),
            "tokens": self._log.tokens(),
            "conversations": [],
            "distributions": self._distributions.select(),
            "timeline": self._timeline.select(),
        }


def _with_texts(conversations: list[dict[str, Any]], token_texts: Mapping[int, str]) -> dict[str, Any]:
    used_ids = {id for conversation in conversations for id in conversation["token_ids"]}
    return {
        "conversations": conversations,
        "tokens": {id: text for id, text in token_texts.items() if id in used_ids},
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
