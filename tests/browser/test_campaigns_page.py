"""The page of campaigns in a real browser: charts, a model whose variables can be asked, experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
from acquisition_campaigns import small_campaigns
from axe import faults
from chromium import Tab

from stateset_agents.numeric.acquisition.campaign_page import Campaigns

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

MINUS = "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaigns, Path]:
    made = small_campaigns()
    return made, made.write(tmp_path_factory.mktemp("page") / "campaigns.html")


async def text(tab: Tab, selector: str) -> str:
    return str(await tab.run(f"document.querySelector({selector!r}).textContent"))


async def test_a_variable_says_what_setting_it_would_tell(tab: Tab, page: tuple[Campaigns, Path]) -> None:
    made, path = page
    await tab.open(path.as_uri())
    await tab.until("!!document.querySelector('#model svg')")
    model = made.model
    assert await text(tab, "h1") == "Small <campaigns>"
    assert await tab.run("document.querySelectorAll('#model .node').length") == len(model["nodes"])
    assert await tab.run("document.querySelectorAll('#model .edge').length") == len(model["edges"])
    last = len(model["experiments"])
    assert (await text(tab, ".moment output")).startswith(f"after {last} experiments of {last}: ")
    for at in (1, 2):
        name = model["nodes"][at]["name"]
        await tab.run(f"document.querySelector('.node[data-at=\"{at}\"]').dispatchEvent(new Event('click'))")
        assert await text(tab, ".asked h3") == f"Set {name}"
        rows = await tab.run(
            "[...document.querySelectorAll('.asked tbody tr')].map((row) => "
            "[...row.children].map((one) => one.textContent))"
        )
        own = [one for one in model["interventions"] if at in one["nodes"]]
        assert [row[0] for row in rows] == [one["label"] for one in own]
        truths = [float(row[4].replace(MINUS, "-")) for row in rows]
        assert truths == pytest.approx([one["truth"] for one in own], rel=0.01, abs=1e-4)
        lit = await tab.run("document.querySelectorAll('.edge.told').length")
        assert lit <= sum(edge["child"] != at for edge in model["edges"])  # nothing of its own causes
    assert await tab.run("location.hash") == f"#model?variable={model['nodes'][2]['name']}"
    assert tab.complaints == []


async def test_the_posterior_is_shown_before_and_after_each_experiment(
    tab: Tab, page: tuple[Campaigns, Path]
) -> None:
    made, path = page
    await tab.open(path.as_uri() + "#model?after=0&variable=X2")
    await tab.until("!!document.querySelector('#model svg')")
    assert (await text(tab, ".moment output")).startswith("before the first experiment: 8 of the budget left")
    assert await text(tab, "#model .weight") == "0 ± 1"
    assert await text(tab, ".asked h3") == "Set X2"
    assert await tab.run("document.querySelectorAll('tr.here').length") == 0
    await tab.run("document.getElementById('moment').focus()")
    await tab.press("ArrowRight")
    assert (await text(tab, ".moment output")).startswith("after 1 experiment of ")
    assert await text(tab, "tr.here th") == "1"
    await tab.press("ArrowRight")  # the slider keeps the focus
    assert await text(tab, "tr.here th") == "2"
    first = made.model["interventions"][made.model["experiments"][0]["intervention"]]
    assert await text(tab, "#experiments tbody td") == first["label"]


async def test_keys_ask_a_variable_too(tab: Tab, page: tuple[Campaigns, Path]) -> None:
    _, path = page
    await tab.open(path.as_uri())
    await tab.until("!!document.querySelector('#model svg')")
    await tab.run("document.querySelector('.node[data-at=\"1\"]').focus()")
    await tab.press("Enter")
    assert await text(tab, ".asked h3") == "Set X2"
    assert await tab.run("document.activeElement.dataset.at") == "1"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
async def test_axe_finds_no_fault_in_it(
    tab: Tab, page: tuple[Campaigns, Path], width: int, scheme: str
) -> None:
    await tab.look(width, 900, scheme)
    await tab.open(page[1].as_uri())
    await tab.until("document.querySelectorAll('.plot .main-svg').length > 0")
    assert await faults(tab) == []
    assert await tab.run("document.documentElement.scrollWidth") <= width
