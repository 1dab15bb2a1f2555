"""axe-core in a page: what it holds against the accessibility of what is shown."""

from __future__ import annotations

import asyncio
from importlib.metadata import distribution
from pathlib import Path

from chromium import Tab

__all__ = ["faults"]

_FAULTS = (
    "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map((one) => "
    "`${one.impact} ${one.id}: ${one.nodes.map((node) => node.html.slice(0, 200)).join(' | ')}`))"
)


async def faults(tab: Tab) -> list[str]:
    """One line for each rule that is broken."""
    script = Path(str(distribution("axe-playwright-python").locate_file("axe_playwright_python/axe.min.js")))
    await tab.run(await asyncio.to_thread(script.read_text) + ";0")
    return list(await tab.run(_FAULTS))
