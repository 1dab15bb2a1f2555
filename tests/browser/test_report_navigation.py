"""From a curve to a token and back: links, partings, search, heatmaps, files. `make test-browser`."""

from __future__ import annotations

import asyncio
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab
from report_runs import WORDS, conversation, finished_run, log_step, metrics

from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = finished_run(tmp_path_factory.mktemp("runs"), steps=24)
    write_report(folder.path)
    return folder


async def opened(tab: Tab, folder: RunFolder, place: str = "") -> None:
    await tab.open("about:blank")
    await tab.open(folder.report.as_uri() + place)
    await tab.until("!!document.querySelector('.units li')")


async def typed(tab: Tab, text: str) -> str:
    """What the page says of what is found."""
    await tab.run(
        "(() => { const form = document.querySelector('form.filters');"
        f"form.elements.text.value = {json.dumps(text)}; form.dispatchEvent(new Event('input')); }})()"
    )
    return " ".join(str(await tab.run("document.querySelector('.found').innerText")).split())


def with_last_token(trajectory: Trajectory, token: int, logprob: float) -> Trajectory:
    *first, last = trajectory.turns
    completion = replace(last.completion, token_ids=(token,), logprobs=(logprob,))
    return replace(trajectory, turns=(*first, replace(last, completion=completion)))


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A group whose members 0 and 2 end with ` Done`, and succeed, and whose member 1 ends with ` look`."""
    folder = RunFolder.create(tmp_path_factory.mktemp("parted"), "demo")
    ends = ((6, -0.25, True), (3, -1.5, False), (6, -0.25, True))
    members = tuple(
        with_last_token(conversation(10, success=success, member=member), token, logprob)
        for member, (token, logprob, success) in enumerate(ends)
    )
    with JsonlTracker(folder, WORDS.__getitem__) as tracker:
        tracker.log_rollouts(1, [TrajectoryGroup(key="1/parted", trajectories=members)])
        tracker.log_metrics(1, metrics(1))
        log_step(tracker, 2)
    write_report(folder.path)
    return folder


async def test_the_token_where_good_and_bad_part_is_marked_with_both_probabilities(
    tab: Tab, parted: RunFolder
) -> None:
    await opened(tab, parted)
    rows = await tab.run(
        "[...document.querySelectorAll('.members-table tbody tr')].map((row) => row.innerText)"
    )
    done, look = (f"{math.exp(logprob):.3g}" for logprob in (-0.25, -1.5))
    assert [str(row).split()[1] for row in rows] == ["0", "2", "1"]  # by reward
    assert f"turn 2, token 1: “ Done” (p {done}), member 1 “ look” (p {look})" in rows[0]
    assert f"turn 2, token 1: “ look” (p {look}), member 0 “ Done” (p {done})" in rows[2]
    await tab.run("[...document.querySelectorAll('.part-link')].at(-1).click()")
    await tab.until("document.activeElement?.dataset?.at", lambda at: at == "5")
    assert await tab.run("document.activeElement.classList.contains('part')")
    assert "member=1&token=5" in str(await tab.run("location.hash"))


async def test_a_group_of_equal_members_parts_nowhere(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run, "#conversations?stage=train")
    rows = await tab.run(
        "[...document.querySelectorAll('.members-table tbody tr')].map((row) => row.innerText)"
    )
    assert all("says all that member" in row for row in rows)  # the same six tokens each


async def test_a_link_restores_filters_group_view_and_token(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await tab.run("document.querySelector('form.filters').elements.stage.focus()")
    await tab.run(
        "(() => { const form = document.querySelector('form.filters'); form.elements.stage.value = 'train';"
        "form.dispatchEvent(new Event('input')); })()"
    )
    await tab.press("j", "j")  # a select takes letters for itself
    await tab.run("document.querySelector('.units').focus()")
    for _ in range(3):
        await tab.press("ArrowDown")
    await tab.press("t", "t")
    await tab.until("document.querySelectorAll('.members .t').length > 0")
    await tab.run("document.querySelector('[name=colour][value=advantage]').click()")
    chip = "document.querySelectorAll('.members article')[1].querySelectorAll('.t')[3]"
    await tab.until(f"{chip} !== undefined")
    await tab.run(f"{chip}.focus()")
    facts = "document.querySelector('.inspector').innerText"
    group = "document.querySelector('.group h3').textContent"
    seen = [await tab.run(facts), await tab.run(group)]
    address = str(await tab.run("location.hash"))
    await opened(tab, run, address)
    await tab.until("document.activeElement?.dataset?.at", lambda at: at == "3")
    assert [await tab.run(facts), await tab.run(group)] == seen
    assert await tab.run("document.querySelector('[name=colour]:checked').value") == "advantage"
    await opened(tab, run, "#curves?group=none|such")
    assert "The group that the address names is not among them." in await tab.run(
        "document.querySelector('#conversations [role=status]').textContent"
    )
    assert tab.complaints == []


async def test_a_point_of_a_curve_opens_its_step_and_back_leads_back(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    first = "document.querySelector('.plot')"
    await tab.run(f"{first}.scrollIntoView()")
    await tab.until(f"!!{first}.querySelector('.main-svg')")
    await tab.run(f"{first}.focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        await tab.press(key)
    await tab.press("Enter", "\r")
    status = "document.querySelector('#conversations [role=status]').textContent"
    assert await tab.run(status) == "8 conversations in 2 groups"
    assert "step-from=3&step-to=3" in str(await tab.run("location.hash"))
    await tab.run("history.back()")
    await tab.until(status, lambda text: text == "208 conversations in 56 groups")
    box = await tab.run(
        f"(() => {{ const plot = {first}; plot.scrollIntoView({{block: 'center'}}); const {{x, y}} = "
        "plot.querySelector('.nsewdrag').getBoundingClientRect(); const axis = plot._fullLayout.xaxis;"
        "return [x + axis.l2p(5), y + 40]; })()"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        await tab.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
        await asyncio.sleep(0.3)
    await tab.until("location.hash", lambda text: "step-from=5" in text)


async def test_search_marks_counts_and_walks_its_hits(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    lines = [record for _, record in read_lines(run.rollouts)][1:]
    lines = [line for line in lines if not line["branch_of"]]
    said = [[m["content"] for m in line["messages"] if m["role"] == "user"] for line in lines]
    hits = sum(text.count("about") for texts in said for text in texts)
    told = await typed(tab, "user:about")
    assert told.startswith(f"208 conversations in 56 groups {hits} hits ")
    assert "text user:about" in told
    marks = "[...document.querySelectorAll('mark.hit')].map((one) => one.textContent)"
    assert await tab.run(marks) == ["about", "about"]  # before and after
    now = "[...document.querySelectorAll('mark.hit')].findIndex((one) => one.classList.contains('now'))"
    chosen = "document.querySelector('.units [aria-selected=true] .scenario').textContent"
    await tab.run("document.querySelector('.units').focus()")
    seen = []
    for _ in range(3):
        await tab.press("n", "n")
        seen.append((await tab.run(chosen), await tab.run(now)))
    assert seen == [("test-0", 0), ("test-0", 1), ("test-1", 0)]
    await tab.press("N", "N")
    assert (await tab.run(chosen), await tab.run(now)) == ("test-0", 1)
    assert (await typed(tab, "tool:/K11\\D/ agent:/done/")).startswith("4 conversations in 1 group 8 hits")
    assert (await typed(tab, "tool:about")).startswith("No conversation fits")
    assert (await typed(tab, "/(/")).startswith("no regular expression: Unterminated group")
    await tab.run("document.querySelector('.chip').click()")
    assert await tab.run("document.querySelector('#conversations [role=status]').textContent") == (
        "208 conversations in 56 groups"
    )


async def test_a_cell_of_a_heatmap_opens_its_conversations(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    titles = await tab.run(
        "[...document.querySelectorAll('#distributions strong')].map((one) => one.textContent)"
    )
    assert titles == ["Reward by step", "Reward by length", "What went wrong by step"] or titles == [
        "Reward by step",
        "What went wrong by step",
    ]
    await tab.run("[...document.querySelectorAll('.heat')].at(-1).focus()")
    for key in ("End", "Home"):
        await tab.press(key)
    said = "[...document.querySelectorAll('#distributions output')].at(-1).textContent"
    assert await tab.run(said) == "step 1, failed, no rule broken: 6 of 8 conversations, 75%"
    await tab.press("Enter", "\r")
    status = "document.querySelector('#conversations [role=status]').textContent"
    assert await tab.run(status) == "6 conversations in 2 groups"


async def test_metrics_are_filtered_and_constant_ones_are_named(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run, "#curves?metrics=/version$/")
    titles = "[...document.querySelectorAll('#all-metrics figure strong')].map((one) => one.textContent)"
    assert await tab.run(titles) == ["policy/version"]
    assert "reward/std 0.4" in str(await tab.run("document.querySelector('.still').textContent"))
    summary = str(await tab.run("document.querySelector('#all-metrics > summary').textContent"))
    await opened(tab, run, "#curves?metrics=/./")  # all that move
    moving, still = re.findall(r"[0-9]+", summary)
    assert len(await tab.run(titles)) == int(moving)
    assert (
        await tab.run("document.querySelector('.still summary').textContent")
        == f"{still} metrics that never changed"
    )
    await tab.run(
        "(() => { const input = document.querySelector('[name=metrics]'); input.value = 'nothing';"
        "input.dispatchEvent(new Event('input')); })()"
    )
    assert await tab.run(titles) == []
    assert "metrics=nothing" in str(await tab.run("location.hash"))


async def saved(file: Path) -> bytes:
    for _ in range(400):
        if await asyncio.to_thread(file.exists):
            return await asyncio.to_thread(file.read_bytes)
        await asyncio.sleep(0.05)
    raise AssertionError(f"{file.name} was not saved")


async def test_a_chart_is_saved_as_csv_and_as_a_picture(tab: Tab, run: RunFolder, tmp_path: Path) -> None:
    await opened(tab, run)
    await tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await tab.run("document.querySelector('figure').scrollIntoView()")
    await tab.until("!!document.querySelector('.plot .main-svg')")
    await tab.run(
        "[...document.querySelectorAll('figure')[0].querySelectorAll('.save')].forEach((one) => one.click())"
    )
    lines = (await saved(tmp_path / "reward.csv")).decode().split("\r\n")
    assert lines[0] == "step,Reward,Reward low,Reward high"
    assert float(lines[24].split(",")[1]) == pytest.approx(metrics(24)["reward/mean"], rel=1e-6)
    picture = await saved(tmp_path / "reward.png")
    assert picture.startswith(b"\x89PNG")
    width: Any = await tab.run("document.querySelector('.plot').clientWidth")
    assert int.from_bytes(picture[16:20], "big") == 2 * width
    assert tab.complaints == []


async def test_what_fits_is_saved_as_a_list_and_a_group_as_json(
    tab: Tab, run: RunFolder, tmp_path: Path
) -> None:
    await opened(tab, run, "#conversations?stage=train&step-from=3&step-to=3&outcome=succeeded")
    await tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await tab.run("document.querySelector('.found .save').click()")
    lines = (await saved(tmp_path / "0001-demo-conversations.csv")).decode().splitlines()
    assert lines[0].startswith(
        "step,stage,group,member,scenario,family,status,success,reward,turns,sampled tokens"
    )
    assert [line.split(",")[:6] for line in lines[1:]] == [
        ["3", "train", "3/0", "3", "test-30", "order_status"],
        ["3", "train", "3/1", "3", "test-31", "refund"],
    ]
    await tab.run("document.querySelector('.group .save').click()")
    group = json.loads(await saved(tmp_path / "3-3-0.json"))
    assert [one["member"] for one in group] == [0, 1, 2, 3, 0]  # the last is a branch
    assert group[3]["reward"] == 0.9
    assert "wording" not in group[3]


async def test_a_page_of_8240_conversations_is_small_and_ready_soon(tab: Tab, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "big")
    with JsonlTracker(folder, WORDS.__getitem__) as tracker:
        for step in range(1, 111):
            log_step(tracker, step, groups=15)  # 60 conversations and 15 branches
    write_report(folder.path)
    assert len(await asyncio.to_thread(folder.report.read_bytes)) <= 3_000_000
    await tab.call("Performance.enable")
    await opened(tab, folder)
    assert "All 8,250 conversations" in str(
        await tab.run("document.querySelector('#conversations').innerText")
    )
    spent = {one["name"]: one["value"] for one in (await tab.call("Performance.getMetrics"))["metrics"]}
    assert spent["TaskDuration"] <= 3.0


async def test_the_difference_is_the_headline(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    text = " ".join(str(await tab.run("document.querySelector('.headline .change').innerText")).split())
    # Of eight scenarios 0 and 1 succeed before, all but 1 after.
    # Six of seven to one side: a coin falls so in 12 % of the cases, and the interval holds 0.
    assert "paired by scenario +62.5 points 95 %: \N{MINUS SIGN}2.3 to +90.5" in text
    assert text.endswith("; 6 gained, 1 lost of 8")


async def test_a_held_out_scenario_has_a_number_for_each_time_it_was_played(tab: Tab, run: RunFolder) -> None:
    """The bold number was the mean of before and after."""
    await opened(tab, run, "#conversations?stage=after")
    log = RunLog(run)
    rewards = {
        stage: {rollout.scenario: rollout.reward for rollout in log.rollouts(stage)}
        for stage in ("before", "after")
    }
    name = next(name for name, reward in rewards["after"].items() if reward != rewards["before"][name])
    entry = (
        "[...document.querySelectorAll('.units li')].find((one) => "
        f"one.querySelector('.scenario').textContent === {json.dumps(name)})"
    )
    shown = await tab.run(f"{entry}.querySelector('.mean').textContent")
    assert [float(part.replace("\N{MINUS SIGN}", "-")) for part in str(shown).split(" → ")] == [
        rewards["before"][name],
        rewards["after"][name],
    ]


async def test_rounding_is_shown_as_0(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(3, {**metrics(3), "reward/mean": 1.4e-17})
    write_report(folder.path)
    await opened(tab, folder)
    assert await tab.run("document.querySelector('#curves output').textContent") == (
        "0 [0.206, 0.406] at step 3"
    )
