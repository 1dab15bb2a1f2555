"""Tables of measurements in the pages of docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

__all__ = ["DOCS", "mean_and_range", "write_table"]

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_table(page: str, name: str, table: str) -> None:
    """Put a table between `<!-- NAME -->` and `<!-- /NAME -->` of a page.

    Raises ValueError if one of them is missing.
    """
    file, marks = DOCS / page, (f"<!-- {name} -->", f"<!-- /{name} -->")
    text = file.read_text(encoding="utf-8")
    start, end = text.index(marks[0]) + len(marks[0]), text.index(marks[1])
    file.write_text(f"{text[:start]}\n{table}\n{text[end:]}", encoding="utf-8")


def mean_and_range(shares: Sequence[float]) -> str:
    """The mean, and the least and the most of several.

    >>> mean_and_range([0.93, 0.95])
    '94.0 % (93.0 to 95.0)'
    """
    mean = f"{100 * fmean(shares):.1f} %"
    return mean if len(shares) == 1 else f"{mean} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"
