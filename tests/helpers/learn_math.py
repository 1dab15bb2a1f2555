"""The learning pages' arithmetic, called in a browser's tab: `from learn_math import PageMath`."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from chromium import Tab

__all__ = ["SEEDS", "PageMath", "near"]

SEEDS = range(20)
CLOSE = 1e-9


class PageMath:
    """Functions of files in reporting/assets/learn/."""

    def __init__(self, tab: Tab, *names: str) -> None:
        folder = files("stateset_agents.reporting") / "assets/learn"
        self._tab = tab
        self._source = "\n".join((folder / name).read_text(encoding="utf-8") for name in names)

    async def __call__(self, expression: str, **values: Any) -> Any:
        """The value of an expression over the functions and `values`."""
        given = "".join(f"const {name} = {json.dumps(value)};" for name, value in values.items())
        return await self._tab.run(f"(() => {{ {self._source}; {given} return ({expression}); }})()")


def near(found: Any, wanted: Any) -> None:
    """Equal to 1e-9 where numbers stand, and equal elsewhere."""
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            near(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=CLOSE, rel=CLOSE)
    else:
        assert found == wanted
