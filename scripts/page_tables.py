"""Tables of measurements in the pages of docs/."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.processors import this_processor

__all__ = ["DOCS", "mean_and_range", "print_table", "write_table"]

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_table(page: str, name: str, table: str) -> None:
    """Put a table between `<!-- NAME -->` and `<!-- /NAME -->` of a page.

    Raises ValueError if one of them is missing.
    """
    file, marks = DOCS / page, (f"<!-- {name} -->", f"<!-- /{name} -->")
    text = file.read_text(encoding="utf-8")
    start, end = text.index(marks[0]) + len(marks[0]), text.index(marks[1])
    file.write_text(f"{text[:start]}\n{table}\n{text[end:]}", encoding="utf-8")


def print_table(page: str, name: str, lines: Iterable[str], *, write: bool) -> None:
    """Print a table as its lines are made, and what they took; `write` puts both into the page."""
    started, table = time.process_time(), []
    for line in lines:
        print(line, flush=True)
        table.append(line)
    seconds = f"{time.process_time() - started:.0f} CPU seconds on {this_processor().key}."
    print(seconds)
    if write:
        write_table(page, name, "\n".join([*table, "", seconds]))


def mean_and_range(shares: Sequence[float]) -> str:
    """The mean, and the least and the most of several.

    >>> mean_and_range([0.93, 0.95])
    '94.0 % (93.0 to 95.0)'
    """
    mean = f"{100 * fmean(shares):.1f} %"
    return mean if len(shares) == 1 else f"{mean} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"
