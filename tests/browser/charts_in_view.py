"""Charts are drawn when they come into view, so a test has to look at each of them."""

from __future__ import annotations

from chromium import Tab

__all__ = ["look_at_every_chart"]


async def look_at_every_chart(tab: Tab) -> None:
    """Scroll to one chart after the other, and stay at each until it is drawn."""
    for number in range(await tab.run("document.querySelectorAll('.plot').length")):
        plot = f"document.querySelectorAll('.plot')[{number}]"
        await tab.run(f"{plot}.scrollIntoView()")
        await tab.until(f"{plot}.querySelector('.main-svg') !== null")
