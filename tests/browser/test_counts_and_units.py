"""Of how many conversations pages speak, in which units, at which ticks. `make test-browser` runs this."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from charts_in_view import look_at_every_chart
from chromium import Tab
from live_pages import address_of
from report_runs import finished_run, log_groups, log_step, metrics, numeric_run

from stateset_agents.deployment.views.dashboard_page import write_dashboard
from stateset_agents.reporting.live import serve
from stateset_agents.reporting.overview import write_overview
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

STEPS, DROP = 20, 14
HELD = 32
"""Conversations of the page, of 20 steps with 64 each."""


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Success falls in one step: two of its eight groups fail, 0 of 8 and 4 of 8."""
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "dropped")
    with JsonlTracker(folder) as tracker:
        for step in range(1, STEPS + 1):
            log_groups(tracker, step, [8, 8, 0, 8, 4, 8, 8, 8] if step == DROP else [8] * 8, members=8)
            tracker.log_metrics(step, metrics(step))
    write_report(folder.path, conversations=HELD)
    return folder


async def all_drawn(tab: Tab) -> None:
    await tab.until("!!document.querySelector('.plot')")
    await look_at_every_chart(tab)


async def said(tab: Tab) -> str:
    return str(await tab.run("document.querySelector('#conversations [role=status]').textContent"))


async def listed(tab: Tab) -> list[str]:
    """Step and successes of each group in the list."""
    return list(
        await tab.run("[...document.querySelectorAll('.units .where')].map((one) => one.textContent)")
    )


async def test_the_groups_that_failed_stand_on_their_step_and_the_count_says_of_how_many(
    tab: Tab, dropped: RunFolder
) -> None:
    await tab.open(dropped.report.as_uri() + f"#conversations?at={DROP}")
    await tab.until("!!document.querySelector('.units li')")
    assert await listed(tab) == [f"step {DROP} \N{MIDDLE DOT} 0/8", f"step {DROP} \N{MIDDLE DOT} 4/8"]
    assert (await said(tab)).startswith("16 of 64 conversations in 2 groups.")
    note = str(await tab.run("document.querySelector('#conversations .note').textContent"))
    assert f"{HELD} of 1,280 conversations are in this page: whole groups, those with failures first" in note


async def test_a_step_without_a_group_says_where_its_conversations_are(tab: Tab, dropped: RunFolder) -> None:
    await tab.open(dropped.report.as_uri() + "#conversations?at=6")
    text = await tab.until(
        "document.querySelector('#conversations [role=status]')?.textContent ?? ''", lambda text: "64" in text
    )
    assert text == (
        "None of 64 conversations that fit is in this page. The others are in rollouts.jsonl; "
        "stateset-agents report RUN --live shows them."
    )


async def test_a_cell_says_how_many_of_its_conversations_the_page_has(tab: Tab, dropped: RunFolder) -> None:
    await tab.open(dropped.report.as_uri())
    await tab.until("document.querySelectorAll('.heat').length > 1")
    columns = "getComputedStyle(document.querySelector('.heat')).gridTemplateColumns.split(' ').length"
    assert await tab.run(columns) == STEPS
    for step, words in (
        (DROP, "4 of 52 conversations in 1 group."),
        (6, "None of 64 conversations that fit"),
    ):
        await tab.run(f"document.querySelector('.heat').children[{step - 1}].click()")  # the highest rewards
        assert (await said(tab)).startswith(words)


async def test_a_live_page_fetches_what_a_list_lacks(tab: Tab, dropped: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "dropped")
    shutil.copytree(dropped.path, folder.path)
    async with address_of(serve, RunLog(folder), conversations=HELD) as address:
        await tab.open(f"{address}#conversations?stage=train&step-from={DROP}&step-to={DROP}")
        await tab.until("document.querySelectorAll('.units li').length === 2")
        await tab.run("document.querySelector('#conversations [role=status] button').click()")
        await tab.until("document.querySelectorAll('.units li').length === 8")
        assert await said(tab) == "64 conversations in 8 groups"
        with JsonlTracker(folder) as tracker:  # the run goes on, and what was fetched stays
            log_step(tracker, STEPS + 1)
        await tab.until("document.querySelector('#conversations .note').textContent.includes('1,290')")
        assert await said(tab) == "64 conversations in 8 groups"
    assert tab.complaints == []


async def test_a_page_of_many_runs_has_the_units_of_its_runs(tab: Tab, tmp_path: Path) -> None:
    finished_run(tmp_path / "talks", steps=3)
    numeric_run(tmp_path / "poles")
    found = {}
    for name in ("talks", "poles"):
        for write, kind in ((write_overview, "report"), (write_dashboard, "dashboard")):
            path = (
                write_overview(tmp_path / name)
                if write is write_overview
                else write_dashboard(tmp_path / name, None, tmp_path / f"{name}.html")
            )
            await tab.open(path.as_uri())
            await all_drawn(tab)
            found[name, kind] = await tab.run(
                "[...document.querySelectorAll('figure')].map((one) => ["
                "one.querySelector('strong').textContent, one.querySelector('figcaption > span').textContent,"
                "one.querySelector('.plot').getAttribute('aria-label').match(/read the ([a-z ]+)s/)[1]])"
            )
    for kind in ("report", "dashboard"):
        assert ["Reward", "mean of the step's conversations", "step"] in found["talks", kind]
        assert ["KL to the reference", "nats per token", "step"] in found["talks", kind]
        assert ["Return", "mean of the update's episodes", "environment step"] in found["poles", kind]
    assert not any("episodes" in note for _, note, _ in found["talks", "report"])


async def test_success_and_returns_in_one_folder_have_a_scale_each(tab: Tab, tmp_path: Path) -> None:
    """A success of 34 % was the "reward" 0.34 on the axis of a return."""
    numeric_run(tmp_path)
    finished_run(tmp_path, steps=3)
    await tab.open(write_overview(tmp_path).as_uri())
    await tab.until("document.querySelectorAll('#runs tbody tr').length === 2")
    scales = "[...document.querySelectorAll('#held-out .head')].map((one) => one.children[0].textContent)"
    assert await tab.run(scales) == ["return after training", "success after training"]
    returns, success = await tab.run(
        "[...document.querySelectorAll('#runs tbody tr')].map("
        "(row) => [4, 5, 6].map((at) => row.cells[at].textContent))"
    )
    assert returns[:2] == ["6.5", "18 [5.2, 7.8]"]
    assert returns[2].startswith("+11.5 [")
    assert success[0].endswith("%")
    assert success[2].endswith("] points")


async def ticks(tab: Tab) -> dict[str, dict[str, list[str]]]:
    """Chart -> what stands along it and up it."""
    labels = (
        "Object.fromEntries(['x', 'y'].map((axis) => [axis, "
        "[...one.querySelectorAll(`.${axis}tick`)].map((tick) => tick.textContent)]))"
    )
    figures = (
        "Object.fromEntries([...document.querySelectorAll('figure:has(.plot)')].map((one) => "
        f"[one.querySelector('strong').textContent, {labels}]))"
    )
    found = dict(await tab.run(figures))
    return {title: {axis: sorted(texts) for axis, texts in of.items()} for title, of in found.items()}


async def test_seeds_whose_updates_end_at_other_steps_have_a_mean_and_a_band(
    tab: Tab, tmp_path: Path
) -> None:
    """Each point was of one seed, the learning rate "0%", and all ticks of a small share were "0%"."""
    for seed in range(2):
        folder = RunFolder.create(tmp_path, "pole", conversations=False)
        folder.write_config({"kind": "control", "training": {"seed": seed}})
        with JsonlTracker(folder) as tracker:
            for update in range(1, 10):
                step = 100 * update + 10 * seed
                clipped = {"policy/clip_fraction_low": 0.0002 * update}
                rate = {"optimizer/learning_rate": 0.01 / update}
                tracker.log_metrics(step, {"reward/mean": step + 20.0 * seed, **clipped, **rate})
    await tab.open(write_overview(tmp_path).as_uri())
    await tab.until("!!document.querySelector('.plot')")
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    await all_drawn(tab)
    low, high, mean = await tab.run("document.querySelector('.plot').data.map(({ x, y }) => [x, y])")
    steps = list(range(200, 1000, 100))  # those that both have
    assert low == [steps, steps]
    assert mean == [steps, [step + 10 for step in steps]]
    assert high == [steps, [step + 20 for step in steps]]
    found = await ticks(tab)
    assert not [text for text in found["optimizer/learning_rate"]["y"] if "%" in text]
    shares = found["Clip fraction: below"]["y"]
    assert len(set(shares)) == len(shares) > 1


async def test_all_families_are_moving_averages_also_those_that_some_steps_lack(
    tab: Tab, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        for step in range(1, 13):
            rare = {"success/refund": float(step % 4 == 1)} if step % 2 else {}
            tracker.log_metrics(step, {"success/rate": 0.5, "success/cancel": float(step % 2), **rare})
    write_report(folder.path)
    await tab.open(folder.report.as_uri())
    await all_drawn(tab)
    drawn = await tab.run(
        "Object.fromEntries([...document.querySelectorAll('figure')].find((one) => "
        "one.querySelector('strong').textContent === 'Success by family').querySelector('.plot')"
        ".data.map(({ name, y }) => [name, y]))"
    )
    assert drawn["refund"] == pytest.approx([1 / 2, 2 / 3, 1 / 3, 2 / 3, 1 / 3, 1 / 2])
    assert drawn["cancel"][1:3] == pytest.approx([2 / 3, 1 / 3])


async def test_a_run_of_one_update_has_one_tick_and_no_empty_chart(tab: Tab, tmp_path: Path) -> None:
    folder = numeric_run(tmp_path, updates=1)
    write_report(folder.path)
    await tab.open(folder.report.as_uri())
    await all_drawn(tab)
    found = await ticks(tab)
    assert {tuple(found[title]["x"]) for title in ("Return", "Time", "How episodes end")} == {("100",)}
    painted = await tab.run(
        "Object.fromEntries([...document.querySelectorAll('figure:has(.plot)')].map((one) => "
        "[one.querySelector('strong').textContent, "
        "[...one.querySelectorAll('.points path, .point path, .scatterlayer .point')].filter("
        "(mark) => mark.getBoundingClientRect().height > 2).length]))"
    )
    assert {title for title, marks in painted.items() if not marks} == set()
    assert tab.complaints == []


async def test_whole_numbers_have_whole_ticks_also_where_one_zooms_in(tab: Tab, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        for step in range(1, 4):
            tracker.log_metrics(step, {"reward/mean": 0.1 * step, "staleness/mean": float(step % 2)})
    write_report(folder.path)
    await tab.open(folder.report.as_uri())
    await all_drawn(tab)
    found = await ticks(tab)
    assert found["Reward"]["x"] == ["1", "2", "3"]
    assert found["Staleness"]["y"] == ["0", "1"]
    title = json.dumps("Reward")
    plot = (
        "[...document.querySelectorAll('figure')].find("
        f"(one) => one.querySelector('strong').textContent === {title}).querySelector('.plot')"
    )
    await tab.run(
        f"Plotly.relayout({plot}, {{ 'xaxis.range[0]': 1.6, 'xaxis.range[1]': 3.1 }}).then(() => 0)"
    )
    assert (await ticks(tab))["Reward"]["x"] == ["2", "3"]
    await tab.run(f"Plotly.relayout({plot}, {{ 'xaxis.range': [0.5, 3.5] }}).then(() => 0)")
    assert (await ticks(tab))["Reward"]["x"] == ["1", "2", "3"]
