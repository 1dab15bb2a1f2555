"""Rollouts under a grammar, and the update that learns from them, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_environment, make_trainer

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.replies.thoughts import read_reasoned
from stateset_agents.core.reward import reward_function
from stateset_agents.environments.problems.arithmetic import ArithmeticProblems
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory


def look_up(kind: Literal["a", "b"], urgent: bool) -> str:
    """Look something up."""
    return f"{kind} {urgent}"


def agent_of(**settings: Any) -> MultiTurnAgent:
    model = tiny_model()
    model.config.max_position_embeddings = 1024
    config = AgentConfig(**{"model_name": "tiny", "chat_template": "plain", **settings})
    return MultiTurnAgent(config, backend=HuggingFaceBackend(model, tiny_tokenizer(), copy_model=False))


@reward_function
async def asks_for_a(trajectory: Trajectory) -> float:
    calls = [call for reply in trajectory.replies for call in reply.tool_calls]
    return sum(1.0 for call in calls if str(call.arguments.get("kind", "")).startswith("a"))


def environment(**options: Any) -> Any:
    return make_environment(tools=[look_up], **options)


def lines_of(tmp_path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(tmp_path.rglob(name)).read_text().splitlines()]


def card_of(tmp_path: Path) -> str:
    (card,) = {path.read_text() for path in tmp_path.rglob("README.md")}
    return card


async def trained(tmp_path: Path, **settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    agent = agent_of(constrain="strict", max_new_tokens=90)
    trainer = make_trainer(
        tmp_path,
        agent=agent,
        environment=environment(first_reply="call", max_turns=1),
        reward=asks_for_a,
        log_rollouts=True,
        max_steps=2,
        **settings,
    )
    async with agent:
        await trainer.train()
    folder = next((tmp_path / "runs").iterdir())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return metrics, rollouts


async def test_first_replies_call_and_the_update_s_ratio_is_one(tmp_path: Path) -> None:
    metrics, rollouts = await trained(tmp_path)
    steps = [line for line in metrics if "policy/first_ratio_max" in line]
    assert steps
    for line in steps:
        assert line["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert 0 < line["tokens/forced"] < line["tokens/agent"]
    events = lines_of(tmp_path, "events.jsonl")
    grammars = {event["digest"]: event for event in events if event.get("event") == "grammar"}
    log = RunLog(RunFolder(next((tmp_path / "runs").iterdir())))
    read = [turn.constraint for one in log.rollouts() for turn in one.turns]
    assert {constraint["digest"] for constraint in read if constraint} == set(grammars)
    played = [line for line in rollouts if "turns" in line]
    assert len(grammars) == 1
    card = card_of(tmp_path)
    assert 'constrain="strict"' in card
    assert "which belongs to the policy" in card
    for line in played:
        (turn,) = line["turns"]
        assert "look_up" in grammars[turn["constraint"]["digest"]]["grammar"]
        assert turn["constraint"]["kind"] == "call"
        assert turn["forced"] > 20
        if turn["finish_reason"] == "stop":
            (reply,) = [message for message in line["messages"] if message["role"] == "assistant"]
            (call,) = reply["tool_calls"]
            assert call["function"]["name"] == "look_up"
            assert set(json.loads(call["function"]["arguments"])) == {"kind", "urgent"}


async def test_an_environment_s_grammar_without_the_setting_is_refused_by_name(tmp_path: Path) -> None:
    agent = agent_of(max_new_tokens=8)
    trainer = make_trainer(tmp_path, agent=agent, environment=environment(first_reply="call"))
    async with agent:
        with pytest.raises(ConfigurationError, match=r"tool_choice required, and AgentConfig\.constrain is"):
            await trainer.train()


async def test_an_answer_schema_makes_words_json(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    agent = agent_of(constrain="strict", max_new_tokens=60)
    trainer = make_trainer(
        tmp_path,
        agent=agent,
        environment=make_environment(answer_schema=schema),
        log_rollouts=True,
        max_steps=1,
    )
    async with agent:
        await trainer.train()
    folder = next((tmp_path / "runs").iterdir())
    lines = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    replies = [m["content"] for line in lines for m in line.get("messages", ()) if m["role"] == "assistant"]
    complete = [text for text in replies if text.rstrip().endswith("}")]
    assert complete
    for text in complete:
        assert set(json.loads(text)) >= {"n"}


@pytest.mark.parametrize("reply_format", ["free", "required"])
async def test_an_embedded_model_thinks_and_answers_where_the_format_is_required(
    tmp_path: Path, reply_format: Literal["free", "required"]
) -> None:
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:reasoner", constrain="strict", max_new_tokens=64))
    problems = ArithmeticProblems(system_prompt="", reply_format=reply_format)
    trainer = make_trainer(tmp_path, agent=agent, environment=problems, log_rollouts=True, max_steps=1)
    async with agent:
        await trainer.train()
    lines = lines_of(tmp_path, "rollouts.jsonl")
    formats = [
        read_reasoned(Message.from_record(line["messages"][-1])) is not None
        for line in lines
        if line.get("turns") and line["turns"][-1]["finish_reason"] == "stop"
    ]
    assert formats
    assert all(formats) == (reply_format == "required")
