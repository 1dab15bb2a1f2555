"""A deployment's conversations in a file: whole, by their ids, and never in the way of an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.serving.routing import SavingRouter
from stateset_agents.serving.saved_conversations import load_served
from stateset_agents.serving.server import AgentServer

CALL = '<tool_call>{"name": "look", "arguments": {"order": "K1"}}</tool_call>'
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@asynccontextmanager
async def desk(folder: Path, saved: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a deployment whose arms look orders up, and then say where they are."""

    def agent(name: str) -> MultiTurnAgent:
        script = ScriptedBackend(lambda request: "In Oslo." if '"city"' in request.text else CALL)
        return MultiTurnAgent(AgentConfig(model_name=name), backend=script)

    plan = DeploymentPlan(stages=(0.5,), shadow_answers=0, hold_seconds=0, salt="of the test")
    with Journal(folder / "d.sqlite") as journal:
        async with (
            agent("old") as old,
            agent("new") as new,
            Deployed(old, new, plan, journal) as deployed,
            AgentServer(SavingRouter(deployed, saved)) as running,
            openai.AsyncOpenAI(base_url=running.url, api_key="secret", max_retries=0) as client,
        ):
            deployed.controller.settle()
            yield client


async def talk(client: openai.AsyncOpenAI, conversation: str, *, stream: bool) -> list[dict[str, Any]]:
    """A question, a look-up and the answer."""
    messages: list[Any] = [{"role": "user", "content": f"Where is K1? I am {conversation}."}]
    for _ in range(2):
        request: dict[str, Any] = {"model": "old", "messages": messages, "tools": [LOOK]}
        headers = {"X-Conversation-Id": conversation}
        if stream and len(messages) > 1:
            pieces = await client.chat.completions.create(**request, stream=True, extra_headers=headers)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in pieces])
            messages.append({"role": "assistant", "content": text})
        else:
            answer = await client.chat.completions.create(**request, extra_headers=headers)
            messages.append(answer.choices[0].message.to_dict())
        if calls := messages[-1].get("tool_calls"):
            messages.append({"role": "tool", "content": '{"city": "Oslo"}', "tool_call_id": calls[0]["id"]})
    await client.post("/outcomes", body={"conversation": conversation, "success": True}, cast_to=object)
    return messages


async def test_what_is_served_is_saved_whole_and_becomes_scenarios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "talks.jsonl"
    async with desk(tmp_path, saved) as client:
        for number in range(4):
            await talk(client, f"ann{number}@example.org", stream=number % 2 == 1)
    assert len(saved.read_text().splitlines()) == 8  # after each answer
    served = load_served(saved)
    assert list(served) == [f"ann{number}@example.org" for number in range(4)]
    for one in served.values():
        assert [message.role for message in one.messages] == ["user", "assistant", "tool", "assistant"]
        assert one.messages[1].tool_calls[0].arguments == {"order": "K1"}
        assert one.messages[3].content == "In Oslo."
        assert one.tools == (LOOK,)
    out = tmp_path / "harvest"
    command = ["served", str(saved), "--deployments", str(tmp_path / "d.sqlite"), "--out", str(out)]
    assert main(command) == 0
    assert "4 succeeded, 0 failed, 0 unknown" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "scenarios.jsonl").read_text().splitlines()]
    assert {line["messages"][0]["content"] for line in lines} == {"Where is K1? I am [mail 1]."}


async def test_a_file_that_cannot_be_written_keeps_no_answer_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path, tmp_path / "none" / "talks.jsonl") as client:
        messages = await talk(client, "c1", stream=False)
    assert messages[-1]["content"] == "In Oslo."
    assert "a conversation is not saved" in caplog.text


def test_it_is_for_deployments_and_a_file_that_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "embedded:desk", "--save-conversations", "talks.jsonl"]) == 1
    assert "--save-conversations is for --deployment" in capsys.readouterr().err
    journal, nowhere = str(tmp_path / "d.sqlite"), str(tmp_path / "none" / "talks.jsonl")
    assert main(["serve", "--deployment", journal, "--save-conversations", nowhere]) == 1
    assert "cannot write" in capsys.readouterr().err
