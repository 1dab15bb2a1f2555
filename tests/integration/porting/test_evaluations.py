"""examples/evaluations: a task of Inspect as a program of its own, and an agent as the model of Inspect."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from chat_templates import trl_tokenizer
from repository_paths import ROOT

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.programs.external_program import ExternalProgram
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.trajectory import Trajectory

pytestmark = pytest.mark.evaluations

FOLDER = ROOT / "examples" / "evaluations"
INSPECT = ROOT / ".venv-inspect" / "bin" / "python"


def listed(command: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run([*command, "--list"], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def logged_samples(folder: Path) -> list[dict[str, Any]]:
    (log,) = folder.glob("*.json")
    samples: list[dict[str, Any]] = json.loads(log.read_text())["samples"]
    return samples


async def played(command: list[str], scenarios: list[dict[str, Any]], say: Any) -> list[Trajectory]:
    environment = ExternalProgram(command, scenarios, verdict="stdout", cwd=FOLDER)
    agent = MultiTurnAgent(
        AgentConfig(model_name="tiny"), backend=ScriptedBackend(say, tokenizer=trl_tokenizer("chatml"))
    )
    await agent.initialize()
    engine = ComputationalEngine(agent, environment, EnvironmentReward(), num_generations=2)
    groups = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    return [member for group in groups for member in group.trajectories]


def adds(request: ScriptedRequest) -> str:
    """Asks the tool about the first sum, guesses the others: right below 4."""
    number = int(request.text.partition("What is ")[2].split()[0])
    if number == 1 and request.turn == 0:
        return '<tool_call>{"name": "add", "arguments": {"one": 1, "other": 2}}</tool_call>'
    return f"It is {2 * number + 1 if number < 4 else 0}"


async def test_a_task_of_inspect_is_an_environment_and_its_scorer_the_verdict() -> None:
    command = [str(INSPECT), "inspect_sample.py", "arithmetic.py"]
    scenarios = listed(command)
    assert [scenario["id"] for scenario in scenarios] == ["1", "2", "3", "4", "5"]
    members = await played(command, [scenarios[0], scenarios[3]], adds)
    assert [member.error for member in members] == [None] * 4
    assert [member.reward for member in members] == [1.0, 1.0, 0.0, 0.0]
    assert [member.success for member in members] == [True, True, False, False]
    assert all(member.metadata["match"] == member.reward for member in members)
    first = members[0]
    assert [message.role for message in first.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert first.messages[3].content == "3"


async def test_an_agent_behind_serve_is_a_model_of_inspect(tmp_path: Path) -> None:
    backend = ScriptedBackend(adds, tokenizer=trl_tokenizer("chatml"))
    async with (
        MultiTurnAgent(AgentConfig(model_name="tiny"), backend=backend) as agent,
        AgentServer(agent) as server,
    ):
        program = await asyncio.create_subprocess_exec(
            *(str(INSPECT.with_name("inspect")), "eval", "arithmetic.py", "--model", "openai-api/agent/tiny"),
            *("--sample-id", "2,4", "--display", "none", "--log-format", "json", "--log-dir", str(tmp_path)),
            env={**os.environ, "AGENT_BASE_URL": server.url, "AGENT_API_KEY": "none"},
            cwd=FOLDER,
        )
        assert await program.wait() == 0
    samples = logged_samples(tmp_path)
    assert [sample.get("error") for sample in samples] == [None, None]
    assert {sample["id"]: sample["scores"]["match"]["value"] for sample in samples} == {2: "C", 4: "I"}
