"""`evaluate --endpoint`: a served model gets what it gets here, costs are told, and a break loses nothing."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from chat_server import ChatServer, answer
from command_line import contents, the_line, without_warnings
from warm_python import warm_python

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.environments.retail_desk import HonestAgent, RetailDesk
from stateset_agents.evaluation import scripted_agents
from stateset_agents.evaluation.evaluator import evaluate, spread
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive

KEY = "sk-very-secret"
CONFIG = AgentConfig(model_name="embedded:desk", max_new_tokens=48, allow_hidden_tools=True)
DESK = {
    "agent": {"model_name": "embedded:desk", "max_new_tokens": 48, "allow_hidden_tools": True},
    "environment": {"name": "retail_desk", "offer_tools": True},
    "evaluation": {"episodes": 6, "max_concurrent": 4},
}


@pytest.mark.long
async def test_a_served_agent_has_the_conversations_and_the_success_that_it_has_here() -> None:
    desk, reward = RetailDesk(offer_tools=True), EnvironmentReward()
    scenarios = desk.scenarios("test")[:30]
    async with MultiTurnAgent(CONFIG) as agent, AgentServer(agent) as server:
        here = await evaluate(agent, desk, reward, scenarios, temperature=0.0)
        there = await evaluate(
            EndpointAgent(ChatClient(server.url, "embedded:desk"), CONFIG),
            desk,
            reward,
            scenarios,
            temperature=0.0,
        )
    assert here.success is not None
    assert here.success > 0
    assert here.summary() == there.summary()
    for one, other in zip(here.groups, there.groups, strict=True):
        [a], [b] = one.trajectories, other.trajectories
        assert (a.messages, a.status, a.seed) == (b.messages, b.status, b.seed)
        assert (a.outcome, a.reward, a.metadata) == (b.outcome, b.reward, b.metadata)
    assert any(
        trajectory.replies[0].tool_calls for group in there.groups for trajectory in group.trajectories
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a serving process that asks for the key."""
    command = [*warm_python(), "-m", "stateset_agents", "serve", "embedded:desk", "--port", "0"]
    environment = {**os.environ, "STATESET_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        yield line.split()[-1]
        server.send_signal(signal.SIGINT)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / "desk.yaml").write_text(yaml.safe_dump(DESK))
    return tmp_path


def evaluated(*arguments: str) -> list[str]:
    return ["evaluate", "desk.yaml", "--temperature", "0", *arguments]


@pytest.mark.long
def test_the_command_tells_figures_tokens_and_costs_and_no_key(
    url: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--endpoint", url, "--model", "embedded:desk"]
    prices = ["--price-in", "1000000", "--price-out", "2000000"]
    assert main(evaluated(*there, *prices, "--out", "there.json", "--tries", "2")) == 0
    printed = capsys.readouterr()
    assert main(evaluated("--out", "here.json", "--tries", "2")) == 0
    here, measured = (json.loads((desk / f"{name}.json").read_text()) for name in ("here", "there"))
    spent = measured.pop("endpoint")
    assert measured == here
    assert measured["pass_hat"]["2"]["n"] == 6
    assert spent["url"] == url
    assert spent["num_requests"] >= 12
    assert spent["num_estimated"] == 0
    assert spent["cost"] == spent["prompt_tokens"] + 2 * spent["completion_tokens"]
    assert spent["conversations"] == "there.conversations.jsonl"
    assert f"{spent['num_requests']} requests, {spent['prompt_tokens']:,} tokens read" in printed.out
    assert f", cost {spent['cost']:.4f}" in printed.out
    left = b"".join(contents(desk).values()) + (printed.out + printed.err).encode()
    assert KEY.encode() not in left

    assert main(evaluated(*there, "--out", "there.json", "--tries", "2")) == 0
    assert "conversations: there.conversations.jsonl, 12 of them from before" in capsys.readouterr().out
    assert json.loads((desk / "there.json").read_text())["endpoint"]["num_requests"] == spent["num_requests"]


@pytest.mark.long
def test_compare_takes_an_endpoint_on_either_side(
    url: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "desk.yaml", "embedded:desk", "embedded:desk", "--endpoint-b", url]
    assert main([*command, "--temperature", "0", "--json", "--price-in-b", "1", "--price-out-b", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "endpoint" not in result["a"]
    spent = result["b"].pop("endpoint")
    assert spent["cost"] > 0
    assert result["a"] == result["b"]
    assert result["comparison"]["success"]["ties"] == 6
    assert (desk / spent["conversations"]).parent.name == "evaluations"

    command = ["compare", "desk.yaml", "embedded:desk", "embedded:desk", "--endpoint-a", url]
    assert main([*command, "--endpoint-b", url, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.count(", 6 of them from before") == 2  # what was said then is what counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "{url}"], "needs --model NAME, the model as the endpoint calls it"),
        (["--price-in", "1"], "--price-in is of an endpoint: give --endpoint URL too"),
        (["--drop-thoughts"], "--drop-thoughts is of an endpoint: give --endpoint URL too"),
        (["--endpoint", "{url}", "--model", "m", "--price-in", "1"], "give --price-in and --price-out"),
        (
            ["--endpoint", "{url}", "--model", "m", "--price-in", "-1", "--price-out", "1"],
            "--price-in must be a number from 0 on, got -1.0",
        ),
        (["--endpoint", "localhost:8000", "--model", "m"], "must be http:// or https://"),
        (["--endpoint", "{url}", "--model", "m", "--timeout", "0"], "timeout"),
        (["--endpoint", "http://u:p@127.0.0.1/v1", "--model", "m"], "holds more than an address"),
        (["--endpoint", "{url}", "--model", "other"], "status 404: "),
        (
            ["--endpoint", "{url}", "--model", "embedded:desk", "--api-key-env", "EMPTY"],
            "put the right key in the environment variable EMPTY",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    arguments: list[str], message: str, url: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(evaluated(*(argument.format(url=url) for argument in arguments)))
    assert message in the_line(code, without_warnings(capsys.readouterr().err))


def test_an_endpoint_that_is_not_there_is_one_line(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client_settings: dict[str, Any] = {"backoff": 0.001}
    monkeypatch.setattr(ChatClient, "__init__", _with(ChatClient.__init__, client_settings))
    code = main(evaluated("--endpoint", "http://127.0.0.1:9/v1", "--model", "m"))
    line = the_line(code, without_warnings(capsys.readouterr().err))
    assert line.startswith("none of 6 conversations was played: BackendError")


def _with(function: Any, settings: dict[str, Any]) -> Any:
    return lambda *args, **kwargs: function(*args, **{**kwargs, **settings})


def test_an_interruption_says_how_to_go_on_and_that_plays_the_rest(url: str, desk: Path) -> None:
    slow = yaml.safe_dump({**DESK, "evaluation": {"episodes": 300, "max_concurrent": 1}})
    (desk / "desk.yaml").write_text(slow)
    command = evaluated("--endpoint", url, "--model", "embedded:desk", "--conversations", "kept.jsonl")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*warm_python(), "-m", "stateset_agents", *command],
        cwd=desk,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stop = threading.Timer(120, process.kill)
        stop.start()
        while process.poll() is None and _num_lines(desk / "kept.jsonl") < 5:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        stop.cancel()
    assert (process.returncode, out) == (130, "")
    [line] = err.splitlines()
    told = "stateset-agents: interrupted; what had ended is kept, and is not played again by: "
    assert line.startswith(told)
    before = _num_lines(desk / "kept.jsonl")
    assert 3 <= before < 300
    again = shlex.split(line.removeprefix(told))
    assert again == ["stateset-agents", *command]
    assert main([*again[1:], "--episodes", "6", "--json", "--out", "m.json"]) == 0
    result = json.loads((desk / "m.json").read_text())
    assert result["endpoint"]["num_played_before"] >= 3
    assert (result["n"], result["num_failed"]) == (6, 0)


def _num_lines(file: Path) -> int:
    return file.read_bytes().count(b'\n{"conversation"') if file.exists() else 0


async def honest(request: web.Request) -> web.Response:
    """An endpoint behind which the desk's scripted agent answers, which is right on every scenario."""
    messages = [Message.from_openai(message) for message in (await request.json())["messages"]]
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    named = [replace(message, name=called.get(message.tool_call_id or "")) for message in messages]
    reply = HonestAgent().reply(named).to_openai()
    return web.json_response(answer({**reply, "content": reply["content"] or None}))


@pytest.mark.long
async def test_verdicts_on_long_calls_with_many_tools_are_those_of_the_same_agent_here() -> None:
    desk = RetailDesk(families="full")
    scenarios = spread(desk.scenarios("test"), 28)
    async with ChatServer(*[honest] * 2000) as server:
        agent = EndpointAgent(ChatClient(server.url, "honest"))
        result = await evaluate(agent, desk, EnvironmentReward(), scenarios)
    assert (result.success, result.num_failed, len(result.families)) == (1.0, 0, 14)
    for group in result.groups:
        [there] = group.trajectories
        seed = derive(0, "user", 0, there.scenario.id)
        here = await scripted_agents.play(desk, there.scenario, seed, lambda tools: HonestAgent())
        assert [message.content for message in there.messages] == [m.content for m in here.messages]
        assert there.outcome == here.outcome
