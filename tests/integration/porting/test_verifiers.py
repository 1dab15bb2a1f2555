"""examples/evaluations: tasks of verifiers as a program, scored as by verifiers, and trained as sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import trl_tokenizer
from repository_paths import ROOT
from test_evaluations import listed
from warm_python import of_another

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.programs.external_program import ExternalProgram
from stateset_agents.serving.server import AgentServer
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.trajectory import Status, Trajectory

pytestmark = pytest.mark.evaluations

FOLDER = ROOT / "examples" / "evaluations"
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
SUMS = ("sums", "--env.taskset.num-tasks", "3")
SHELVES = ("shelves", "-n", "2")

Say = Callable[[ScriptedRequest], Any]


def adds(request: ScriptedRequest) -> str:
    """Right at length, wrong in a word, right in a word."""
    number = int(request.text.rpartition("What is ")[2].split()[0])
    return [f"{2 * number + 1}", f"Well, I think it is {2 * number + 1}", "7"][number % 3]


def looks(request: ScriptedRequest) -> str:
    """Asks the tool about jars, guesses the ropes wrong."""
    if "ropes are" in request.text:
        return "There are 30."
    if "\n12" in request.text:
        return "There are 12."
    return '<tool_call>{"name": "shelf_count", "arguments": {"thing": "jars"}}</tool_call>'


@pytest.fixture(scope="module")
def program() -> Iterator[list[str]]:
    """The command of `verifiers_task.py`, with the imports of verifiers done once."""
    with of_another(PYTHON, ["verifiers.v1", "verifiers.v1.cli.resolve"]) as python:
        yield [*python, "verifiers_task.py"]


async def played(
    command: list[str], scenarios: list[dict[str, Any]], say: Say, **options: Any
) -> tuple[list[Trajectory], ScriptedBackend]:
    environment = ExternalProgram(command, scenarios, verdict="stdout", cwd=FOLDER, **options)
    backend = ScriptedBackend(say, tokenizer=trl_tokenizer("chatml"))
    async with MultiTurnAgent(AgentConfig(model_name="tiny"), backend=backend) as agent:
        engine = ComputationalEngine(agent, environment, EnvironmentReward(), num_generations=2)
        groups = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    return [member for group in groups for member in group.trajectories], backend


async def evaluated(words: tuple[str, ...], say: Say, folder: Path) -> dict[int, dict[str, Any]]:
    """The traces of verifiers' own `vf-eval`, by their tasks, with the same agent behind `serve`."""
    backend = ScriptedBackend(say, tokenizer=trl_tokenizer("chatml"))
    async with (
        MultiTurnAgent(AgentConfig(model_name="tiny"), backend=backend) as agent,
        AgentServer(agent) as server,
    ):
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON.with_name("vf-eval")), *words, "--client.base-url", server.url, "--model", "tiny"),
            *("--env.agent.runtime.type", "subprocess", "--env.agent.harness.id", "null"),
            *("--no-push", "--no-rich", "--output-dir", str(folder)),
            env={**os.environ, "PATH": f"{PYTHON.parent}:{os.environ['PATH']}", "PYTHONPATH": str(FOLDER)},
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert await process.wait() == 0
    return traces_by_task(folder)


def traces_by_task(folder: Path) -> dict[int, dict[str, Any]]:
    (file,) = folder.glob("*/traces.jsonl")
    traces = [trace for line in file.read_text().splitlines() for trace in json.loads(line)["traces"]]
    return {trace["task"]["data"]["idx"]: trace for trace in traces}


def assert_trained_as_sampled(talk: Trajectory, backend: ScriptedBackend, say: Say) -> None:
    """Each reply's trained tokens are those that the backend gave to the prompt it was asked with."""
    tokens, eos = backend.tokenizer, backend.tokenizer.eos_ids[0]
    sampled = {request.prompt_ids: [*tokens.encode(say(request)), eos] for request in backend.requests}
    (row,) = talk.rows
    trained = [token for token, bit in zip(row.token_ids, row.action_mask, strict=True) if bit]
    assert trained == [token for turn in row.turns for token in sampled[turn.completion.prompt_ids]]
    last = row.turns[-1].completion.prompt_ids
    assert row.token_ids == [*last, *sampled[last]]


@pytest.mark.parametrize(
    ("words", "say", "rewards", "num_turns"),
    [(SUMS, adds, [0.75, 0.25, 1.0], [1, 1, 1]), (SHELVES, looks, [1.0, 0.0], [2, 1])],
    ids=["one turn", "a tool"],
)
async def test_the_rewards_are_those_of_verifiers_and_what_was_sampled_is_trained(
    program: list[str],
    words: tuple[str, ...],
    say: Say,
    rewards: list[float],
    num_turns: list[int],
    tmp_path: Path,
) -> None:
    own = await evaluated(words, say, tmp_path)
    command = [*program, *words]
    members, backend = await played(command, listed(command), say)
    assert [member.error for member in members] == [None] * len(members)
    assert [member.reward for member in members[::2]] == rewards == [one.reward for one in members[1::2]]
    assert [len(member.turns) for member in members[::2]] == num_turns
    for member in members:
        trace = own[member.scenario.context["task"]]
        scores = {name: reward["score"] for name, reward in trace["rewards"].items()}
        assert member.reward == sum(one["score"] * one["weight"] for one in trace["rewards"].values())
        assert member.success == all(score == 1 for score in scores.values())
        assert {**scores, **trace["metrics"]}.items() <= member.metadata.items()
        said = [node["message"].get("content") or "" for node in trace["nodes"] if node["sampled"]]
        assert [turn.completion.message.content for turn in member.turns] == said
        assert_trained_as_sampled(member, backend, say)


def asks_and_answers(request: ScriptedRequest) -> str:
    """The user's words and the agent's, told apart by their system messages."""
    if "role-playing a USER" not in request.text:
        return "It is 3"
    return "###DONE###" if request.text.count("assistant\n") > 1 else "Please, what is 1 + 2?"


async def test_a_user_that_verifiers_plays_by_a_model_is_answered_and_not_trained(program: list[str]) -> None:
    command = [*program, "sums", "--env.id", "user-sim", "--env.user.model", "user"]
    (scenario, *_) = listed(command)
    (one, other), _ = await played(command, [scenario], asks_and_answers, untrained=["user"])
    assert one.error is other.error is None
    assert one.metadata["user_turns"] == 2
    assert one.reward == 1.0
    fixed = [turn.completion.message.content for turn in one.turns if all(turn.completion.forced or [False])]
    assert fixed == ["Please, what is 1 + 2?", "###DONE###"]


async def test_a_task_that_is_another_than_was_listed_is_told_in_one_line(program: list[str]) -> None:
    scenarios = listed([*program, *SUMS])
    scenarios[0]["context"]["hash"] = scenarios[1]["context"]["hash"]
    (one, _), _ = await played([*program, *SUMS], scenarios[:1], adds)
    assert one.reward is None
    assert one.error is not None
    assert "task 0 is not the one that was listed" in one.error


async def test_a_conversation_that_was_cut_has_failed_its_task(program: list[str]) -> None:
    command = [*program, *SHELVES]
    (one, _), _ = await played(command, listed(command)[:1], looks, max_turns=1)
    assert (one.status, one.error) == (Status.TRUNCATED, None)
    assert (one.reward, one.success) == (0.0, False)


def running(mark: str) -> set[str]:
    """The programs that have this in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in path.read_bytes():
                found.add(path.parent.name)
    return found


def seconds_until_none_runs(mark: str) -> float:
    began = time.monotonic()
    while running(mark) and time.monotonic() < began + 60:
        time.sleep(0.1)
    return time.monotonic() - began


async def test_a_conversation_that_is_cancelled_leaves_nothing_running(
    program: list[str], tmp_path: Path
) -> None:
    is_asked, mark = asyncio.Event(), str(tmp_path)

    async def hangs(request: ScriptedRequest) -> str:
        is_asked.set()
        await asyncio.sleep(3600)
        return "never said"

    command = [*program, *SHELVES]
    playing = asyncio.create_task(played(command, listed(command)[:1], hangs, env={"MARK": mark}))
    await asyncio.wait_for(is_asked.wait(), 300)
    assert len(running(mark)) >= 3  # what stands for the program, verifiers' chat loop, the server of tools
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing
    assert await asyncio.to_thread(seconds_until_none_runs, mark) < 60


async def test_a_step_trains_on_tasks_of_verifiers(tmp_path: Path) -> None:
    command = [str(PYTHON), "verifiers_task.py", *SUMS]
    environment = ExternalProgram(command, listed(command)[:1], verdict="stdout", cwd=FOLDER)
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=6))  # some are brief
    config = TrainingConfig(num_generations=4, max_steps=1, progress=False, output_dir=str(tmp_path))
    async with MultiTurnGRPOTrainer(agent, environment, EnvironmentReward(), config) as trainer:
        (group,) = await trainer.generate_trajectories(environment.scenarios("train"))
        metrics = await trainer.training_step([group])
    assert [member.error for member in group.trajectories] == [None] * 4
    scores = [0.75 * m.metadata["right"] + 0.25 * m.metadata["brief"] for m in group.trajectories]
    assert [member.reward for member in group.trajectories] == scores
    assert metrics["reward/mean"] == pytest.approx(sum(scores) / 4)
    assert metrics["group/zero_variance"] == 0
    assert metrics["optimizer/grad_norm"] > 0
