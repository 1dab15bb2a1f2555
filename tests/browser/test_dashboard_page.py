"""The page of runs and deployments in a real browser. `make test-browser` runs this."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest
from axe import faults
from charts_in_view import look_at_every_chart
from chromium import Tab
from deployment_journals import SimulatedDeployment
from live_pages import address_of
from report_runs import finished_run

from stateset_agents.deployment.views.dashboard_data import Deployments
from stateset_agents.deployment.views.dashboard_live import serve_dashboard
from stateset_agents.deployment.views.dashboard_page import write_dashboard
from stateset_agents.reporting.report import write_report

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

CHARTS = 6
"""Three of each deployment; the runs have their own."""


@dataclass(frozen=True)
class Shown:
    """Two deployments and a run, written into a page."""

    page: Path
    rolled_back: SimulatedDeployment
    gradual: SimulatedDeployment


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    root = tmp_path_factory.mktemp("served")
    journal, saved = root / "d.sqlite", root / "talks.jsonl"
    write_report(finished_run(root / "runs", steps=12).path)
    rolled_back = SimulatedDeployment(journal, candidate="runs/<b>bold</b>", outcome_timeout=3000)
    rolled_back.talk(700, candidate=0.55)
    gradual = SimulatedDeployment(
        journal, candidate="runs/0008", start=rolled_back.now + 9, seed=1, outcome_timeout=3000
    )
    gradual.talk(500, saved=saved)
    page = write_dashboard(root / "runs", Deployments(journal, conversations=saved), root / "page.html")
    return Shown(page=page, rolled_back=rolled_back, gradual=gradual)


async def drawn(tab: Tab) -> None:
    await tab.until(f"document.querySelectorAll('.deployment .plot').length >= {CHARTS}")
    await look_at_every_chart(tab)


def cells(deployment: str, part: str) -> str:
    """A script: the texts of a table, row by row."""
    rows = f"document.querySelectorAll('#deployment-{deployment} [data-part={part}] tbody tr')"
    return f"[...{rows}].map((row) => [...row.cells].map((cell) => cell.textContent))"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
async def test_it_fits_without_a_complaint_a_request_or_a_fault_for_axe(
    tab: Tab, shown: Shown, width: int, height: int, scheme: str
) -> None:
    await tab.look(width, height, scheme)
    await tab.open(shown.page.as_uri())
    await drawn(tab)
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert await tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [shown.page.as_uri()]
    assert await faults(tab) == []


async def test_the_numbers_are_the_journal_s(tab: Tab, shown: Shown) -> None:
    await tab.open(shown.page.as_uri())
    await drawn(tab)
    for deployment in (shown.rolled_back, shown.gradual):
        status = deployment.controller.status()
        id = status["id"]
        facts = await tab.run(f"document.querySelector('#deployment-{id} .facts').textContent")
        found = status["agreement"]
        same = [100 * found[f"same_{what}"] / found["answers"] for what in ("calls", "reply")]
        assert (
            f"in shadow{same[0]:.1f}% of {found['answers']} answers did the same as the baseline's, "
            f"{same[1]:.1f}% said the same"
        ) in facts
        arms = {row[0]: row[1:] for row in await tab.run(cells(id, "arms"))}
        of = [status["arms"][arm] for arm in ("candidate", "baseline")]
        assert arms["conversations"] == [f"{arm['conversations']:,}" for arm in of]
        assert arms["outcomes compared"] == [f"{arm['outcomes']:,}" for arm in of]
        assert arms["success"] == [f"{100 * arm['success']:.1f}%" for arm in of]
        assert [text.split()[0] for text in arms["unsafe answers"]] == [
            f"{arm['unsafe_answers']:,}" for arm in of
        ]
        guards = {row[0]: row[2] for row in await tab.run(cells(id, "guards"))}
        answers = status["arms"]["candidate"]["answers"]
        for guard in ("failure", "latency", "cost"):
            assert guards[guard] == f"{status['violations'].get(guard, 0)} of {answers}"
        journal = await tab.run(cells(id, "journal"))
        assert [row[1:6] for row in journal[:-1]] == [
            [
                move.mode.replace("_", " "),
                f"{100 * move.share:g}%",
                move.who,
                move.why,
                f"{move.evidence['outcomes']:,}",
            ]
            for move in reversed(deployment.controller.moves())
        ]


async def test_the_curves_are_the_evidence_against_what_decides(tab: Tab, shown: Shown) -> None:
    await tab.open(shown.page.as_uri())
    await drawn(tab)
    controller = shown.rolled_back.controller
    plot = "document.querySelector('#deployment-0001 [data-key={}]')"
    lines = await tab.run(f"{plot.format('wealth')}.data.map((one) => [one.name, one.text, one.x, one.y])")
    by_name = {name: (x, y) for name, _, x, y in lines if name}
    evidence = controller.ledger.evidence
    assert by_name["to roll back"][0][-1] == evidence.num_outcomes
    assert by_name["to roll back"][1][-1] == pytest.approx(evidence.roll_back.wealth, rel=1e-12)
    assert by_name["to promote"][1][-1] == pytest.approx(evidence.promote.wealth, rel=1e-12)
    limits = {text[0]: y[0] for _, text, _, y in lines if text}
    assert limits == {"promote at 20": 20, "roll back at 25": 25}
    assert await tab.run(f"{plot.format('wealth')}.layout.yaxis.type") == "log"
    effect = plot.format("effect").replace("0001", "0002")
    low, high, mean, margin = await tab.run(f"{effect}.data.map((one) => one.y.at(-1))")
    newest = shown.gradual.controller.ledger.evidence
    assert (mean, [low, high]) == (newest.effect.estimate, list(newest.interval(0.05) or ()))
    assert margin == -newest.margin
    steps = await tab.run(f"{plot.format('share')}.data[0].y")
    assert steps == [0, 0.25, 0, 0]
    assert await tab.run(f"{plot.format('share')}.data[0].line.shape") == "hv"
    assert await tab.run("document.querySelectorAll('#deployment-0001 .facts dd')[2].textContent") == (
        "runs/<b>bold</b>"  # a text, never markup
    )


async def test_outcomes_are_whole_on_their_axis(tab: Tab, shown: Shown) -> None:
    await tab.open(shown.page.as_uri())
    await drawn(tab)
    plot = "document.querySelector('#deployment-0001 [data-key=wealth]')"
    await tab.run(f"Plotly.relayout({plot}, {{ 'xaxis.range': [108.1, 110.2] }}).then(() => 0)")
    ticks = f"[...{plot}.querySelectorAll('.xtick')].map((tick) => tick.textContent)"
    assert await tab.until(ticks, lambda texts: len(texts) < 4) == ["109", "110"]


async def test_words_are_shown_without_personal_text_and_a_run_leads_to_its_page(
    tab: Tab, shown: Shown
) -> None:
    await tab.open(shown.page.as_uri())
    await drawn(tab)
    await tab.run("document.querySelector('#deployment-0002 .entries summary').click()")
    said = await tab.run("document.querySelector('#deployment-0002 .talk').innerText")
    assert "My mail is [mail 1]." in str(said)
    assert "example.org" not in str(await tab.run("document.body.textContent"))
    await tab.run("document.querySelector('#runs a').click()")
    await tab.until("location.pathname", lambda path: str(path).endswith("runs/0001-demo/report.html"))


async def test_a_live_page_follows_the_journal_and_keeps_what_is_open(tab: Tab, tmp_path: Path) -> None:
    saved = tmp_path / "talks.jsonl"
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(120, saved=saved)
    (tmp_path / "runs").mkdir()
    deployments = Deployments(deployment.path, conversations=saved)
    async with address_of(serve_dashboard, tmp_path / "runs", deployments) as address:
        await tab.open(address)
        await tab.until("document.querySelectorAll('.deployment .plot').length == 3")
        first = "document.querySelector('[data-part=conversations] .entries summary')"
        await tab.run(f"{first}.focus(), {first}.click()")
        key = await tab.run(f"{first}.parentElement.dataset.key")
        deployment.talk(3, saved=saved)
        conversations = cells("0001", "arms")
        status = deployment.controller.status()
        await tab.until(
            conversations,
            lambda rows: (
                rows[0][1:]
                == [f"{status['arms'][arm]['conversations']}" for arm in ("candidate", "baseline")]
            ),
        )
        opened = f"document.querySelector('details[data-key=\"{key}\"]')?.open"
        assert await tab.run(opened)
        await tab.run("document.querySelector('[data-key=wealth]').scrollIntoView()")
        await tab.until("document.querySelector('[data-key=wealth] .main-svg') !== null")
        deployment.talk(60, saved=saved)
        evidence = deployment.controller.ledger.evidence
        last = "document.querySelector('[data-key=wealth]').data.map((one) => one.y.at(-1))"
        await tab.until(last, lambda ends: ends[1] == pytest.approx(evidence.roll_back.wealth, rel=1e-12))
        deployment.controller.roll_back(who="bob", why="a complaint")
        await tab.until(
            "document.querySelector('.facts .mode').textContent", lambda mode: mode == "rolled back"
        )
        SimulatedDeployment(deployment.path, candidate="runs/0009", start=deployment.now + 1)
        await tab.until(
            "document.querySelector('.deployment')?.id", lambda id: id == "deployment-0002"
        )  # the newest
        finished_run(tmp_path / "runs", steps=3)
        await tab.until("document.querySelectorAll('#runs tbody tr').length == 1")
        assert tab.complaints == []
        rows = sqlite3.connect(deployment.path)
        rows.executescript("DROP TABLE outcomes")
        await tab.until("document.getElementById('live').textContent", lambda text: "cannot be used" in text)
