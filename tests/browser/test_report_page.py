"""The report in a real browser: what it shows is what the run's files say. `make test-browser` runs this."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from charts_in_view import look_at_every_chart
from chromium import Tab
from live_pages import address_of
from report_runs import WORDS, finished_run, log_stage, log_step, metrics, numeric_run
from row_talks import TOKENIZER, RowTalk, agent, compacted_talk, forked_talk, thinking_talk, user

from stateset_agents.reporting.html import plotly_js
from stateset_agents.reporting.live import serve
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.trajectory import TrajectoryGroup

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

EVIL = "</script><script>document.title = 'hacked'</script><img src=x onerror=\"document.title = 'hacked'\">"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = finished_run(tmp_path_factory.mktemp("runs"), steps=24)
    write_report(folder.path)
    return folder


async def opened(tab: Tab, folder: RunFolder) -> None:
    await tab.open(folder.report.as_uri())
    await tab.until("!!document.querySelector('.units li')")
    await tab.run("document.querySelector('#conversations').scrollIntoView()")
    await tab.until("!!document.querySelector('.group article .transcript')")


async def choose(tab: Tab, **filters: str) -> str:
    """Set filters as a user does; what the page then says of how many fit."""
    for name, value in filters.items():
        await tab.run(
            f"(() => {{ const form = document.querySelector('form.filters');"
            f"form.elements[{json.dumps(name.replace('_', '-'))}].value = {json.dumps(value)};"
            "form.dispatchEvent(new Event('input')); })()"
        )
    return str(await tab.run("document.querySelector('#conversations [role=status]').textContent"))


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for _, record in read_lines(folder.rollouts)][1:]


def plot(title: str) -> str:
    """The chart with that title."""
    is_it = f"one.querySelector('strong').textContent === {title!r}"
    return f"[...document.querySelectorAll('figure')].find((one) => {is_it}).querySelector('.plot')"


def value(text: str) -> float:
    """A number as the page writes it."""
    return float(text.replace("\N{MINUS SIGN}", "-"))


async def scroll_through(tab: Tab) -> None:
    """Bring every chart into view once."""
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    await look_at_every_chart(tab)


async def test_every_chart_is_drawn_from_the_file_without_a_complaint_or_a_request(
    tab: Tab, run: RunFolder
) -> None:
    await opened(tab, run)
    await scroll_through(tab)
    assert await tab.run("document.querySelectorAll('.plot').length") == 12 + 1 + 1  # two more never change
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [run.report.as_uri()]


async def test_curves_have_the_values_of_metrics_jsonl(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await scroll_through(tab)
    shown = {"Reward": "reward/mean", "KL to the reference": "kl/reference", "told": "reward/told"}
    for title, metric in shown.items():
        lines = await tab.run(
            f"{plot(title)}.data.filter((line) => line.meta === 'values').map((line) => [line.x, line.y])"
        )
        logged = [metrics(step)[metric] for step in range(1, 25)]
        assert lines == [[list(range(1, 25)), pytest.approx(logged, rel=1e-6)]]


async def test_who_waited_for_whom_is_drawn_from_events_jsonl(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    tracker = JsonlTracker(folder)
    for step, clock in ((1, 100.0), (2, 110.0), (3, 120.0)):
        for what, after, group in (("group admitted", 0.0, step), ("group finished", 4.0, step)):
            tracker.log_event(what, step=step, monotonic=clock + after, group=group)
        tracker.log_event("update begun", step=step, monotonic=clock + 5)
        tracker.log_event("update ended", step=step, monotonic=clock + 7)
    tracker.close()
    write_report(folder.path)
    await opened(tab, folder)
    await scroll_through(tab)
    lines = await tab.run(f"{plot('Who waits for whom')}.data.map((line) => [line.name, line.y])")
    assert [name.partition(";")[0].partition(":")[0] for name, _ in lines] == [
        "conversations",
        "conversations and update",
        "update",
        "neither",
    ]
    assert [values for _, values in lines] == [[4, 4, 4], [0, 0, 0], [2, 2, 2], [1, 4, 4]]
    assert tab.complaints == []


async def test_a_step_s_timeline_has_the_spans_of_timeline_jsonl(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=5)
    with JsonlTracker(folder) as tracker:
        tracker.log_event("update begun", step=4, monotonic=99.0)
        tracker.log_event("update ended", step=4, monotonic=100.5)
        tracker.log_event("update begun", step=5, monotonic=102.6)
        tracker.log_event("update ended", step=5, monotonic=103.0)
    write_report(folder.path)
    await opened(tab, folder)
    lines = [line for _, line in read_lines(folder.timeline) if line.get("step") == 5]
    rows = "[...document.querySelectorAll('#timeline .row')]"
    assert await tab.run(f"{rows}.length") == 1 + len(lines)
    await tab.run(f"{rows}[0].focus()")
    said = "document.querySelector('#timeline output').textContent"
    updates = "updates of the weights: update of step 4 1.5 s, update of step 5 0.4 s"
    assert await tab.run(said) == updates
    legend = "document.querySelector('#timeline .legend').innerText"
    assert "update 0.9 s" in " ".join((await tab.run(legend)).split())  # the part of step 4's that is here
    for line in lines[:4]:
        await tab.press("ArrowDown")
        sums = dict.fromkeys(("model", "waiting", "environment", "reward", "idle"), 0.0)
        for what, seconds in line["spans"]:
            sums[what] += seconds
        told = dict(part.rsplit(" ", 2)[:2] for part in (await tab.run(said)).partition(": ")[2].split(", "))
        assert {what: value(number) for what, number in told.items()} == pytest.approx(sums, rel=5e-3)
    for what, seconds in line["spans"]:
        await tab.press("ArrowRight")
        place, length = (await tab.run(said)).rpartition(" · ")[2].rsplit(", ", 1)
        assert value(length.removesuffix(" s")) == pytest.approx(seconds, rel=5e-3)
        assert what in place
    await tab.run("document.querySelector('#timeline .heading .link').click()")
    assert await choose(tab) == "8 conversations in 2 groups"
    assert (
        await tab.run("document.querySelector('.group h3').textContent")
        == "order_status test-50 · training, step 5"
    )
    assert tab.complaints == []


async def test_what_else_an_evaluation_measured_stands_below_success(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=1)
    summary = json.loads(folder.summary.read_text())
    share = {"value": 0.25, "interval": [0.2, 0.3], "n": 150}
    summary["after"] |= {
        "tries": 4,
        "n": 2400,
        "pass_hat": {"4": share},
        "twins": share,
        "violations": {"any": share},
    }
    folder.write_summary({name: part for name, part in summary.items() if name != "schema_version"})
    write_report(folder.path)
    await opened(tab, folder)
    text = " ".join(str(await tab.run("document.querySelector('#measured').innerText")).split())
    assert (
        "Several tries, pass^4: 25.0% · Twins, both of a pair right: 25.0% · Rules broken, any: 25.0%" in text
    )
    assert "2400 tries, 4 of each held-out scenario" in text
    assert "All scenarios n = 600; then n = 2400, 4 tries each" in text
    await tab.run("document.querySelector('#measured summary').click()")
    text = " ".join(str(await tab.run("document.querySelector('#measured').innerText")).split())
    for row in ("pass^4", "both of a pair right", "any"):
        assert f"{row} n = 150 not measured 25.0% [20.0%, 30.0%]" in text


async def test_escape_clears_the_search(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    everything = await choose(tab)
    assert await choose(tab, text="k111") == "4 conversations in 1 group"
    await tab.run("document.querySelector('.units').focus()")
    await tab.press("Escape")
    assert await choose(tab) == everything
    await tab.press("/", "/")
    await choose(tab, text="nowhere")
    await tab.press("Escape")
    assert await choose(tab) == everything


async def test_a_step_beyond_the_axis_is_marked_and_said(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await scroll_through(tab)
    critic = plot("Value function")
    assert await tab.run(f"{critic}.layout.yaxis.range") == [-1, 1]
    words = await tab.run(f"{critic}.closest('figure').querySelector('figcaption').textContent")
    assert words.endswith("1 step beyond the axis")  # -14 at step 2
    marks = await tab.run(
        f"{critic}.data.filter((line) => line.mode === 'markers').map((line) => [line.x, line.y])"
    )
    assert marks == [[[2], [-1]]]


async def test_arrow_keys_read_a_curve(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    first = "document.querySelector('figure')"
    await tab.run(f"{first}.scrollIntoView()")
    await tab.until(f"!!{first}.querySelector('.main-svg')")
    await tab.run(f"{first}.querySelector('.plot').focus()")
    await tab.press("Home")
    await tab.press("ArrowRight")
    assert str(await tab.run(f"{first}.querySelector('output').textContent")).endswith("at step 2")


async def test_success_stands_on_the_page(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    text = " ".join(str(await tab.run("document.querySelector('#measured').innerText")).split())
    assert "before 22.0% 95 %: 19.0% to 25.0%, 600 held-out scenarios; greedy 44.0%" in text
    assert "cancel n = 150 22.0% [16.1%, 29.3%] 93.5%" in text


async def test_a_page_without_its_shared_script_says_what_is_missing(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=1)
    write_report(folder.path, shared_assets=True)
    script = tmp_path / f"plotly-{plotly_js()[1]}.min.js"
    script.unlink()
    await opened(tab, folder)
    await tab.run("document.querySelector('#curves').scrollIntoView()")
    said = "document.querySelector('#curves .note').textContent"
    assert f"needs ../{script.name}" in await tab.until(said, lambda text: "needs" in text)


async def test_filters_find_what_the_file_holds(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    lines = [one for one in records(run) if not one["branch_of"]]
    training = [one for one in lines if one["stage"] == "train"]

    def said(fitting: list[dict[str, Any]]) -> str:
        groups = {(one["stage"] == "train" and one["step"], one["scenario"]) for one in fitting}
        return f"{len(fitting)} conversations in {len(groups)} groups"

    assert await choose(tab) == said(lines)
    assert await choose(tab, stage="train") == said(training)
    assert await choose(tab, step_from="3", step_to="5") == said(
        [one for one in training if 3 <= one["step"] <= 5]
    )
    wins = [one for one in training if 3 <= one["step"] <= 5 and one["success"]]
    assert await choose(tab, outcome="succeeded") == said(wins)
    assert await choose(tab, reward_from="0.95") == "No conversation fits: widen the filters."
    await tab.run("document.querySelector('form.filters').reset()")
    await tab.until(
        "document.querySelector('#conversations [role=status]').textContent", lambda text: text == said(lines)
    )
    assert await choose(tab, family="refund") == said([one for one in lines if one["family"] == "refund"])
    about = [one for one in lines if one["family"] == "refund" and "K111" in json.dumps(one["messages"])]
    assert len(about) == 4
    assert await choose(tab, text="k111") == "4 conversations in 1 group"


async def test_gains_are_one_click_away_and_stand_side_by_side(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await tab.run("document.querySelector('#conversations .link').click()")
    assert await choose(tab) == "12 conversations in 6 groups"
    cards = await tab.run(
        "[...document.querySelectorAll('.members article')].map((one) => one.getAttribute('aria-label'))"
    )
    assert cards == ["before, failed, reward 0.15", "after, succeeded, reward 0.9"]
    changes = await tab.until("document.querySelector('.changes')?.innerText")
    assert " ".join(changes.split()) == "What the environment changed orders K27 changed city Rome → Oslo"


async def test_each_token_tells_what_the_file_says_of_it(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await choose(tab, stage="train", step_from="7", step_to="7")
    await tab.press("t", "t")
    await tab.until("document.querySelectorAll('.members article .t').length", lambda count: count >= 4 * 6)
    lines = [one for one in records(run) if one["step"] == 7 and one["stage"] == "train"][:5]
    lines = sorted((one for one in lines if not one["branch_of"]), key=lambda one: -one["reward"])
    fact = (
        "Object.fromEntries([...document.querySelectorAll('.inspector dd')]"
        ".map((one) => [one.dataset.fact, one.textContent]))"
    )
    for member, line in enumerate(lines[:3]):
        chips = f"document.querySelectorAll('.members article')[{member}].querySelectorAll('.t')"
        await tab.until(f"{chips}.length", lambda count: count == 6)
        sampled = 0
        for place, id in enumerate(line["token_ids"]):
            await tab.run(f"{chips}[{place}].focus()")
            shown = await tab.run(fact)
            assert (json.loads(shown["token"]), shown["id"], shown["position"]) == (
                WORDS[id],
                str(id),
                str(place),
            )
            if not line["mask"][place]:
                assert shown["mask"] == "0, environment"
                assert "log-prob" not in shown
                continue
            assert shown["mask"] == "1, sampled by the agent"
            assert value(shown["log-prob"]) == line["logprobs"][place]
            assert value(shown["advantage"]) == line["advantages"][sampled]
            assert shown["policy version"] == str(line["versions"][place])
            sampled += 1


async def test_each_turn_tells_its_reward_and_the_terms_that_the_file_has(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    line = next(one for one in records(run) if one["stage"] == "train" and one["step"] == 7)
    await choose(tab, stage="train", step_from="7", step_to="7")
    first = "document.querySelector('.members article')"
    said = f"[...{first}.querySelectorAll('.turn')].map((one) => one.innerText)"
    for mode in ("transcript", "tokens"):
        for turn, text in zip(line["turns"], await tab.until(said), strict=True):
            assert f"reward {turn['reward']}".replace("-", "\N{MINUS SIGN}") in text, mode
            terms = [
                part.rsplit(" ", 1) for part in text.partition("(")[2].partition(")")[0].split(", ") if part
            ]
            assert {name: value(number) for name, number in terms} == turn["breakdown"]
        await tab.press("t", "t")
    assert line["turns"][1]["breakdown"] == {"replies": -0.01, "repeats": -0.03}


async def test_branches_are_shown_when_asked_for(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await choose(tab, stage="train")
    labels = "[...document.querySelectorAll('.members article h4')].map((one) => one.textContent)"
    members = [f"member {n}" for n in (1, 0, 2, 3)]  # the one that succeeded is first
    assert await tab.run(labels) == members
    await tab.run("document.querySelector('.check input').click()")
    assert await tab.run(labels) == [*members, "branch of 0, turn 2"]
    await tab.press("j", "j")
    assert await tab.run(labels) == [*members, "branch of 0, turn 2"]


async def test_a_token_s_facts_come_by_pointer_and_by_arrow_keys(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await tab.press("t", "t")
    await tab.until("!!document.querySelector('.t[tabindex=\"0\"]')")
    await tab.run("document.querySelector('.t[tabindex=\"0\"]').scrollIntoView({block: 'center'})")
    place = "document.querySelector('.inspector [data-fact=position]')?.textContent"
    box = await tab.run(
        "(({x, y, width, height}) => [x + width / 2, y + height / 2])"
        "(document.querySelector('.t').getBoundingClientRect())"
    )
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    assert await tab.until(place, lambda at: at == "0")
    await tab.run("document.querySelector('.t[tabindex=\"0\"]').focus()")
    assert await tab.run(place) == "2"  # the first that the agent sampled
    for key, at in [("ArrowRight", "3"), ("ArrowDown", "5"), ("ArrowUp", "3"), ("Home", "0"), ("End", "5")]:
        await tab.press(key)
        assert await tab.run(place) == at


async def test_the_list_is_walked_by_keys_and_grows_as_it_is_read(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=60)
    write_report(folder.path)
    await opened(tab, folder)
    count = "document.querySelectorAll('.units li').length"
    assert await tab.run(count) < 8 + 120
    chosen = "document.querySelector('.units [aria-selected=true] .scenario').textContent"
    assert await tab.run(chosen) == "test-0"
    await tab.press("j", "j")
    assert await tab.run(chosen) == "test-1"
    await tab.run("document.querySelector('.units').focus()")
    await tab.press("End")
    assert await tab.run(chosen) == "test-601"
    assert await tab.run(count) == 8 + 120


def run_of_rows(root: Path, *talks: RowTalk) -> RunFolder:
    folder = RunFolder.create(root)
    members = tuple(talk.trajectory(member=place) for place, talk in enumerate(talks))
    with JsonlTracker(folder, TOKENIZER.piece) as tracker:
        tracker.log_rollouts(1, [TrajectoryGroup(key="1/rows", trajectories=members)])
        tracker.log_metrics(1, metrics(1) | {"rollout/rows": 2.0, "rollout/rows_max": 2.0})
    write_report(folder.path)
    return folder


async def test_rows_thoughts_and_what_is_no_longer_seen_are_shown(tab: Tab, tmp_path: Path) -> None:
    folder = run_of_rows(tmp_path, thinking_talk(), compacted_talk(), forked_talk())
    await opened(tab, folder)
    cards = "[...document.querySelectorAll('.members article')]"
    await tab.until(f"{cards}.every((one) => one.querySelector('.transcript'))")
    assert (
        await tab.run(f"{cards}.map((one) => one.querySelector('.verdict').textContent)")
        == ["succeeded reward 1 · 2 rows"] * 3
    )
    begins = f"{cards}.map((one) => [...one.querySelectorAll('.row-begin')].map((line) => line.textContent))"
    rows = [
        ["new row: the agent no longer sees the thoughts of turns 1 and 2"],
        [
            "new row: the agent no longer sees the thought of turn 3 and 2 messages; its summary stands "
            "for them"
        ],
        [
            "new row: the agent no longer sees 3 messages",
            "goes on from turn 1: the agent no longer sees 1 message",
        ],
    ]
    assert await tab.run(begins) == rows
    grey = f"{cards}.map((one) => [...one.querySelectorAll('.gone')].map((line) => line.textContent))"
    thinking, compacted, forked = await tab.run(grey)
    assert [text.partition(" from turn ")[0] for text in thinking] == ["agent thinks · dropped"] * 2
    assert [text.partition(" from turn 4 on")[0] for text in compacted] == [
        *("agent thinks · summarized", "agent · summarized", "user · summarized", "agent thinks · dropped")
    ]
    assert forked == ["agent · in another row from turn 3 onMild and dry."]
    thought = "document.querySelector('.thought details')"
    assert not await tab.run(f"{thought}.open")
    await tab.run(f"{thought}.querySelector('summary').click()")
    assert await tab.run(f"{thought}.querySelector('p').innerText") == "I do not know yet: look it up first."
    assert await choose(tab, text="greet her by name") == "1 conversation in 1 group"
    await choose(tab, text="")
    await tab.press("t", "t")
    await tab.until(f"{cards}.every((one) => one.querySelector('.t'))")
    assert await tab.run(begins) == rows
    assert tab.complaints == []


async def test_a_token_of_a_later_row_tells_its_place_in_that_row(tab: Tab, tmp_path: Path) -> None:
    folder = run_of_rows(tmp_path, forked_talk())
    await opened(tab, folder)
    await tab.press("t", "t")
    await tab.until("document.querySelectorAll('.t').length")
    place = "document.querySelector('.inspector [data-fact=\"position in its row\"]').textContent"
    turns = records(folder)[0]["turns"]
    before = [turn["prompt_tokens"] + turn["sampled_tokens"] for turn in turns]
    for recorded, in_row in ((before[0], 0), (before[0] + before[1] + 2, before[0] + 2)):
        await tab.run(f"document.querySelectorAll('.t')[{recorded}].focus()")
        assert await tab.run(place) == str(in_row)


async def test_a_step_tells_its_rows(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(2, {"rollout/rows": 1.5, "rollout/rows_max": 3.0})
    write_report(folder.path)
    await opened(tab, folder)
    said = "document.querySelector('#timeline .tools .note').textContent"
    assert str(await tab.run(said)).endswith("; 1.5 training rows a conversation, 3 at most")
    await scroll_through(tab)
    assert await tab.run(f"{plot('Rows')}.data.filter((line) => line.meta).map((line) => line.y)") == [
        [1.5],
        [3],
    ]


async def test_text_of_users_tools_and_tokens_stays_text(tab: Tab, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, name="evil")
    with JsonlTracker(folder, lambda id: EVIL) as tracker:
        log_stage(tracker, 0, "before", wins={0}, reply=EVIL)
        log_step(tracker, 1, reply=EVIL)
        thinking = RowTalk(user(EVIL)).says(agent(EVIL, EVIL), user(EVIL))
        thinking.says(agent(EVIL, EVIL), shown=(user(EVIL),), follows=None)
        tracker.log_rollouts(2, [TrajectoryGroup(key="2/evil", trajectories=(thinking.trajectory(),))])
        tracker.log_metrics(2, {f"x/{EVIL}": 1.0, f"reward/{EVIL}": 1.0, f"success/{EVIL}": 1.0})
    folder.write_config({EVIL: EVIL})
    folder.write_summary({"why": EVIL, "steps": 2, "num_steps": 3, "platform": EVIL})
    write_report(folder.path)
    await opened(tab, folder)
    await scroll_through(tab)
    assert EVIL in await tab.run("document.querySelector('.members').textContent")
    await tab.run("document.querySelector('.members').scrollIntoView()")
    await choose(tab, step_from="2")
    await tab.until("document.querySelector('.thought p')?.textContent", lambda text: text == EVIL)
    await choose(tab, step_from="")
    await tab.press("t", "t")
    await tab.until("document.querySelector('.members .t')?.textContent", lambda text: text == EVIL)
    assert EVIL in await tab.run("document.querySelector('#settings').textContent")
    assert await tab.run("document.title") == "0001-evil · run report"
    assert await tab.run("document.querySelectorAll('main img, main script').length") == 0
    assert tab.complaints == []


async def test_a_group_that_is_being_read_stays_when_others_take_its_place(tab: Tab, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    read = "document.querySelector('.group h3 .n').textContent"
    held = "[...document.querySelectorAll('.units .scenario')].map((one) => one.textContent)"
    with JsonlTracker(folder, WORDS.__getitem__) as tracker:
        log_step(tracker, 1)
        async with address_of(serve, RunLog(folder), conversations=10) as address:  # room for two groups
            await tab.open(address)
            await tab.until(held, lambda names: names == ["test-10", "test-11"])
            await tab.press("j", "j")
            assert await tab.run(read) == "test-11 · training, step 1"
            log_step(tracker, 2)
            await tab.until(held, lambda names: names == ["test-10", "test-20"])
            assert await tab.run(read) == "test-11 · training, step 1"
            await tab.press("j", "j")
            assert await tab.run(read) == "test-10 · training, step 1"


async def test_a_live_page_follows_the_run_and_leaves_the_reader_in_peace(tab: Tab, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    state = "document.querySelector('#live').textContent"
    async with address_of(serve, RunLog(folder)) as address:
        with JsonlTracker(folder, WORDS.__getitem__) as tracker:
            await tab.open(address)
            await tab.until(
                "document.querySelector('#conversations').textContent.includes('No conversation')"
            )
            log_step(tracker, 1)
            await tab.until("document.querySelectorAll('.units li').length", lambda count: count == 2)
            await choose(tab, text="k11")
            await tab.run("document.querySelector('form.filters').elements.text.focus()")
            await tab.run("document.querySelector('.members').dataset.mine = 'yes'")
            await tab.run("document.querySelector('#curves').scrollIntoView()")
            steps = "document.querySelector('figure .plot')?.data?.find((line) => line.meta)?.x"
            await tab.until(steps, lambda found: found == [1])
            shown = "document.querySelector('#timeline select').value"
            await tab.until(shown, lambda step: step == "1")
            log_step(tracker, 2)
            await tab.until(steps, lambda found: found == [1, 2])
            await tab.until("document.querySelector('#conversations .note').textContent.includes('All 20')")
            assert await tab.run(shown) == "2"
            assert await choose(tab) == "4 conversations in 1 group"  # what was typed still holds
            assert await tab.run("document.activeElement.name") == "text"
            assert await tab.run("document.querySelector('.members').dataset.mine") == "yes"
        folder.write_summary({"steps": 2, "ended": "finished"})
        await tab.until(state, lambda text: text == "finished")
        assert tab.complaints == []
    await tab.until(state, lambda text: text == "connection lost")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
async def test_the_page_fits_and_follows_the_colour_scheme(
    tab: Tab, run: RunFolder, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    await tab.look(width, height, scheme)
    await opened(tab, run)
    await scroll_through(tab)
    await tab.press("t", "t")
    assert await tab.run("document.documentElement.scrollWidth") <= width
    bright = await tab.run(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
        ".reduce((sum, value) => sum + Number(value), 0)"
    )
    assert bright > 600 if scheme == "light" else bright < 200
    ink = await tab.run("document.querySelector('.plot').layout.font.color")
    assert ink == ("#1c1f23" if scheme == "light" else "#e6e9ec")
    for part in ("measured", "curves", "conversations"):
        await tab.run(f"document.querySelector('#{part}').scrollIntoView()")
        await asyncio.to_thread(
            (tmp_path / f"{part}-{width}-{scheme}.png").write_bytes, await tab.screenshot()
        )


async def test_charts_take_the_other_colours_when_the_scheme_changes(tab: Tab, run: RunFolder) -> None:
    await opened(tab, run)
    await tab.run("document.querySelector('#curves').scrollIntoView()")
    ink = "document.querySelector('.plot').layout?.font.color"
    await tab.until(ink, lambda colour: colour == "#1c1f23")
    await tab.look(1280, 900, "dark")
    await tab.until(ink, lambda colour: colour == "#e6e9ec")


async def test_a_page_with_shared_assets_finds_them_beside_its_run(tab: Tab, tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    write_report(folder.path, shared_assets=True)
    await opened(tab, folder)
    await scroll_through(tab)
    assert tab.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
async def test_a_numeric_run_has_its_charts_tables_and_windows(
    tab: Tab, tmp_path: Path, width: int, scheme: str
) -> None:
    folder = numeric_run(tmp_path)
    write_report(folder.path)
    await tab.look(width, 900, scheme)
    await tab.open(folder.report.as_uri())
    await tab.until("!!document.querySelector('#windows .plot')")
    await scroll_through(tab)
    assert await tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert await tab.run("document.querySelectorAll('#conversations, #timeline').length") == 0
    table = "[...document.querySelectorAll('.players tbody tr')].map((row) => row.innerText)"
    assert [row.split("\t")[0].strip() for row in await tab.run(table)] == [
        "policy before",
        "policy after",
        "hpa",
    ]
    parts = await tab.run(f"{plot('Parts of the reward')}.data.map((line) => [line.type, line.y.at(-1)])")
    assert parts == [["bar", -24], ["bar", 144]]
    shown = f"{plot('Replicas')}.data.map((line) => [line.name, line.y])"
    assert await tab.run(shown) == [
        ["load", [1, 2, 3]],
        ["policy: ready", [1, 2, 3]],
        ["hpa: ready", [1, 2, 4]],
    ]
    await tab.run(
        "(() => { const choice = document.querySelector('#windows select'); choice.value = '2';"
        "choice.dispatchEvent(new Event('change')); })()"
    )
    await tab.run("document.querySelector('#windows .plot').scrollIntoView()")
    await tab.until(f"{plot('Replicas')}.data?.[1].y[0] === 2")
    assert await tab.run("document.querySelector('#windows .tools').innerText.includes('policy 0.75')")
    assert tab.complaints == []
