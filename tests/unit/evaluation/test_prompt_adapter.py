"""What gepa gets to know of conversations, without gepa: scores, feedback, and what ends the search."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from builders import trajectory
from chat_server import ChatServer, status
from command_line import the_line
from environments import ChattyEnvironment, scenarios

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.evaluation.prompt_adapter import (
    PROMPT,
    PromptAdapter,
    conversation_text,
    feedback,
    score,
)
from stateset_agents.types.errors import BackendError, EnvironmentFailure
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, Trajectory


def talk(success: bool | None, reward: float | None, **fields: Any) -> Trajectory:
    fields = {"scenario": Scenario(id="s1"), **fields}
    return trajectory("hi", "hello", outcome=Outcome(success=success), reward=reward, **fields)


@pytest.mark.parametrize(
    ("success", "reward", "expected"),
    [(True, 0.2, 1.0), (False, 0.2, 0.0), (False, None, 0.0), (None, 0.2, 0.2), (None, -3.0, -3.0)],
)
def test_a_score_is_the_verdict_or_else_the_reward(
    success: bool | None, reward: float | None, expected: float
) -> None:
    assert score(talk(success, reward)) == expected


def test_what_has_no_score_gets_none_made_up() -> None:
    with pytest.raises(EnvironmentFailure, match="s1 has no score: the desk broke; mend that, and the same"):
        score(talk(None, None, status=Status.FAILED, error="the desk broke"))
    with pytest.raises(EnvironmentFailure, match="s1 has no score: no reward applies; "):
        score(talk(None, None))


def test_feedback_says_verdict_reward_broken_rules_and_end() -> None:
    broken = {"violations": {"no consent": 2, "no name": 0, "late": 1}}
    told = talk(False, 0.25, metadata=broken, status=Status.TRUNCATED)
    assert feedback(told) == "Success: False. Reward: 0.25. Broken rules: no consent, late. Ended: truncated."
    assert feedback(talk(None, 1.0)) == "Success: None. Reward: 1.0. Ended: terminated."


def test_a_conversation_is_lines_of_messages() -> None:
    assert conversation_text(talk(True, 1.0)).splitlines() == [
        '{"role": "user", "content": "hi"}',
        '{"role": "assistant", "content": "hello"}',
    ]


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def adapter(loop: asyncio.Runner, folder: Path, url: str) -> PromptAdapter:
    client = ChatClient(url, "m", max_attempts=1)
    agent = EndpointAgent(client, AgentConfig(persona="Mia", system_prompt="first"))
    measure = partial(
        evaluate, environment=ChattyEnvironment(), reward_fn=EnvironmentReward(), scenarios=scenarios(2)
    )
    return PromptAdapter(agent, measure, client, folder, {}, loop.run)


def test_successes_alone_ask_for_no_new_prompt(loop: asyncio.Runner, tmp_path: Path) -> None:
    made = adapter(loop, tmp_path, "http://127.0.0.1:9/v1")
    won, lost = talk(True, 0.5), talk(False, 0.5)
    batches = [SimpleNamespace(trajectories=each) for each in ([won, won], [won, lost])]
    none, some = (made.make_reflective_dataset({}, batch, [PROMPT]) for batch in batches)
    assert none == {}
    assert [record["Feedback"][:14] for record in some[PROMPT]] == ["Success: True.", "Success: False"]
    assert some[PROMPT][1]["Conversation"] == conversation_text(lost)


def test_a_prompt_is_played_once_on_each_scenario(loop: asyncio.Runner, tmp_path: Path) -> None:
    async def served() -> list[dict[str, Any]]:
        async with ChatServer(speak=lambda prompt: "hello") as server:
            for _ in range(2):
                made = adapter(loop, tmp_path, server.url)
                for prompt in ("first", "second"):
                    result = await made.play(prompt)
                    assert result.success == 1.0
                    assert len(result.groups) == 2
            return server.bodies

    bodies = loop.run(served())
    said = [body["messages"][0]["content"] for body in bodies]
    assert said == ["You are Mia.\nfirst"] * 4 + ["You are Mia.\nsecond"] * 4  # two turns of two scenarios


def test_an_error_of_the_reflection_is_kept_for_the_stopper(loop: asyncio.Runner, tmp_path: Path) -> None:
    async def refusing() -> ChatServer:
        return await ChatServer(status(401)).__aenter__()

    server = loop.run(refusing())
    made = adapter(loop, tmp_path, server.url)
    assert made.check(None) is False
    with pytest.raises(BackendError, match="status 401"):
        made.reflect("write")
    with pytest.raises(BackendError, match="status 401"):
        made.check(None)
    loop.run(server.__aexit__())


@pytest.mark.parametrize(
    ("agent", "others", "message"),
    [
        ({}, [], "shop.yaml has no agent.system_prompt: write the one to begin with"),
        (
            {"system_prompt": "x"},
            ["--scenarios", "0"],
            "--scenarios must be from 1 to below --max-metric-calls",
        ),
        (
            {"system_prompt": "x"},
            ["--max-metric-calls", "30"],
            "must be from 1 to below --max-metric-calls, got 30",
        ),
        ({"system_prompt": "x"}, ["--out", "shop.yaml"], "shop.yaml exists: give another file, or remove it"),
        ({"system_prompt": "x"}, ["--out", "no/b.yaml"], "cannot write 'no/b.yaml'"),
        (
            {"system_prompt": "x"},
            ["--reflection", "writer", "http://127.0.0.1:9"],
            "must be http:// or https://",
        ),
        ({"system_prompt": "x"}, [], 'prompts are optimised by gepa: pip install "gepa>=0.1.4,<0.2"'),
    ],
)
def test_what_cannot_begin_is_one_line(
    agent: dict[str, Any],
    others: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gepa", None)  # also where it is installed
    Path("shop.yaml").write_text(yaml.safe_dump({"agent": agent, "environment": "retail_desk"}))
    words = ["optimize-prompt", "shop.yaml", "--out", "b.yaml", "--reflection", "http://127.0.0.1:9/v1", "w"]
    code = main([*words, *others])
    assert message in the_line(code, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shop.yaml"]
