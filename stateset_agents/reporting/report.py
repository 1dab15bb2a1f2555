"""One HTML page per run, made from its folder alone. `stateset-agents report` and the trainer call it.

The page opens from disk and loads nothing from any network. Everything a run says is compressed data in it,
which the page's script shows as text, never as markup. plotly.js comes from the plotly package: inside the
page, compressed to two fifths of its size, so that a page can be moved or mailed alone; or beside the run.
"""

from __future__ import annotations

import base64
import gzip
import os
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from stateset_agents.reporting.content import content
from stateset_agents.reporting.conversations import MOST_CONVERSATIONS, Conversations
from stateset_agents.reporting.timeline import Timeline, no_timeline
from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

__all__ = ["browsable", "no_conversations", "plotly_js", "render", "write_report"]

_SCRIPTS = tuple(
    f"page.{part}js"
    for part in ("", "measured.", "charts.", "timeline.", "conversations.", "tokens.", "start.")
)


def write_report(
    run_path: str | Path, *, shared_assets: bool = False, conversations: int = MOST_CONVERSATIONS
) -> Path:
    """Write `report.html` into a run folder and return its path.

    `shared_assets` keeps plotly.js once in the folder around the run instead of in the page. At most
    `conversations` stand in it. A run that is still going on gets the parts it has. Raises ConfigurationError
    when the folder is no run, or cannot be read or written.
    """
    log = RunLog.open(run_path)
    shared = None
    if shared_assets:
        script, version = plotly_js()
        shared = log.folder.path.parent / f"plotly-{version}.min.js"
        if not shared.exists():
            _write(shared, script)
    kept, timeline = Conversations(log.folder, conversations), Timeline(log.folder)
    browsed = browsable(log, kept, timeline)
    page = render(content(log), browsed, plotly=f"../{shared.name}" if shared else None)
    _write(log.folder.report, page)
    return log.folder.report


def browsable(log: RunLog, conversations: Conversations, timeline: Timeline) -> dict[str, Any]:
    """What the page's conversation browser and its timeline show; reads on in their files first."""
    conversations.read()
    timeline.read()
    chosen, moved = conversations.chosen(), conversations.transitions()
    used = {id for one in chosen for id in one["token_ids"]}
    return {
        "total": conversations.total,
        "moved": {"n": moved.n, "scenarios": moved.scenarios, "gained": moved.gained, "lost": moved.lost},
        "tokens": {id: text for id, text in log.tokens().items() if id in used},
        "conversations": chosen,
        "timeline": timeline.chosen(),
    }


def no_conversations() -> dict[str, Any]:
    """What `browsable` gives for a run without any."""
    return {
        "total": 0,
        "moved": {"n": 0, "scenarios": 0, "gained": 0, "lost": 0},
        "tokens": {},
        "conversations": [],
        "timeline": no_timeline(),
    }


def render(page: dict[str, Any], browsed: dict[str, Any], *, plotly: str | None, live: bool = False) -> str:
    """The page of that data. `plotly`: where the browser finds plotly.js, None for inside the page."""
    folder = files("stateset_agents.reporting.page")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        (folder / "page.html").read_text(encoding="utf-8")
    )
    return template.render(
        name=page["name"],
        live=live,
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script="\n".join((folder / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        data=_packed(dump({**page, **browsed})),
        plotly=plotly,
        plotly_data=None if plotly else _packed_plotly(),
    )


def plotly_js() -> tuple[str, str]:
    """plotly.js as the plotly package has it, and its version."""
    from plotly.offline import (  # type: ignore[import-untyped]  # plotly ships no types
        get_plotlyjs,
        get_plotlyjs_version,
    )

    return get_plotlyjs(), get_plotlyjs_version()


@lru_cache(maxsize=1)
def _packed_plotly() -> str:
    return _packed(plotly_js()[0])


def _packed(text: str) -> str:
    """Gzip as base64, in which no markup can stand; the same text gives the same."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _write(file: Path, text: str) -> None:
    """Beside and renamed, so that a reader finds the old file or the new one."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigurationError(
            f"cannot write {file}: {error.strerror}; copy the run to a folder you may write"
        ) from error
