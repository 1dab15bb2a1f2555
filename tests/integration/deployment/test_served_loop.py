"""What a deployment of the embedded desk served becomes a warm start and a training, by the command line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from stateset_agents.cli.main import main
from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.evaluation.demonstrations import demonstrate, scripted_agent_of
from stateset_agents.serving.saved_conversations import save_conversation
from stateset_agents.training.components import make_environment
from stateset_agents.types.messages import Message

CONVERSATIONS = 24


def serve_desk(folder: Path) -> tuple[Path, Path]:
    """A journal, and what was said: the desk's honest agent stands in for the one that was served."""
    desk = make_environment({"name": "retail_desk", "families": "learnable"})
    scenarios = desk.scenarios("train")[:CONVERSATIONS]
    shown = asyncio.run(demonstrate(desk, scenarios, scripted_agent_of(desk, "honest")))
    plan = DeploymentPlan(stages=(0.5,), shadow_answers=0, hold_seconds=0, salt="of the test")
    saved = folder / "talks.jsonl"
    with Journal(folder / "d.sqlite") as journal:
        record = start_deployment(
            journal, candidate="runs/0001", baseline="embedded:desk", plan=plan, who="ann"
        )
        controller = DeploymentController(journal, record.id)
        for number, chat in enumerate(shown.chats):
            name = f"caller{number}@example.org"
            controller.assign(name)
            messages = [Message.from_openai(message) for message in chat["messages"]]
            save_conversation(saved, messages, conversation=name, tools=chat.get("tools", ()))
            controller.report_outcome(name, success=number % 4 != 0)
    return journal.path, saved


def test_what_was_served_is_imitated_and_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, saved = serve_desk(tmp_path)
    out = tmp_path / "harvest"
    assert main(["served", str(saved), "--deployments", str(journal), "--out", str(out)]) == 0
    examples = (out / "warm_start.jsonl").read_text().splitlines()
    assert 0 < len(examples) < CONVERSATIONS
    runs = ["--output-dir", str(tmp_path / "runs"), "--max-steps", "1"]
    warm = ["sft", str(out / "warm_start.jsonl"), "--model", "embedded:desk", *runs]
    assert main(warm) == 0
    settings = [
        "training.num_generations=2",
        "training.per_device_train_batch_size=4",
        "agent.max_new_tokens=12",
    ]
    command = [
        "train",
        "examples/demo.yaml",
        "--from-served",
        str(out / "scenarios.jsonl"),
        *runs,
        "--no-eval",
    ]
    assert main([*command, *(part for one in settings for part in ("--set", one))]) == 0
    [run] = (tmp_path / "runs").glob("*-demo")
    assert "name: served" in (run / "config.yaml").read_text()
    played = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()[1:]]
    assert played
    assert all("served-" in json.dumps(line) for line in played)
    assert "example.org" not in (run / "rollouts.jsonl").read_text()
    assert "diagnostics:" in capsys.readouterr().out
