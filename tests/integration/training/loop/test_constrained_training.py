"""Rollouts under a grammar, and the update that learns from them, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from chat_templates import trl_tokenizer
from programs import program
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_environment, make_trainer

from stateset_agents.backends.grammars import Grammars
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.replies.thoughts import read_reasoned
from stateset_agents.core.environment import ReplyLimits
from stateset_agents.core.reward import EnvironmentReward, reward_function
from stateset_agents.environments.problems.arithmetic import ArithmeticProblems
from stateset_agents.environments.programs.external_program import ExternalProgram
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.constraint import Constraint
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


WITH_GRAMMARS = """
schema = {"type": "object", "properties": {"at": {"enum": ["Oslo", "Rome"]}, "n": {"type": "integer"}},
          "required": ["at"], "additionalProperties": False}
tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("look", "find")]
told = []
for fields in (
    {"tools": tools, "tool_choice": "required"},
    {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "find"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}},
    {},
):
    messages.clear()
    say(task["opening"], **fields)
    told.append(messages[-1])
end(reward=sum(map(ord, str(told))) % 97 / 97, metadata={"told": told})
"""


async def test_what_a_program_s_requests_ask_for_trains_as_it_was_sampled(tmp_path: Path) -> None:
    """A grammar of the request's own, by its masks replayed from nothing but what rollouts.jsonl has."""
    environment = ExternalProgram(
        program(tmp_path, WITH_GRAMMARS), [{"id": "t", "opening": "hi"}], verdict="stdout"
    )
    trainer = make_trainer(
        tmp_path,
        agent=agent_of(max_new_tokens=150),
        environment=environment,
        reward=EnvironmentReward(),
        log_rollouts=True,
        max_steps=2,
        num_generations=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        temperature=0.8,
    )
    async with trainer:
        await trainer.train()
    ratios = [line.get("policy/first_ratio_max") for line in lines_of(tmp_path, "metrics.jsonl")]
    assert [ratio for ratio in ratios if ratio is not None] == pytest.approx([1.0, 1.0], abs=1e-4)
    grammars = {
        event["digest"]: event
        for event in lines_of(tmp_path, "events.jsonl")
        if event.get("event") == "grammar"
    }
    assert len(grammars) == 3
    rollouts = list(RunLog(trainer.run).rollouts())
    assert len(rollouts) == 4
    for rollout in rollouts:
        (look, find, answer, free) = rollout.metadata["told"]
        assert find["tool_calls"][0]["function"]["name"] == "find"
        for told in (look["tool_calls"][0]["function"]["arguments"], answer["content"]):
            assert json.loads(told)["at"] in ("Oslo", "Rome")
        assert free["content"]
        records = [turn.constraint for turn in rollout.turns]
        assert [record and record["kind"] for record in records] == ["call", "call", "json", None]
        assert [turn.forced > 5 for turn in rollout.turns] == [True, True, True, False]
        for turn, record in zip(trajectory_of(rollout).turns, records, strict=True):
            completion, temperature = turn.completion, 0.8
            ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
            logits = tiny_model()(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1] / temperature
            if record is not None:
                event = grammars[record["digest"]]
                constraint = Constraint(
                    **{name: event[name] for name in ("grammar", "kind", "version", "opener")},
                    stop_ids=tuple(event["stop_ids"]),
                    limit=record["limit"],
                )
                masks = Grammars(tiny_tokenizer()).replay(constraint, completion.token_ids)
                bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
                logits = logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
            if rollout.step == 1:
                said = torch.tensor(completion.token_ids)[:, None]
                expected = logits.log_softmax(-1).gather(-1, said)[:, 0]
                assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


async def test_a_bias_draws_a_model_to_calls_and_falls_to_nothing(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), trl_tokenizer("chatml")
    model.config.max_position_embeddings = 1024
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer.hf), mean_resizing=False)
    config = AgentConfig(model_name="tiny", chat_template="chatml", constrain="calls", max_new_tokens=100)
    agent = MultiTurnAgent(config, backend=HuggingFaceBackend(model, tokenizer, copy_model=False))
    trainer = make_trainer(
        tmp_path,
        agent=agent,
        environment=environment(max_turns=1),
        reward=asks_for_a,
        max_steps=3,
        call_bias=20.0,
        call_bias_steps=2,
        learning_rate=1e-6,
    )
    async with agent:
        await trainer.train()
    assert agent.call_bias == 0.0  # evaluations have none
    (opener,) = {
        event["opener"] for event in lines_of(tmp_path, "events.jsonl") if event.get("event") == "grammar"
    }
    (first,) = tokenizer.encode_markup(opener)
    replies: dict[int, list[tuple[Any, bool]]] = {}
    for rollout in RunLog(trainer.run).rollouts("train"):
        (turn,) = rollout.turns
        assert turn.constraint is not None
        opened = trajectory_of(rollout).turns[0].completion.token_ids[0] == first
        replies.setdefault(rollout.step, []).append((turn.constraint["raised"], opened))
    assert [{str(raised) for raised, _ in of_step} for of_step in replies.values()] == [
        {str([[first], 20.0])},
        {str([[first], 10.0])},
        {"None"},
    ]
    assert all(opened for _, opened in replies[1])
    assert not all(opened for _, opened in replies[3])
    ratios = [line.get("policy/first_ratio_max") for line in lines_of(tmp_path, "metrics.jsonl")]
    assert {round(ratio, 3) for ratio in ratios if ratio is not None} == {1.0}


async def test_a_bias_is_refused_where_no_call_begins_with_the_first_token() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    async with agent_of(constrain="calls") as agent:
        agent.call_bias = 1.0
        with pytest.raises(ConfigurationError, match="no call begins there"):
            await agent.constraint([tool], ReplyLimits())


async def test_a_bias_without_a_grammar_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, agent=agent_of(), environment=environment(), call_bias=2.0, call_bias_steps=2
    )
    with pytest.raises(ConfigurationError, match=r"set AgentConfig\.constrain to calls"):
        await trainer.initialize()
