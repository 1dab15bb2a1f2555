"""A run folder that an older version wrote is read, reported, measured and gone on with.

`tests/fixtures/old_run` was written by commit a21dfe7: `train run.yaml`, four steps of a tiny model, in a
folder called /old-desk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from report_runs import page_data
from repository_paths import ROOT

from stateset_agents.cli.main import main
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog

FIXTURE = ROOT / "tests" / "fixtures" / "old_run"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder as if it had been written here; the working directory."""
    folder = tmp_path / "desk"
    shutil.copytree(FIXTURE, folder, symlinks=True)
    checkpoint = folder / "run" / "checkpoints" / "step-000004"
    for path in (folder / "run" / "config.yaml", checkpoint / "state.json"):
        path.write_text(path.read_text().replace("/old-desk", str(folder)))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = hashlib.sha256((checkpoint / "state.json").read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(folder)
    return folder


def test_it_is_read_and_reported(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog.open(desk / "run")
    rewards = [line.values["reward/mean"] for line in log.metrics() if "reward/mean" in line.values]
    assert rewards == pytest.approx([5 / 12, 5 / 12, 1 / 2, 1 / 3])
    assert [event["event"] for event in log.events()].count("group consumed") == 4
    assert main(["report", "run"]) == 0
    assert "even_share" in str(page_data(RunFolder.open(desk / "run")))
    main(["diagnose", "run"])
    assert "failures: 0 failed and 0 unscored" in capsys.readouterr().out


def test_it_goes_on_and_what_it_had_stays(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = desk / "run"
    before = {name: (run / name).read_text() for name in ("metrics.jsonl", "rollouts.jsonl", "events.jsonl")}
    assert main(["train", "--resume", "run", "--max-steps", "6", "--no-eval"]) == 0
    steps = [line.step for line in RunLog.open(run).metrics() if "reward/mean" in line.values]
    assert steps == [1, 2, 3, 4, 5, 6]
    for name, text in before.items():
        assert (run / name).read_text().startswith(text), name
    assert main(["evaluate", "run"]) == 0
    assert "mean reward" in capsys.readouterr().out


def test_a_setting_that_it_did_not_know_counts_as_today_s_default(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "train",
        "--resume",
        "run",
        "--max-steps",
        "6",
        "--no-eval",
        "--set",
        "agent.matmul_precision=medium",
    ]
    assert main(given) == 1
    assert "agent.matmul_precision was 'highest' and is 'medium'" in capsys.readouterr().err


def test_the_same_training_today_tells_the_same_events_in_the_same_order(desk: Path) -> None:
    assert main(["train", "run.yaml"]) == 0

    def order(run: Path) -> list[dict[str, object]]:
        fields = ("event", "step", "group", "groups", "scenario", "epoch", "end", "version", "path")
        events = [event for event in RunLog.open(run).events() if event["event"] != "warning"]
        return [{name: event.get(name) for name in fields} for event in events]

    assert order(desk / "runs" / "0001-run") == order(desk / "run")
