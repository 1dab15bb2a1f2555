"""One agent program in three dialects, by the official clients: the same rows, whatever was spoken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines import make_engine
from tiny_models import tiny_model
from tiny_training import make_trainer, plain_logprobs

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.programs.external_program import ExternalProgram
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.trajectory import Status, Trajectory

DIALECTS = ("chat", "responses", "by_id", "messages")
CLERK = """
import json, sys

task = json.loads(sys.stdin.readline())
dialect, system, opening = task["context"]["dialect"], "be brief", task["opening"]
look = {"name": "look", "parameters": {"type": "object"}}


def result(name, arguments):
    return f"{name} {arguments.get('order')}: shipped"


def chat():
    import openai

    client = openai.OpenAI()
    tools = [{"type": "function", "function": look}]
    messages = [{"role": "system", "content": system}, {"role": "user", "content": opening}]
    fields = {"model": "m", "messages": messages, "tools": tools}
    first = client.chat.completions.create(**fields).choices[0].message
    messages.append(first)
    for call in first.tool_calls or []:
        text = result(call.function.name, json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    messages.append({"role": "user", "content": "so?"})
    chunks = client.chat.completions.create(**fields, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def responses():
    import openai

    client = openai.OpenAI()
    items = [{"role": "user", "content": opening}]
    fields = {"model": "m", "instructions": system, "tools": [{"type": "function", "strict": True, **look}]}
    first = client.responses.create(input=items, **fields)
    more = []
    for item in first.output:
        if item.type == "function_call":
            text = result(item.name, json.loads(item.arguments))
            more.append({"type": "function_call_output", "call_id": item.call_id, "output": text})
    more.append({"role": "user", "content": "so?"})
    if dialect == "by_id":
        fields |= {"input": more, "previous_response_id": first.id}
    else:
        fields |= {"input": [*items, *first.output, *more], "store": False}
    with client.responses.stream(**fields) as stream:
        return "".join(event.delta for event in stream if event.type == "response.output_text.delta")


by_id = responses


def messages():
    import anthropic

    client = anthropic.Anthropic()
    tool = {"name": look["name"], "input_schema": look["parameters"]}
    talk = [{"role": "user", "content": opening}]
    fields = {"model": "m", "max_tokens": 400, "system": system, "messages": talk, "tools": [tool]}
    first = client.messages.create(**fields)
    blocks = [
        {"type": "tool_result", "tool_use_id": block.id, "content": result(block.name, block.input)}
        for block in first.content
        if block.type == "tool_use"
    ]
    talk += [first.to_param(), {"role": "user", "content": [*blocks, {"type": "text", "text": "so?"}]}]
    with client.messages.stream(**fields) as stream:
        return "".join(stream.text_stream)


said = globals()[dialect]()
print(json.dumps({"reward": len(said) % 7 / 7, "success": "shipped" in said, "metadata": {"said": said}}))
"""


def clerk(folder: Path) -> ExternalProgram:
    path = folder / "clerk.py"
    path.write_text(CLERK)
    tasks = [{"id": name, "opening": "K1?", "context": {"dialect": name}} for name in DIALECTS]
    return ExternalProgram([sys.executable, str(path)], tasks, verdict="stdout")


def assert_trained_as_sampled(talk: Trajectory) -> None:
    """The trained tokens of each row are those that its turns sampled, in their order."""
    for row in talk.rows:
        trained = [token for token, bit in zip(row.token_ids, row.action_mask, strict=True) if bit]
        sampled = [token for turn in row.turns[row.trains_from :] for token in turn.completion.token_ids]
        assert trained == sampled
    assert sum(sum(row.action_mask) for row in talk.rows) == talk.num_agent_tokens


@pytest.mark.long
async def test_the_same_program_gives_the_same_rows_in_every_dialect(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"order": "%s"}}</tool_call>'
    replies = ["<think>Two.</think>Let me look. " + call % "K1" + call % "K2", "Both are shipped."]
    environment = clerk(tmp_path)
    backend = ScriptedBackend(lambda request: replies[request.turn])
    async with MultiTurnAgent(backend=backend) as agent:
        engine = make_engine(
            agent,
            environment,
            EnvironmentReward(),
            num_generations=1,
            episode_retries=0,
            turn_timeout=60.0,
        )
        groups = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    talks = [group.trajectories[0] for group in groups]
    for talk in talks:
        assert (talk.error, talk.status, talk.success) == (None, Status.TERMINATED, True)
        assert talk.metadata == {"said": "Both are shipped."}
        assert len(talk.rows) == 1
        assert_trained_as_sampled(talk)
    roles = ["system", "user", "assistant", "tool", "tool", "user", "assistant"]
    assert [message.role for message in talks[0].messages] == roles
    assert [message.content for message in talks[0].messages[3:5]] == [
        "look K1: shipped",
        "look K2: shipped",
    ]
    assert {talk.token_ids == talks[0].token_ids for talk in talks} == {True}
    assert {talk.messages == talks[0].messages for talk in talks} == {True}


@pytest.mark.long
async def test_a_program_trains_in_every_dialect_on_what_was_sampled(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        environment=clerk(tmp_path),
        max_steps=2,
        save_steps=0,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=4,
        num_generations=2,
        use_reference_model=False,
    )
    async with trainer:
        await trainer.train()
    rollouts = list(RunLog(trainer.run).rollouts())
    assert {rollout.scenario for rollout in rollouts} == set(DIALECTS)
    for rollout in rollouts:
        assert (rollout.status, rollout.error) == ("terminated", None)
        talk = trajectory_of(rollout)
        assert len(talk.turns) == 2
        assert_trained_as_sampled(talk)
        for row in talk.rows:
            stored = [p for p, bit in zip(row.logprobs, row.action_mask, strict=True) if bit]
            expected = plain_logprobs(tiny_model("llama"), row).tolist()  # as the first step had it
            assert (stored == pytest.approx(expected, abs=1e-4)) is (rollout.step == 1)
