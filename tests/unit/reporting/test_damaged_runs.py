"""A run with a damaged file: readers of many show the others and name it, readers of it alone say a line."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import the_line
from live_pages import served
from report_runs import finished_run, numeric_run, page_data

from stateset_agents.cli.main import main
from stateset_agents.deployment.views.dashboard_live import serve_dashboard
from stateset_agents.evaluation.comparison import recorded_evaluation
from stateset_agents.reporting.live import serve_overview
from stateset_agents.reporting.overview import overview_data
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog

Damage = Callable[[Path], object]


def _last(change: Callable[[bytes], bytes]) -> Damage:
    """Changes the last line of a JSONL file, or all of another file."""

    def damage(file: Path) -> None:
        lines = file.read_bytes().splitlines() if file.suffix == ".jsonl" else [file.read_bytes()]
        file.write_bytes(b"\n".join([*lines[:-1], change(lines[-1])]) + b"\n")

    return damage


def _a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Damage] = {
    "half of it": _last(lambda text: text[: len(text) // 2] + b"\n{"),
    "zeros": _last(lambda text: bytes(len(text))),
    "NUL within": _last(lambda text: text[:-4] + b"\0" + text[-3:]),
    "very deep": _last(lambda text: b"[" * 100_000),
    "deep and closed": _last(lambda text: b'{"step": ' + b"[" * 960 + b"]" * 960 + b"}"),
    "not UTF-8": _last(lambda text: text.replace(b":", b": \xff", 1)),
    "a huge number": _last(lambda text: b'{"schema_version": 1, "step": ' + b"7" * 5000 + b"}"),
    "an infinite number": _last(lambda text: b'{"schema_version": 1, "step": 1e999, "time": 1}'),
    "another shape": _last(lambda text: b"[1, 2]"),
    "no fields": _last(lambda text: b"{}"),
    "fields of another shape": _last(
        lambda text: b'{"schema_version": 1, "step": "3", "before": 5, "after": [1], "training": [], "x": 1}'
    ),
    "a folder": _a_folder,
}
READ = {
    "report": ("config.yaml", "summary.json", "metrics.jsonl", "rollouts.jsonl", "timeline.jsonl"),
    "diagnose": ("config.yaml", "summary.json", "metrics.jsonl"),
    "learn": ("config.yaml", "rollouts.jsonl"),
    "compare": ("config.yaml", "summary.json", "rollouts.jsonl"),
    "rescore": ("config.yaml",),
    "evaluate": ("config.yaml",),
}
"""By verb: files without which it has nothing right to say."""
HARMLESS = {
    ("an infinite number", "config.yaml"),  # a name that is not read
    ("fields of another shape", "config.yaml"),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = finished_run(tmp_path_factory.mktemp("template"), steps=2)
    log = RunLog(folder)
    summary = {**log.summary(), "after": {"tries": 1, "temperature": 0.0}}
    folder.write_summary(summary)
    folder.write_summary({**summary, "after": recorded_evaluation(log).summary()})
    return folder.path


def runs(template: Path, root: Path, number: int) -> list[RunFolder]:
    """Of as many seeds."""
    for index in range(number):
        path = shutil.copytree(template, root / f"{index + 1:04d}-demo")
        RunFolder(path).write_config({"agent": {"model_name": "x"}, "training": {"seed": index}})
    return [RunFolder(path) for path in sorted(root.iterdir())]


def expect_the_others(data: dict[str, Any], folders: list[RunFolder], damaged: int = 1) -> None:
    names = [folder.path.name for folder in folders]
    [(name, reason)] = data["damaged"]
    assert name == names[damaged]
    assert [run["name"] for run in data["runs"]] == [one for one in names if one != name]
    assert name in reason
    assert len(reason.splitlines()) == 1


@pytest.mark.first(4)
@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "config.yaml", "rollouts.jsonl"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_page_of_many_runs_names_the_damaged_one_and_shows_the_others(
    template: Path, tmp_path: Path, kind: str, file: str
) -> None:
    folders = runs(template, tmp_path, 3)
    DAMAGES[kind](folders[1].path / file)
    if (kind, file) in HARMLESS:
        assert len(overview_data(tmp_path)["runs"]) == 3
    else:
        expect_the_others(overview_data(tmp_path), folders)


@pytest.mark.first(3)
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("verb", READ)
def test_a_damaged_run_alone_is_one_line_and_exit_code_1(
    template: Path, tmp_path: Path, kind: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in READ[verb]:
        folder, other = runs(template, tmp_path / file, 2)
        DAMAGES[kind](folder.path / file)
        arguments = {"compare": [str(other.path)], "rescore": ["--reward", "correctness"]}
        code = main([verb, str(folder.path), *arguments.get(verb, [])])
        error = capsys.readouterr().err
        assert "Traceback" not in error
        if (kind, file) not in HARMLESS:
            assert str(tmp_path) in the_line(code, error), (verb, file)


@pytest.mark.long
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_numeric_run_is_one_line_too(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("config.yaml", "summary.json", "metrics.jsonl", "episodes.jsonl", "windows.json"):
        folder = numeric_run(tmp_path / file, updates=2)
        DAMAGES[kind](folder.path / file)
        code = main(["report", str(folder.path)])
        error = capsys.readouterr().err
        if (kind, file) not in HARMLESS:
            assert folder.path.name in the_line(code, error), file


@pytest.mark.long
@pytest.mark.parametrize("kind", DAMAGES)
def test_of_twenty_runs_every_reader_shows_the_other_nineteen(
    template: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    folders = runs(template, root, 20)
    DAMAGES[kind](folders[1].metrics)
    assert main(["report", str(root)]) == 0
    assert "a run is left out  run=0002-demo reason=" in capsys.readouterr().err
    expect_the_others(page_data(RunFolder(root)), folders)
    asyncio.run(_expect_live_pages(root, folders))
    for index, folder in enumerate(folders):
        if index > 1:
            assert main(["report", str(folder.path)]) == 0
            assert main(["compare", str(folders[0].path), str(folder.path)]) == 0


async def _expect_live_pages(root: Path, folders: list[RunFolder]) -> None:
    """The pages of `report --live` and of `dashboard` answer, and tell a page that follows the same."""
    for serve, what in ((serve_overview, [root]), (serve_dashboard, [root, None])):
        async with served(serve, *what) as client, client.get("/") as page:
            assert page.status == 200
            (root / "report.html").write_text(await page.text())
        data = page_data(RunFolder(root))
        expect_the_others(data["runs"] if "deployments" in data else data, folders)
