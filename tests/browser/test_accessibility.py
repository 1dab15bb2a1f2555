"""axe-core finds no fault in the pages, in both widths and schemes. `make test-browser` runs this."""

from __future__ import annotations

from pathlib import Path

import pytest
from axe import faults
from chromium import Chromium
from report_runs import finished_run
from study_folders import comparison, write_study

from stateset_agents.cli.pages import write_pages
from stateset_agents.reporting.overview import write_overview
from stateset_agents.reporting.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    runs = [finished_run(root, steps=12) for _ in range(2)]
    return {"run": write_report(runs[0].path), "runs": write_overview(root)}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
@pytest.mark.parametrize("page", ["run", "runs"])
async def test_axe_finds_no_fault(
    browser: Chromium, pages: dict[str, Path], page: str, width: int, height: int, scheme: str
) -> None:
    async with browser.tab() as tab:
        await tab.look(width, height, scheme)
        await tab.open(pages[page].as_uri() + "#?stage=train")
        await tab.until("document.querySelector('.runs tbody tr, .group article') !== null")
        await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert await faults(tab) == []
        if page == "run":
            await tab.press("t", "t")
            await tab.run("document.querySelector('.members').scrollIntoView()")
            await tab.until("document.querySelectorAll('.members .t').length > 0")
            assert await faults(tab) == []


@pytest.fixture(scope="module")
def learn_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("learn")
    written = [
        *write_pages(out=root / "papers"),
        write_pages(finished_run(root / "runs", steps=6).path)[0],
        *write_pages(write_study(root / "study", comparison())),
    ]
    return {path.stem: path for path in written}


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 900, "light"), (390, 844, "dark")])
async def test_axe_finds_no_fault_in_the_learning_pages(
    browser: Chromium, learn_pages: dict[str, Path], width: int, height: int, scheme: str
) -> None:
    assert len(learn_pages) == 10
    found = {}
    for name, page in learn_pages.items():
        async with browser.tab() as tab:
            await tab.look(width, height, scheme)
            await tab.open(page.as_uri())
            await tab.until("'ready' in document.documentElement.dataset")
            await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            found[name] = await faults(tab)
    assert {name: lines for name, lines in found.items() if lines} == {}
