"""The pages of numeric runs and of studies: what a finished run recorded, the mix first, numbers in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab
from study_folders import comparison, grid, write_study

from stateset_agents.cli.pages import write_pages
from stateset_agents.numeric.environments.classic import BatchedCartPole
from stateset_agents.numeric.environments.suites import mix
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.studies.partitioned import GRPO
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.tracking.run_log import RunLog

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

SMALL = {
    "progress": False,
    "num_groups": 6,
    "max_episode_steps": 20,
    "minibatch_size": 64,
    "num_iterations": 1,
    "save_steps": 0,
}


async def trained(folder: Path) -> dict[str, RunLog]:
    """By task with two scales, by return, one update, and a trainer that knows no parts."""
    several = mix({"cart_pole": 1.0, "acrobot": 0.01})
    runs = {}
    for name, grpo in {
        "task": GRPO(
            "task", 4, "performance", environment=several, total_steps=500, **SMALL, output_dir=str(folder)
        ),
        "difficulty": GRPO(
            "difficulty", environment=BatchedCartPole(), total_steps=300, **SMALL, output_dir=str(folder)
        ),
        "one update": GRPO("task", environment=several, total_steps=1, **SMALL, output_dir=str(folder)),
    }.items():
        async with grpo:
            await grpo.train()
        runs[name] = RunLog(grpo.trainer.run)
    environment = BatchedCartPole()
    config = ControlConfig(total_steps=300, group_size=2, **SMALL, output_dir=str(folder))
    async with ControlTrainer(MlpPolicy(environment.spec), environment, config) as trainer:
        await trainer.train()
    return {**runs, "plain": RunLog(trainer.run)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunLog]:
    logs = asyncio.run(trained(tmp_path_factory.mktemp("runs")))
    for log in logs.values():
        assert [path.name for path in write_pages(log.folder.path)] == ["parts.html"]
    return logs


async def opened(tab: Tab, path: Path) -> None:
    await tab.open("about:blank")
    await tab.open(path.as_uri())
    await tab.until("'ready' in document.documentElement.dataset")


async def shown(tab: Tab, name: str) -> float:
    return float(await tab.run(f"document.querySelector('[data-number=\"{name}\"]').dataset.value"))


def page(log: RunLog) -> Path:
    return log.folder.path / "learn" / "parts.html"


async def rows(tab: Tab, figure: str) -> list[list[str]]:
    """The values of a figure, as its table has them."""
    details = f"document.querySelector('[data-figure={figure}]').closest('figure').querySelector('details')"
    await tab.run(f"{details}.open = true")
    await tab.until(f"{details}.querySelectorAll('tbody tr').length > 0")
    cells: list[list[str]] = await tab.run(
        f"[...{details}.querySelectorAll('tbody tr')].map("
        "(row) => [...row.cells].map((cell) => cell.innerText))"
    )
    return cells


async def test_the_page_of_a_finished_run_has_what_the_run_recorded(
    tab: Tab, runs: dict[str, RunLog]
) -> None:
    await opened(tab, page(runs["task"]))
    lines = [line.values for line in runs["task"].metrics()]
    assert len(lines) >= 3
    for at in (len(lines) - 1, 0):  # it opens on the last update
        if at == 0:
            await tab.run(
                "(() => { const own = document.querySelector('[name=update]'); own.value = 0;"
                "own.dispatchEvent(new Event('input', {bubbles: true})); })()"
            )
        for k, part in enumerate(("cart_pole", "acrobot")):
            metrics: dict[str, Any] = {
                "size": "size",
                "weight": "weight",
                "raw-mean": "raw_mean",
                "raw-std": "raw_std",
                "mean": "mean",
                "std": "std",
            }
            for name, metric in metrics.items():
                assert await shown(tab, f"{name}-{k}") == pytest.approx(lines[at][f"part_{metric}/{part}"])
            assert await shown(tab, f"share-{k}") == pytest.approx(100 * lines[at][f"part_share/{part}"])
    flips = [values["partition/sign_flips"] for values in lines]
    assert await shown(tab, "flips-mean") == pytest.approx(100 * sum(flips) / len(flips))
    assert await shown(tab, "flips-last") == 0  # by task
    sizes = await rows(tab, "sizes")
    assert [float(sizes[-1][1]), float(sizes[-1][2])] == [
        lines[-1]["part_size/cart_pole"],
        lines[-1]["part_size/acrobot"],
    ]
    assert tab.complaints == []


async def test_parts_by_an_outcome_carry_their_warning(tab: Tab, runs: dict[str, RunLog]) -> None:
    await opened(tab, page(runs["difficulty"]))
    text = await tab.run("document.querySelector('.warning').innerText")
    assert "good members of the best part" in text
    last = [line.values for line in runs["difficulty"].metrics()][-1]
    assert await shown(tab, "flips-last") == pytest.approx(100 * last["partition/sign_flips"])


async def test_a_run_without_parts_says_so(tab: Tab, runs: dict[str, RunLog]) -> None:
    await opened(tab, page(runs["plain"]))
    last = [line.values for line in runs["plain"].metrics()][-1]
    assert await shown(tab, "raw-std") == pytest.approx(last["credit/std"])
    assert await shown(tab, "last-0") == pytest.approx(last["reward/mean"])
    assert "This run divided nothing" in await tab.run("document.body.innerText")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
@pytest.mark.parametrize("name", ["task", "difficulty", "one update", "plain"])
async def test_the_page_overflows_nowhere_and_holds_no_broken_number(
    tab: Tab, runs: dict[str, RunLog], name: str, width: int, height: int, scheme: str
) -> None:
    await tab.look(width, height, scheme)
    await opened(tab, page(runs[name]))
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert await tab.run("document.documentElement.scrollWidth") <= width
    drawn = "[...document.querySelectorAll('svg *')].flatMap((one) => [...one.attributes])"
    everything = await tab.run(f"document.body.innerText + {drawn}.map((own) => own.value).join(' ')")
    assert not [word for word in ("NaN", "undefined", "Infinity") if word in everything]
    marks = await tab.run(
        "[...document.querySelectorAll('svg.drawn')].map("
        "(own) => own.querySelectorAll('path, circle').length)"
    )
    assert min(marks) > 3
    assert tab.complaints == []


def learning_rates(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The grid's second setting as a study file has it that was written by hand."""
    texts = ("1e-3", "2e-3", "4e-3", "5e-4")
    names = sorted({own["settings"]["learning_rate"] for own in cells}, key=str)
    for own in cells:
        rate = texts[names.index(own["settings"]["learning_rate"]) % len(texts)]
        own["settings"] = {**own["settings"], "learning_rate": rate}
    return cells


async def test_rates_written_as_text_are_ordered_as_numbers(tab: Tab, tmp_path: Path) -> None:
    path = write_pages(write_study(tmp_path, learning_rates(grid())))[2]
    await opened(tab, path)
    texts = await tab.run(
        "[...document.querySelectorAll('[data-figure=grid] text')].map((own) => own.textContent)"
    )
    numbers = [float(text) for text in texts if text.startswith("0.00")]
    assert len(numbers) > 1
    assert numbers == sorted(numbers)
    surface = await tab.run(
        "[...document.querySelectorAll('[data-figure=surface] text')].map((own) => own.textContent)"
    )
    assert [float(text) for text in surface if text.startswith("0.00")] == numbers


async def test_tasks_open_on_a_suite_of_several(tab: Tab, tmp_path: Path) -> None:
    cells = comparison()
    alone = [own for own in cells if len(own["tasks"]) == 1]
    several = [own for own in cells if len(own["tasks"]) > 1]
    assert alone
    path = write_pages(write_study(tmp_path, [*alone, *several]))[1]
    await opened(tab, path)
    suite = await tab.run("document.querySelector('[name=suite]').value")
    assert suite in {own["suite"] for own in several}
