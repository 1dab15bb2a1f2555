"""A teacher's verified replies: what is kept, what is refused, and a student that says the same."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from builders import trajectory
from chat_server import ChatServer
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent, as_messages
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.embedded.network import new_model
from stateset_agents.embedded.tokenizer import build_tokenizer
from stateset_agents.environments.problems import ArithmeticProblems
from stateset_agents.environments.problems.arithmetic import steps_of
from stateset_agents.evaluation.kept_conversations import KeptConversations
from stateset_agents.reasoning import ReasoningDistillation
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.traces import Counts, Traces, verified_traces, write_traces
from stateset_agents.training.sft.trainer import SFTTrainer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

EASY = {"min_operations": 2, "max_operations": 2, "num_train": 12, "system_prompt": ""}


def solved(prompt: str) -> str:
    """The teacher's reply to `compute ...`."""
    expression = re.findall(r"compute ([0-9+*\- ]+[0-9])", prompt)[-1]
    steps = steps_of(expression)
    return f"<think>{' = '.join(steps)}</think><answer>{steps[-1]}</answer>"


def teacher_of(reply: Any) -> MultiTurnAgent:
    backend = ScriptedBackend(lambda request: reply(request))
    return MultiTurnAgent(AgentConfig(model_name="scripted", chat_template="plain"), backend=backend)


def good_teacher() -> MultiTurnAgent:
    return teacher_of(lambda request: solved(request.text))


def tiny_student(**settings: Any) -> MultiTurnAgent:
    backend = HuggingFaceBackend(tiny_model(), tiny_tokenizer(), copy_model=False)
    config = {"model_name": "tiny", "chat_template": "plain", "max_new_tokens": 64, **settings}
    return MultiTurnAgent(AgentConfig(**config), backend=backend)


QUICK = {"learning_rate": 1e-2, "validation_share": 0.0, "progress": False, "save_steps": 0}


@pytest.mark.long
async def test_a_student_says_what_its_teacher_said_after_fine_tuning_on_it(tmp_path):
    distillation = ReasoningDistillation(good_teacher(), tiny_student())
    prompt = Scenario(id="one", opening="compute 2 + 3 * 4", context={"answer": 14})
    traces = await distillation.generate_distillation_data([prompt])
    (trace,) = traces.kept
    assert {name: trace[name] for name in ("prompt", "thinking", "answer", "full_response")} == {
        "prompt": "compute 2 + 3 * 4",
        "thinking": "2 + 12 = 14",
        "answer": "14",
        "full_response": "<think>2 + 12 = 14</think><answer>14</answer>",
    }
    distilled = await distillation.train_student(traces, max_steps=120, output_dir=str(tmp_path), **QUICK)
    losses = [
        line.values["sft/loss"] for line in RunLog(distilled.run).metrics() if "sft/loss" in line.values
    ]
    assert losses[0] > 3
    assert losses[-1] < 0.01
    said = await distilled.agent.answer(
        distilled.agent.with_system_prompt(as_messages(prompt.opening)), sampling={"temperature": 0.0}
    )
    assert (said.message.reasoning, said.message.content) == (trace["thinking"], "<answer>14</answer>")
    await distillation.close()


async def test_only_right_replies_in_the_format_are_kept_and_each_once():
    replies = {
        "a": "<think>1</think><answer>1</answer>",
        "b": "<think>1</think><answer>2</answer>",  # wrong
        "c": "<answer>1</answer>",  # no thought
        "d": "It is 1.",  # no answer
        "e": OSError("the model is away"),
        "f": "<think>1</think><answer>1</answer>" + " " * 600,  # too long
    }
    teacher = teacher_of(
        lambda request: next(replies[key] for key in replies if f"task {key}" in request.text)
    )
    prompts = [Scenario(id=key, opening=f"task {key}", context={"answer": 1}) for key in replies]
    unknown = Scenario(id="u", opening="task a, truth unknown")
    distillation = ReasoningDistillation(teacher, tiny_student())
    traces = await distillation.generate_distillation_data([*prompts, unknown], samples=2, max_length=500)
    counts = traces.counts
    assert [trace["id"] for trace in traces.kept] == ["a"]
    assert (counts.asked, counts.kept, counts.repeated, counts.wrong) == (14, 1, 1, 4)
    assert (counts.failed, counts.cut, counts.unscored, counts.unformatted) == (2, 2, 2, 2)
    assert traces.kept[0]["teacher"] == {"model": "scripted", "weights": None}
    loose = await distillation.generate_distillation_data(prompts[:4], in_format=False)
    assert [trace["id"] for trace in loose.kept] == ["a", "c"]
    with pytest.raises(ConfigurationError, match=r"none of the teacher's 1 replies can be shown \(1 wrong\)"):
        await distillation.generate_distillation_data([prompts[1]])


async def test_no_prompt_that_is_held_out_is_asked():
    problems = ArithmeticProblems(**EASY)
    teacher = good_teacher()
    distillation = ReasoningDistillation(teacher, tiny_student(), environment=problems)
    held_out = problems.scenarios("test")[0]
    relabelled = Scenario(id="x", opening=held_out.opening, context=held_out.context)
    validation = problems.scenarios("validation")[0]
    for prompt, split in (
        (held_out, "test"),
        (relabelled, "test"),
        (held_out.opening, "test"),
        (validation, "validation"),
    ):
        with pytest.raises(ConfigurationError, match=f"is of the {split} split, which is held out"):
            await distillation.generate_distillation_data([prompt])
    traces = await distillation.generate_distillation_data()
    shown = {trace["prompt"] for trace in traces.kept}
    assert shown == {scenario.opening for scenario in problems.scenarios("train")}
    assert not shown & {
        scenario.opening for split in ("test", "validation") for scenario in problems.scenarios(split)
    }


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (None, "give prompts, or make ReasoningDistillation with an environment"),
        ("compute 1 + 1", "prompts must be a list of texts or scenarios"),
        ([" "], "a prompt must be text, a Scenario or a row"),
        ([3], "a prompt must be text, a Scenario or a row, got int 3"),
    ],
)
async def test_prompts_that_are_none_are_refused(prompts, problem):
    with pytest.raises(ConfigurationError, match=problem):
        await ReasoningDistillation(good_teacher(), tiny_student()).generate_distillation_data(prompts)


@pytest.mark.long
@pytest.mark.parametrize(("steps", "least"), [(150, 0.85), (400, 0.97)])
async def test_a_student_keeps_its_teacher_s_format_on_problems_it_never_saw(tmp_path, steps, least):
    """Sampled at temperature 1; seed 0 reaches .922 and .984 of 64 test problems."""
    problems = ArithmeticProblems(**{**EASY, "num_train": 1000})
    texts = [text for one in problems.scenarios("train") for text in (one.opening, solved(one.opening))]
    tokenizer = build_tokenizer(texts, max_length=128)
    tokenizer.save_pretrained(tmp_path / "new")
    new_model(tokenizer, seed=0).save_pretrained(tmp_path / "new")
    student = MultiTurnAgent(AgentConfig(model_name=str(tmp_path / "new"), max_new_tokens=48))
    distillation = ReasoningDistillation(good_teacher(), student, environment=problems)
    traces = await distillation.generate_distillation_data()
    settings = {**QUICK, "learning_rate": 3e-3, "per_device_train_batch_size": 16, "max_steps": steps}
    distilled = await distillation.train_student(traces, output_dir=str(tmp_path), **settings)
    await distillation.close()
    assert distilled.before is not None
    assert distilled.after is not None
    assert distilled.before.format == 0.0
    assert traces.format == 1.0
    assert distilled.after.format is not None
    assert distilled.after.format >= least


@pytest.mark.long
async def test_a_fine_tuning_on_traces_goes_on_bit_by_bit(tmp_path):
    distillation = ReasoningDistillation(
        good_teacher(), tiny_student(), environment=ArithmeticProblems(**EASY)
    )
    traces = await distillation.generate_distillation_data()
    settings = {**QUICK, "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 4}
    whole = await distillation.train_student(
        traces, measure_on=[], output_dir=str(tmp_path / "a"), **settings
    )
    weights = {name: value.clone() for name, value in whole.agent.backend.model.state_dict().items()}
    await distillation.close()
    assert whole.before is None
    again = SFTTrainer(
        tiny_student(),
        whole.run.path / "traces.jsonl",
        SFTConfig(run_name="distill", output_dir=str(tmp_path / "b"), **settings),
    )
    await again.load_checkpoint(whole.run.checkpoints / "step-000004")
    await again.train()
    state = again.agent.backend.model.state_dict()
    assert all(bool((state[name] == value).all()) for name, value in weights.items())
    await again.close()


async def test_the_teacher_may_be_behind_an_endpoint_and_what_it_said_is_not_asked_again(tmp_path):
    problems = ArithmeticProblems(**EASY)
    async with ChatServer(speak=solved) as server:
        teacher = EndpointAgent(ChatClient(server.url, "big"))
        distillation = ReasoningDistillation(teacher, tiny_student(), environment=problems)
        for number in (12, 0):
            with KeptConversations(tmp_path / "kept.jsonl", usage=lambda: teacher.usage) as kept:
                before = len(server.bodies)
                traces = await distillation.generate_distillation_data(kept=kept, max_length=99)
                assert len(server.bodies) - before == number
    assert traces.kept[0]["teacher"] == {"model": "big", "url": server.url}
    assert server.bodies[0]["temperature"] == 0.1
    assert server.bodies[0]["max_tokens"] == 99


def test_a_trace_has_the_tools_that_its_conversation_was_offered():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    said = trajectory("where?", "<think>a</think><answer>here</answer>", reward=1.0)
    (trace,) = verified_traces([(said, (tool,))], teacher={"model": "m"}).kept
    assert trace["tools"] == [tool]
    assert (trace["thinking"], trace["answer"], trace["prompt"]) == ("a", "here", "where?")


def test_traces_are_lines_that_sft_reads(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot write traces to"):
        write_traces([], tmp_path / "nowhere" / "traces.jsonl")
    cut = {"messages": [{"role": "assistant", "content": "half of an emoji: \ud83d"}]}
    write_traces([cut], tmp_path / "cut.jsonl")
    assert json.loads((tmp_path / "cut.jsonl").read_text()) == cut
    summary = Traces(kept=(), counts=Counts(asked=3, wrong=3), format=0.5, teacher={"model": "m"}).summary()
    assert json.loads(json.dumps(summary))["asked"] == 3
