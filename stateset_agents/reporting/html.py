"""One self-contained HTML page from a template, styles, scripts and data; plotly.js inside it or beside it.

The page opens from disk and loads nothing from any network. Its data is compressed; its script shows it as
text, never as markup.
"""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jinja2

from stateset_agents.tracking.jsonl import dump
from stateset_agents.tracking.run_folder import replace_file

CHART_SCRIPTS = tuple(f"page/shared/page.{part}js" for part in ("", "state.", "export.", "charts."))
"""Scripts of every page that has charts."""
_LEVEL = 6
_BANNER = 200
"""Characters of plotly.js in which it says its version."""


def html_page(
    template: str | Traversable,
    styles: Sequence[str | Traversable],
    scripts: Sequence[str | Traversable],
    data: dict[str, Any],
    *,
    plotly: str | None = None,
    charts: bool = True,
    live: bool = False,
    **values: Any,
) -> str:
    """The page of a template. Files of `reporting/` are named from there on; `data["name"]` is its title.

    `plotly`: path of plotly.js for the browser; None: inside the page. `charts`: False for a page that draws
    without it. `values`: for the template.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_text(template)).render(
        name=data["name"],
        live=live,
        style="\n".join(map(_text, styles)),
        script="\n".join(map(_text, scripts)),
        data=_compressed(dump(data)),
        plotly=plotly,
        plotly_data=_compressed_plotly() if charts and not plotly else None,
        **values,
    )


def plotly_js() -> tuple[str, str]:
    """plotly.js with cartesian charts alone (npm's plotly.js-cartesian-dist-min), and its version."""
    script = _text("plotly/plotly-cartesian.min.js")
    _, _, version = script[:_BANNER].partition("(cartesian - minified) v")
    return script, version.split()[0]


def shared_plotly(folder: Path, *hint: str) -> str:
    """Keep plotly.js in a folder that pages share, once; returns the file's name, which has its version.

    `hint`: what an error says to do, see `replace_file`.
    """
    script, version = plotly_js()
    file = folder / f"plotly-{version}.min.js"
    if not file.exists():
        replace_file(file, script, *hint)
    return file.name


def _text(file: str | Traversable) -> str:
    path = files("stateset_agents.reporting") / "assets" / file if isinstance(file, str) else file
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _compressed_plotly() -> str:
    return _compressed(plotly_js()[0])


def _compressed(text: str) -> str:
    """Gzip as base64, which holds no markup; the same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=_LEVEL, mtime=0)).decode()


class CompressedSize:
    """The bytes that each of several texts adds to the compressed data of a page."""

    def __init__(self) -> None:
        self._stream = zlib.compressobj(_LEVEL)

    def __call__(self, text: str) -> int:
        """The bytes of the next text; a little too many, for it is flushed."""
        size = len(self._stream.compress(text.encode())) + len(self._stream.flush(zlib.Z_SYNC_FLUSH))
        return -(-4 * size // 3)
