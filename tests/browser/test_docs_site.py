"""The site that `make docs` builds, opened from the file system: search, accessibility, no request."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe import faults
from chromium import Chromium
from repository_paths import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
SITE = ROOT / "build" / "site"


@pytest.fixture(scope="module")
def site() -> Path:
    if not (SITE / "index.html").is_file():
        pytest.fail("there is no build/site: run `make docs` first, as `make test-browser` does")
    return SITE


PAGES = ("index", "getting-started", "rewards", "configuration", "reference/core")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
@pytest.mark.parametrize("page", PAGES)
async def test_axe_finds_no_fault_and_nothing_is_asked_of_the_network(
    browser: Chromium, site: Path, page: str, width: int, height: int, scheme: str
) -> None:
    async with browser.tab() as tab:
        await tab.look(width, height, scheme)
        await tab.open((site / f"{page}.html").as_uri())
        await tab.run("localStorage.clear()")  # the scheme that an earlier tab had
        await tab.open((site / f"{page}.html").as_uri())
        await tab.until("document.querySelector('article h1') !== null")
        shown = {"light": "default", "dark": "slate"}[scheme]
        await tab.until("document.body.dataset.mdColorScheme", lambda now: now == shown)
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert await faults(tab) == []


@pytest.mark.parametrize(
    ("words", "page"),
    [("JSONL columns", "own-data"), ("MultiTurnGRPOTrainer", "reference/training"), ("gpu memory", "memory")],
)
async def test_the_search_works_without_a_server(
    browser: Chromium, site: Path, words: str, page: str
) -> None:
    async with browser.tab() as tab:
        await tab.look(1280, 900, "light")
        await tab.open((site / "index.html").as_uri())
        await tab.until("document.querySelector('[data-md-component=search-query]') !== null")
        await tab.run("document.querySelector('[data-md-component=search-query]').focus()")
        await tab.call("Input.insertText", text=words)
        await tab.until("document.querySelectorAll('.md-search-result__item').length > 0")
        script = "[...document.querySelectorAll('.md-search-result__link')].map((one) => one.href)"
        links = await tab.run(script)
        assert any(f"/{page}.html" in link for link in links), links
        assert tab.complaints == []
