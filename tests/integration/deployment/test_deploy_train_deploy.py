"""By the command line: trained, let in, trained on what was served, let in again; a ruined one is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository_paths import ROOT
from served_people import crowd
from test_desk_deployment import AT_ONCE, START, retail_desk, ruined

from stateset_agents.cli.main import main
from stateset_agents.deployment.controller import DeploymentController
from stateset_agents.deployment.journal import Journal

PLAN = "stages: [0.5]\nshadow_answers: 10\nhold_seconds: 0\nmargin: 0.1\nalpha: 0.02\n"
DEMO = str(ROOT / "examples" / "demo.yaml")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`serve --deployment` as a process of its own; its address."""
    words = [sys.executable, "-m", "stateset_agents.cli.main", "serve", "--deployment", "d.sqlite"]
    words += ["--port", "0", "--save-conversations", "talks.jsonl", "--set", "agent.max_new_tokens=48"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # a relative one would be the folder's
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=folder, env=env) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()
            assert server.wait(60) == 0


def let_in(folder: Path, candidate: str, baseline: str, *, people: int) -> dict[str, Any]:
    """Begin a deployment and talk to it until it is decided; its status."""
    words = ["deploy", candidate, "--baseline", baseline, "--plan", "plan.yaml", "--deployments", "d.sqlite"]
    assert main(words) == 0
    desk = retail_desk()
    with serving(folder) as url, Journal(folder / "d.sqlite") as journal:
        record = journal.records()[-1]
        controller = DeploymentController(journal, record.id)
        asyncio.run(
            crowd(
                url,
                desk,
                desk.scenarios("train"),
                model=record.baseline,
                most=people,
                at_once=AT_ONCE,
                is_over=lambda: controller.status()["mode"] in ("full", "rolled_back"),
                name=f"deployment {record.id}, person",
            )
        )
        return controller.status()


def train(*words: str) -> str:
    """The run's folder."""
    settings = ["--output-dir", "runs", "--no-eval", *words]
    assert main(["train", DEMO, *settings]) == 0
    return str(Path("runs/latest").resolve())


@pytest.mark.long
def test_deploy_then_train_on_what_was_served_then_deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.yaml").write_text(PLAN)
    first = train("--max-steps", "40")
    status = let_in(tmp_path, first, START, people=1000)
    assert (status["mode"], status["candidate"]) == ("full", first)
    assert status["arms"]["candidate"]["success"] > status["arms"]["baseline"]["success"] + 0.2

    assert main(["served", "talks.jsonl", "--deployments", "d.sqlite", "--out", "harvest"]) == 0
    served = [json.loads(line) for line in Path("harvest/scenarios.jsonl").read_text().splitlines()]
    assert len(served) > 30
    second = train(
        "--from-served",
        "harvest/scenarios.jsonl",
        "--max-steps",
        "8",
        "--set",
        f"agent.model_name={first}",
    )
    assert second != first
    status = let_in(tmp_path, second, first, people=2000)
    assert (status["id"], status["mode"]) == ("0002", "full")

    model = next(Path(second).glob("checkpoints/*/model"))
    status = let_in(tmp_path, ruined(str(model), tmp_path / "ruined"), second, people=1000)
    assert (status["id"], status["mode"]) == ("0003", "rolled_back")
    assert status["why"].startswith("success is lower")
    capsys.readouterr()
    assert main(["status", "--deployments", "d.sqlite"]) == 3
