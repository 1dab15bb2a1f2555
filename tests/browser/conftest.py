"""One browser for each file of tests, and a page of it for each test that asks for `tab`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from chromium import Chromium, Tab, chromium


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Chromium]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Chromium) -> AsyncIterator[Tab]:
    async with browser.tab() as found:
        await found.look(1280, 900)
        yield found
