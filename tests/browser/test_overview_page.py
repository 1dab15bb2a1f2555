"""The page of many runs in a real browser. `make test-browser` runs this."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from charts_in_view import look_at_every_chart
from chromium import Tab
from live_pages import address_of
from report_runs import finished_run, log_stage, metrics, page_data

from stateset_agents.reporting.live import serve_overview
from stateset_agents.reporting.overview import write_overview
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

STEPS = 80
MOST_BYTES, MOST_CPU_SECONDS = 6_000_000, 5.0
"""Of the page of fifty runs."""


def write_run(root: Path, beta: float, seed: int) -> None:
    folder = RunFolder.create(root, "desk")
    wins = {(seed + number) % 8 for number in range(3 + round(10 * beta))}
    with JsonlTracker(folder) as tracker:
        log_stage(tracker, 0, "before", wins={0})
        for step in range(1, STEPS + 1):
            shift = beta + 0.01 * seed
            tracker.log_metrics(step, {name: value + shift for name, value in metrics(step).items()})
        log_stage(tracker, STEPS, "after", wins=wins)
    folder.write_config({"training": {"beta": beta, "seed": seed, "<b>": "</script>"}})
    side = {"success": len(wins) / 8, "interval": [0.1, 0.9], "n": 8}
    folder.write_summary({"seed": seed, "steps": STEPS, "ended": "finished", "before": side, "after": side})


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty runs: ten experiments with five seeds each."""
    root = tmp_path_factory.mktemp("runs")
    for number in range(10):
        for seed in range(5):
            write_run(root, round(number / 20, 2), seed)
    return write_overview(root)


async def opened(tab: Tab, address: str) -> None:
    await tab.open(address)
    await tab.until("document.querySelectorAll('.runs tbody tr').length > 0")


async def drawn(tab: Tab) -> None:
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    await look_at_every_chart(tab)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
async def test_fifty_runs_fit_without_a_complaint_or_a_request(
    tab: Tab, page: Path, width: int, height: int, scheme: str
) -> None:
    assert len(await asyncio.to_thread(page.read_bytes)) <= MOST_BYTES
    await tab.look(width, height, scheme)
    await tab.call("Performance.enable")
    await opened(tab, page.as_uri())
    spent = {one["name"]: one["value"] for one in (await tab.call("Performance.getMetrics"))["metrics"]}
    assert spent["TaskDuration"] <= MOST_CPU_SECONDS
    await drawn(tab)
    assert await tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.as_uri()]


async def test_an_overlay_has_the_mean_of_the_seeds_and_their_band(tab: Tab, page: Path) -> None:
    await opened(tab, page.as_uri() + "#?shown=beta%253D0.1")
    await drawn(tab)
    lines = await tab.run(
        "document.querySelector('.plot').data.map((line) => [line.name, line.y[line.y.length - 1]])"
    )
    reward = metrics(STEPS)["reward/mean"]  # the end of a moving average is near it
    assert [name for name, _ in lines][2] == "beta=0.1"
    low, high, mean = (value for _, value in lines)
    assert (high - mean, mean - low) == pytest.approx((0.02, 0.02), abs=1e-4)
    assert mean == pytest.approx(reward + 0.1 + 0.02, abs=0.05)


async def test_an_experiment_s_number_lies_among_its_runs_and_is_theirs(tab: Tab, page: Path) -> None:
    await opened(tab, page.as_uri())
    rows = await tab.run(
        "[...document.querySelectorAll('#held-out .family:not(.head)')].map((row) => row.innerText)"
    )
    runs = [(run["experiment"], run["after"]["value"]) for run in page_data(RunFolder(page.parent))["runs"]]
    assert len(rows) == 10
    for experiment, row in enumerate(rows):
        middle, low, high = (float(share) for share in re.findall(r"([0-9.]+)%(?! ?[,\\]])", row)[-3:])
        own = [100 * value for of, value in runs if of == experiment]
        assert (low, high) == pytest.approx((min(own), max(own)), abs=0.06)
        assert low <= middle <= high


async def test_runs_with_other_seeds_are_compared_by_scenario(tab: Tab, tmp_path: Path) -> None:
    """The page said "no seed or no scenario in common" of runs that `compare` tells apart."""
    write_run(tmp_path, 0.0, 0)
    write_run(tmp_path, 0.5, 1)
    await opened(tab, write_overview(tmp_path).as_uri())
    said = str(await tab.run("document.querySelector('#differences').innerText"))
    # Three of eight scenarios against all: five are won, and six must differ.
    assert "8 scenarios, one seed each: another seed may differ; 5 won, 0 lost, sign flips p = 0.0625" in said
    assert "5 of 8 scenarios differ, at least 6 must" in said
    assert "no difference shown" in said


async def test_counts_and_maxima_are_drawn_as_they_are(tab: Tab, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "desk")
    with JsonlTracker(folder) as tracker:
        for step in range(1, 41):
            names = ("memory/peak_mib", "rollout/failed", "kl/old")
            tracker.log_metrics(
                step, dict.fromkeys(names, float(step == 20)) | {"kl/old": 0.5 * (step == 20)}
            )
    await opened(tab, write_overview(tmp_path).as_uri())
    await drawn(tab)
    tops = await tab.run(
        "Object.fromEntries([...document.querySelectorAll('#curves .plot')].map((plot) => "
        "[plot.ariaLabel.split('.')[0], Math.max(...plot.data.at(-1).y)]))"
    )
    assert (tops["rollout/failed"], tops["Memory"]) == (1, 1)
    assert tops["kl/old"] < 0.5  # a moving average


async def test_a_link_restores_what_is_shown(tab: Tab, page: Path) -> None:
    await opened(tab, page.as_uri())
    tick = "document.querySelector('[data-experiment=\"{}\"]').click()"
    for number in (0, 2, 3, 4, 5, 6, 7, 8):
        await tab.run(tick.format(number))
    await tab.run("document.querySelector('[data-sort=after]').click()")
    await tab.run(
        "(() => { const base = document.querySelector('#differences select'); base.value = '9';"
        "base.dispatchEvent(new Event('change')); })()"
    )
    await tab.run("document.querySelector('[name=apart]').click()")
    text = "['runs', 'differences'].map((id) => document.getElementById(id).innerText).join()"
    shown, address = await tab.run(text), await tab.run("location.href")
    assert (
        await tab.run("document.querySelectorAll('.runs tbody tr').length") == 10 + 2
    )  # two settings differ
    await tab.open("about:blank")
    await opened(tab, address)
    assert await tab.run(text) == shown
    assert await tab.run("document.querySelector('[name=apart]').checked")
    # Of eight scenarios beta=0.05 wins three or four and beta=0.45 seven or eight.
    assert "beta=0.05" in str(shown)
    assert "lower" in str(shown)


async def test_keys_sort_the_table_and_leave_the_focus(tab: Tab, page: Path) -> None:
    await opened(tab, page.as_uri())
    await tab.run("document.querySelector('[data-sort=seed]').focus()")
    await tab.press("Enter", "\r")
    await tab.until(
        "document.querySelector('[data-sort=seed]').closest('th').ariaSort", lambda way: way == "ascending"
    )
    assert await tab.run("document.activeElement.dataset.sort") == "seed"
    seeds = "[...document.querySelectorAll('#runs tbody tr')].map((row) => row.cells[1].textContent)"
    assert await tab.run(seeds) == [str(seed) for seed in range(5) for _ in range(10)]


async def test_a_point_of_one_run_s_curve_leads_to_that_step_of_its_page(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=12)
    write_report(folder.path)
    page = write_overview(tmp_path)
    await opened(tab, page.as_uri())
    await drawn(tab)
    await tab.run("document.querySelector('.plot').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        await tab.press(key)
    await tab.press("Enter", "\r")
    status = "document.querySelector('#conversations [role=status]')?.textContent"
    await tab.until(status, lambda text: text == "8 conversations in 2 groups")
    place = str(await tab.run("location.href"))
    assert place.startswith(folder.report.as_uri())
    assert "step-from=3" in place


async def test_the_table_is_saved_as_csv(tab: Tab, page: Path, tmp_path: Path) -> None:
    await opened(tab, page.as_uri())
    await tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await tab.run("document.querySelector('#runs .save').click()")
    await tab.until("document.title")
    file = tmp_path / f"{page.parent.name.lower()}-runs.csv"
    for _ in range(200):
        if file.exists() and file.stat().st_size:
            break
        await tab.run("new Promise((done) => setTimeout(done, 50))")
    lines = file.read_text().splitlines()
    assert len(lines) == 51
    assert lines[0].startswith("run,experiment,seed,ended,steps,before")
    assert lines[1].startswith("0001-desk,beta=0.0,0,finished,80,0.375,0.1,0.9")


async def test_a_live_page_follows_its_runs(tab: Tab, tmp_path: Path) -> None:
    write_run(tmp_path, 0.0, 0)
    async with address_of(serve_overview, tmp_path) as address:
        await opened(tab, address)
        await tab.run("document.querySelector('[data-sort=seed]').click()")
        write_run(tmp_path, 0.1, 1)
        rows = "[...document.querySelectorAll('#runs tbody tr')].map((row) => row.cells[1].textContent)"
        await tab.until(rows, lambda seeds: seeds == ["0", "1"])
        assert tab.complaints == []
