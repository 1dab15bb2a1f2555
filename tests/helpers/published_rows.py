"""Rows as people publish them, and what each door makes of them: docs/evidence/published-rows.md.

export PYTHONPATH=.:tests/helpers:tests/helpers/servers:tests/helpers/trainings
.venv/bin/python tests/helpers/published_rows.py
"""

from __future__ import annotations

import asyncio
import base64
import csv
import gzip
import io
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
from chat_server import ChatServer
from PIL import Image as pillow
from repository_paths import ROOT
from tiny_vlm import save_tiny_vlm

from scripts.page_tables import write_table
from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.core.sources.datasets import Chats
from stateset_agents.environments.chat_logs import ChatLogs
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.rewards.verifiable import create_correctness_reward
from stateset_agents.training.sft.demonstrations import load_demonstrations
from stateset_agents.training.sft.distillation import ReasoningDistillation
from stateset_agents.training.sft.traces import write_traces
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import IMAGE_MARK, Image
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.trajectory import Status, Trajectory

__all__ = ["PUBLISHED", "Published", "row_of", "scripted", "vision_agent"]


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def says(text: str, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def calls(name: str, text: str = "", **arguments: Any) -> Message:
    call = ToolCall(name=name, arguments=arguments)
    return Message(role="assistant", content=text, tool_calls=(call,))


def schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"{name} it", "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A way to publish rows, and what is right for each door."""

    name: str
    rows: Sequence[dict[str, Any]]
    prompt: tuple[Message, ...] = ()
    """What the first row asks."""
    replies: tuple[Message, ...] = ()
    """What the first row shows, and is trained on."""
    tools: tuple[dict[str, Any], ...] = ()
    """What the first row offers."""
    context: dict[str, Any] = field(default_factory=dict)
    """Keys of its scenario's context."""
    answer: str | None = None
    """A reply that `correctness` finds right."""
    refused: dict[str, str] = field(default_factory=dict)
    """Door -> what its line says; all doors under `all`."""
    source: Callable[[Path, Sequence[dict[str, Any]]], Any] | None = None
    """Writes the rows; JSON lines unless another is given."""
    is_picture: bool = False

    def written(self, folder: Path) -> Any:
        return (self.source or jsonl)(folder, self.rows)


def jsonl(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return wrote(folder / "rows.jsonl", "\n".join(map(json.dumps, rows)).encode())


def wrote(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def gzipped(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return wrote(folder / "rows.jsonl.gz", gzip.compress("\n".join(map(json.dumps, rows)).encode()))


def json_array(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return wrote(folder / "rows.json", json.dumps(rows, indent=1).encode())


def table_of_text(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return wrote(folder / "rows.csv", text.getvalue().encode())


def parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(list(rows)).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def arrow(folder: Path, rows: Sequence[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list(list(rows))


TRACK = schema("track", order_id={"type": "string"})
TRACK_SCHEMA = TRACK["function"]["parameters"]
PAY = schema("pay", amount={"type": "number"}, note={"type": "string"})
SHOP, WHERE = system("You answer for a shop."), user("Where is K27?")
CALL, SAYS = calls("track", order_id="K27"), says("In Lyon.")


def openai_call(name: str, arguments: Any, id: str = "a") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*messages: dict[str, Any] | tuple[str, str], **more: Any) -> dict[str, Any]:
    """A row of OpenAI's; a pair is role and content."""
    read = [{"role": item[0], "content": item[1]} if isinstance(item, tuple) else item for item in messages]
    return {"messages": read, **more}


def share(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": value} for name, value in turns], **more}


TALK = (("system", SHOP.content), ("user", WHERE.content))
TOOL_TALK = chat(
    *TALK,
    {"role": "assistant", "content": None, "tool_calls": [openai_call("track", '{"order_id": "K27"}')]},
    {"role": "tool", "tool_call_id": "a", "content": "Lyon"},
    ("assistant", "In Lyon."),
    tools=[TRACK],
)
RECORDED = [{"name": "track", "arguments": {"order_id": "K27"}, "content": "Lyon"}]
WITH_TOOLS: dict[str, Any] = {
    "prompt": (SHOP, WHERE),
    "replies": (CALL, SAYS),
    "tools": (TRACK,),
    "context": {"recorded": RECORDED, "reference": "In Lyon."},
}
PAID = chat(
    ("user", "Pay 20."),
    {"role": "assistant", "tool_calls": [openai_call("pay", {"amount": 20, "note": "x"})]},
    {"role": "tool", "tool_call_id": "a", "content": "paid"},
    ("assistant", "Done."),
    tools=[PAY],
)
TRACKED = {**TOOL_TALK, "messages": [dict(message) for message in TOOL_TALK["messages"]]}
TRACKED["messages"][2] |= {"tool_calls": [openai_call("track", {"order_id": "K27"})]}
NO_REPLY = {"sft": "it shows no reply to imitate"}
NO_TALK = {"ChatLogs": "this row is no conversation", "sft": "this row is no conversation"}
SUM = {"question": "What is 2 + 3? End with 'Answer: ' and the sum.", "answer": "5"}


def picture() -> bytes:
    file = io.BytesIO()
    pillow.new("RGB", (32, 32), "red").save(file, "PNG")
    return file.getvalue()


def asks_of(url: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return chat({"role": "user", "content": parts}, ("assistant", "red"))


def export(name: str) -> Callable[[Path, Sequence[dict[str, Any]]], Path]:
    """The file of an agent's two conversations that a platform's SDK wrote (see platform_exports.py)."""
    return lambda folder, rows: ROOT / "tests" / "fixtures" / "exports" / name


WELCOME = says("You are welcome.")
EXPORTED: dict[str, Any] = {
    "rows": [{}, {}],
    "prompt": (SHOP, WHERE),
    "replies": (CALL, SAYS, WELCOME),
    "tools": (schema("track", order_id={"type": "string"}),),
    "context": {
        "recorded": RECORDED,
        "reference": "You are welcome.",
        "script": ["Thanks, write to ann@example.org!"],
    },
}
EXPORTED["tools"][0]["function"]["description"] = "Where a parcel is."
INSPECTED: dict[str, Any] = {
    "rows": [{}, {}],
    "prompt": (SHOP, WHERE),
    "replies": (calls("track", "tool call for tool track", order_id="K27"), SAYS),
    "context": {"recorded": RECORDED, "answer": "Lyon", "success": True, "scores": {"includes": "C"}},
    "answer": "Answer: Lyon",
}
INSPECTED["tools"] = (schema("track", order_id={"type": "string", "description": "E.g. K27."}),)
INSPECTED["tools"][0]["function"]["description"] = "Where a parcel is."
INSPECTED["tools"][0]["function"]["parameters"]["additionalProperties"] = False


PUBLISHED: tuple[Published, ...] = (
    Published(
        name='TRL `{"prompt": TEXT}`',
        rows=[{"prompt": "Where is K27?", "ground_truth": "Lyon"}],
        prompt=(WHERE,),
        context={"ground_truth": "Lyon", "script": []},
        refused=NO_REPLY,
    ),
    Published(
        name="TRL `prompt` as messages",
        rows=[{"prompt": [{"role": "user", "content": "Where is K27?"}], "answer": "Lyon"}],
        prompt=(WHERE,),
        context={"answer": "Lyon"},
        answer="Answer: Lyon",
        refused=NO_REPLY,
    ),
    Published(
        name="... with a system message and earlier turns",
        rows=[{"prompt": chat(*TALK, ("assistant", "Lyon?"), ("user", "Sure?"))["messages"]}],
        prompt=(SHOP, WHERE, says("Lyon?"), user("Sure?")),
        refused=NO_REPLY,
    ),
    Published(
        name="TRL `prompt` and `completion`, text",
        rows=[{"prompt": "Where is K27?", "completion": "In Lyon."}],
        prompt=(WHERE,),
        replies=(SAYS,),
        context={"reference": "In Lyon."},
    ),
    Published(
        name="... messages: the completion trains",
        rows=[
            {
                "prompt": chat(*TALK, ("assistant", "Lyon?"), ("user", "Sure?"))["messages"],
                "completion": chat(("assistant", "Yes."))["messages"],
            }
        ],
        prompt=(SHOP, WHERE, says("Lyon?"), user("Sure?")),
        replies=(says("Yes."),),
        context={"reference": "Yes."},
    ),
    Published(
        name="TRL `prompt`, `chosen`, `rejected`",
        rows=[{"prompt": "Where is K27?", "chosen": "In Lyon.", "rejected": "No."}],
        prompt=(WHERE,),
        context={"chosen": "In Lyon."},
        refused=NO_REPLY,
    ),
    Published(
        name="`question`, `answer`",
        rows=[SUM],
        prompt=(user(SUM["question"]),),
        replies=(says("5"),),
        context={"answer": "5", "question": SUM["question"]},
        answer="Answer: 5",
    ),
    Published(
        name="GSM8K's answers, `... #### 5`",
        rows=[SUM | {"answer": "2 and 3 are 5.\n#### 5"}],
        prompt=(user(SUM["question"]),),
        replies=(says("2 and 3 are 5.\n#### 5"),),
        context={"answer": "5", "solution": "2 and 3 are 5.\n#### 5"},
        answer="Answer: 5",
    ),
    Published(
        name="Alpaca `instruction`, `input`, `output`",
        rows=[{"instruction": "Translate.", "input": "Hund", "output": "dog"}],
        prompt=(user("Translate.\n\nHund"),),
        replies=(says("dog"),),
        context={"reference": "dog"},
    ),
    Published(
        name="OpenAI `messages`",
        rows=[chat(*TALK, ("assistant", "In Lyon."), ("user", "When?"), ("assistant", "On Friday."))],
        prompt=(SHOP, WHERE),
        replies=(SAYS, says("On Friday.")),
        context={"script": ["When?"], "reference": "On Friday."},
    ),
    Published(
        name="... the agent greets first",
        rows=[chat(("assistant", "Hello!"), ("user", "Where is K27?"), ("assistant", "In Lyon."))],
        prompt=(says("Hello!"), WHERE),
        replies=(SAYS,),
    ),
    Published(
        name="OpenAI fine-tuning files, `weight`",
        rows=[
            chat(
                ("user", "Where is K27?"),
                {"role": "assistant", "content": "Who asks?", "weight": 0},
                ("user", "Me."),
                {"role": "assistant", "content": "In Lyon.", "weight": 1},
                ("user", "Thanks."),
                {"role": "assistant", "content": "Bye.", "weight": None},
                parallel_tool_calls=False,
            )
        ],
        prompt=(WHERE,),
        replies=(SAYS, says("Bye.")),
    ),
    Published(
        name="`tool_calls`, `tools` as a list",
        rows=[TOOL_TALK],
        **WITH_TOOLS,
    ),
    Published(
        name="`tools` and `messages` as JSON text",
        rows=[{name: json.dumps(value) for name, value in TOOL_TALK.items()}],
        **WITH_TOOLS,
    ),
    Published(
        name="`function_call`, role `function`, `functions`",
        rows=[
            chat(
                *TALK,
                {"role": "assistant", "content": None, "function_call": TOOL_CALL["function"]},
                {"role": "function", "name": "track", "content": "Lyon"},
                ("assistant", "In Lyon."),
                functions=[TRACK["function"]],
            )
            for TOOL_CALL in (openai_call("track", '{"order_id": "K27"}'),)
        ],
        **WITH_TOOLS,
    ),
    *(
        Published(
            name=f"a thought: {name}",
            rows=[chat(("user", "Where is K27?"), {"role": "assistant", **reply})],
            prompt=(WHERE,),
            replies=(says("In Lyon.", "Orders."),),
            context={"reference": "In Lyon."},
        )
        for name, reply in (
            ("`reasoning_content`", {"content": "In Lyon.", "reasoning_content": "Orders."}),
            ("`thinking`", {"content": "In Lyon.", "thinking": "Orders."}),
            ("`<think>` in the words", {"content": "<think>Orders.</think>In Lyon."}),
            ("only `</think>`", {"content": "Orders.</think>\n\nIn Lyon."}),
        )
    ),
    Published(
        name="ShareGPT `from`, `value`",
        rows=[share(("system", SHOP.content), ("human", WHERE.content), ("gpt", "In Lyon."))],
        prompt=(SHOP, WHERE),
        replies=(SAYS,),
    ),
    Published(
        name="xLAM `query`, `answers`, `tools`",
        rows=[
            {
                "id": 1,
                "query": "Where is K27?",
                "answers": '[{"name": "track", "arguments": {"order_id": "K27"}}]',
                "tools": json.dumps(
                    [
                        {
                            "name": "track",
                            "description": "track it",
                            "parameters": {
                                "order_id": {"description": "E.g. K27.", "type": "str"},
                                "days": {"description": "At most.", "type": "int, optional", "default": 3},
                            },
                        }
                    ]
                ),
            }
        ],
        prompt=(WHERE,),
        replies=(CALL,),
        tools=(
            {
                "type": "function",
                "function": {
                    "name": "track",
                    "description": "track it",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            "order_id": {"type": "string", "description": "E.g. K27."},
                            "days": {"type": "integer", "description": "At most.", "default": 3},
                        },
                        "required": ["order_id"],
                    },
                },
            },
        ),
        context={"recorded": [{"name": "track", "arguments": {"order_id": "K27"}, "content": None}]},
    ),
    Published(
        name="Hermes function calling",
        rows=[
            share(
                ("system", SHOP.content),
                ("human", WHERE.content),
                ("gpt", "<tool_call>\n{'arguments': {'order_id': 'K27'}, 'name': 'track'}\n</tool_call>"),
                ("tool", "<tool_response>\nLyon\n</tool_response>"),
                ("gpt", "In Lyon."),
                tools=json.dumps([TRACK]),
            )
        ],
        **WITH_TOOLS,
    ),
    Published(
        name="APIGen-MT",
        rows=[
            share(
                ("human", WHERE.content),
                ("function_call", '{"name": "track", "arguments": {"order_id": "K27"}}'),
                ("observation", "Lyon"),
                ("gpt", "In Lyon."),
                tools=json.dumps([TRACK["function"]]),
                system=SHOP.content,
            )
        ],
        **WITH_TOOLS,
    ),
    Published(
        name="tau-bench `traj`",
        rows=[{"task_id": 0, "reward": 1.0, "traj": TOOL_TALK["messages"], "tools": [TRACK]}],
        source=json_array,
        **WITH_TOOLS | {"context": {"recorded": RECORDED, "reward": 1.0}},
    ),
    Published(
        name="Anthropic's blocks",
        rows=[
            chat(
                *TALK,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Orders."},
                        {"type": "tool_use", "id": "a", "name": "track", "input": {"order_id": "K27"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Lyon"}],
                },
                ("assistant", [{"type": "text", "text": "In Lyon."}]),
                tools=[{"name": "track", "description": "track it", "input_schema": TRACK_SCHEMA}],
            )
        ],
        **WITH_TOOLS | {"replies": (replace(CALL, reasoning="Orders."), SAYS)},
    ),
    Published(
        name="LangChain's messages",
        rows=[
            {
                "messages": [
                    {"type": "system", "content": SHOP.content},
                    {"type": "human", "data": {"content": WHERE.content, "type": "human"}},
                    {
                        "lc": 1,
                        "type": "constructor",
                        "id": ["langchain", "schema", "messages", "AIMessage"],
                        "kwargs": {
                            "content": "",
                            "tool_calls": [{"name": "track", "args": {"order_id": "K27"}, "id": "a"}],
                        },
                    },
                    {"type": "tool", "content": "Lyon", "tool_call_id": "a"},
                    {"type": "ai", "content": "In Lyon."},
                ],
                "tools": [TRACK],
            }
        ],
        **WITH_TOOLS,
    ),
    Published(name="Langfuse: observations", source=export("langfuse-observations.jsonl"), **EXPORTED),
    Published(name="LangSmith: runs", source=export("langsmith-runs.jsonl"), **EXPORTED),
    Published(
        name="OpenTelemetry: spans as the SDK prints them",
        source=export("otel-spans-console.json"),
        **EXPORTED,
    ),
    Published(name="... OTLP's JSON", source=export("otlp-spans.json"), **EXPORTED),
    Published(
        name="... the event of a call, as the SDK prints it",
        source=export("otel-logs-console.json"),
        **EXPORTED,
    ),
    Published(name="... in OTLP's JSON", source=export("otlp-logs.json"), **EXPORTED),
    Published(name="Inspect: `.json` logs", source=export("inspect.json"), **INSPECTED),
    Published(
        name="Inspect: `.eval` logs",
        rows=[],
        source=export("inspect.eval"),
        refused={"all": "is packed: `inspect log convert"},
    ),
    Published(
        name="a picture as a data URL, for a model that sees",
        rows=[asks_of("data:image/png;base64," + base64.b64encode(picture()).decode())],
        prompt=(Message(role="user", content=f"{IMAGE_MARK}What is it?", images=(Image(data=picture()),)),),
        replies=(says("red"),),
        is_picture=True,
    ),
    Published(
        name="a picture by URL: nothing is fetched",
        rows=[asks_of("https://example.org/red.png")],
        refused={"all": "a picture must be a data URL"},
    ),
    Published(
        name="pictures in a column",
        rows=[{"prompt": "What is it?", "image": "red.png"}],
        refused={"all": "column 'image' has pictures"},
    ),
    Published(
        name="Arrow with nulls, two tools in a table",
        rows=[TRACKED, PAID],
        source=arrow,
        **WITH_TOOLS,
    ),
    Published(
        name="parquet",
        rows=[TRACKED, PAID],
        source=parquet,
        **WITH_TOOLS,
    ),
    Published(name="JSON array", rows=[TOOL_TALK], source=json_array, **WITH_TOOLS),
    Published(name="`.jsonl.gz`", rows=[TOOL_TALK], source=gzipped, **WITH_TOOLS),
    Published(
        name="CSV: every cell is text",
        rows=[
            {"question": "NA", "answer": "01234", "level": "5"},
            {"question": "7", "answer": "8", "level": ""},
        ],
        source=table_of_text,
        prompt=(user("NA"),),
        replies=(says("01234"),),
        context={"answer": "01234", "level": "5"},
        answer="Answer: 01234",
    ),
    Published(
        name="a scenario of ours, `opening`",
        rows=[{"opening": "Where is K27?", "topic": "delivery", "answer": "Lyon"}],
        prompt=(WHERE,),
        context={"answer": "Lyon"},
        answer="Answer: Lyon",
        refused=NO_TALK,
    ),
    Published(
        name="... `topic` and `context` alone: the user makes an opening up",
        rows=[{"context": "Order delayed"}],
        prompt=(user("Order delayed."),),
        refused=NO_TALK,
    ),
    Published(
        name="no column that is known",
        rows=[{"utterance": "Where is K27?", "reply": "In Lyon."}],
        refused={
            "scenarios": "columns: {opening: utterance}",
            "evaluate": "columns: {opening: utterance}",
            "distill": "columns: {opening: utterance}",
            **NO_TALK,
        },
    ),
    Published(
        name="a question about what stands in another column",
        rows=[{"question": "Where is it?", "context": "K27 is in Lyon.", "answer": "Lyon"}],
        refused={"all": "nothing says how the model is shown it"},
    ),
    Published(
        name="`question` as a number",
        rows=[{"question": 5, "answer": "x"}],
        refused={"all": "column 'question' must be text, got int 5"},
    ),
)


async def scripted(*replies: str) -> MultiTurnAgent:
    backend = ScriptedBackend(lambda request: replies[min(request.turn, len(replies) - 1)])
    agent = MultiTurnAgent(AgentConfig(max_new_tokens=200), backend=backend)
    await agent.initialize()
    return agent


async def vision_agent(folder: Path) -> MultiTurnAgent:
    agent = MultiTurnAgent(AgentConfig(model_name=save_tiny_vlm(folder), max_new_tokens=2))
    await agent.initialize()
    return agent


@reward_function
def one(trajectory: Trajectory) -> float:
    return 1.0


def prompt_ids(agent: MultiTurnAgent, published: Published) -> tuple[int, ...]:
    """The tokens of the first prompt, from messages that are written down by hand."""
    history = agent.history()
    return tuple(history.next(history.place(published.prompt), published.tools).ids)


def reply_ids(agent: MultiTurnAgent, published: Published, replies: Sequence[Message]) -> list[int]:
    return [id for reply in replies for id in agent.template.reply(reply, published.tools)]


def calls_as_text(reply: Message) -> str:
    written = [json.dumps({"name": c.name, "arguments": dict(c.arguments)}) for c in reply.tool_calls]
    return "".join(f"<tool_call>{text}</tool_call>" for text in written) + reply.content


async def first_played(environment: Any, agent: MultiTurnAgent, published: Published) -> Trajectory:
    """The first scenario's conversation, as it would train."""
    scenario = environment.scenarios("train")[0]
    for key, value in published.context.items():
        assert scenario.context[key] == value, (key, scenario.context)
    [group] = await ComputationalEngine(agent, environment, one).rollout([scenario], seed=0, step=0)
    trajectory = group.trajectories[0]
    assert trajectory.status is not Status.FAILED, trajectory.error
    assert trajectory.turns[0].prompt_ids == prompt_ids(agent, published)
    assert trajectory.opening == published.prompt
    return trajectory


async def scenarios(source: Any, published: Published, agent: MultiTurnAgent) -> None:
    environment = ConversationEnvironment(source, user=None)
    trajectory = await first_played(environment, agent, published)
    prompt = prompt_ids(agent, published)
    assert tuple(trajectory.rows[0].token_ids[: len(prompt)]) == prompt  # what an update reads
    assert not any(trajectory.rows[0].action_mask[: len(prompt)])


async def chat_logs(source: Any, published: Published, agent: MultiTurnAgent) -> None:
    environment = ChatLogs(source)
    await first_played(environment, agent, published)
    if "recorded" in published.context:  # who does as the row did succeeds, and reads what it read
        good = await scripted(*map(calls_as_text, (*published.replies, says("Bye."))))
        trajectory = await first_played(environment, good, published)
        assert trajectory.success is True
        results = [message.content for message in trajectory.messages if message.role == "tool"]
        assert results[0] == (
            published.context["recorded"][0]["content"] or "error: no answer is recorded for this call"
        )


async def sft(source: Chats, published: Published, agent: MultiTurnAgent) -> None:
    samples = load_demonstrations(agent, source).train
    assert len(samples) == len(published.rows)
    turns = samples[0].trajectory.turns
    assert turns[0].prompt_ids == prompt_ids(agent, published)
    tokens = [id for turn in turns for id in turn.completion.token_ids]
    trained = [id for id, weight in zip(tokens, samples[0].advantages, strict=True) if weight]
    assert trained == reply_ids(agent, published, published.replies)


async def distill(source: Any, published: Published, agent: MultiTurnAgent) -> None:
    prompts = source if isinstance(source, Path) else list(source)
    async with ChatServer(speak=lambda text: "It is in Lyon.") as server:
        teacher = EndpointAgent(ChatClient(server.url, "teacher"))
        distillation = ReasoningDistillation(teacher, agent, reward=one)
        traces = await distillation.generate_distillation_data(prompts, in_format=False)
    asked = [(body["messages"], body.get("tools", [])) for body in server.bodies]
    assert ([message.to_openai() for message in published.prompt], list(published.tools)) in asked
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "traces.jsonl"
        write_traces(traces.kept, file)
        samples = load_demonstrations(agent, file).train
    *earlier, turn = samples[0].trajectory.turns
    num_earlier = sum(len(before.completion.token_ids) for before in earlier)
    assert not any(samples[0].advantages[:num_earlier])  # what the row's assistant said before
    assert turn.completion.prompt_ids == prompt_ids(agent, published)
    assert list(turn.completion.token_ids) == reply_ids(agent, published, [says("It is in Lyon.")])


async def evaluated(source: Any, published: Published, agent: MultiTurnAgent) -> None:
    environment = ConversationEnvironment(source, user=None)
    rewarded = published.answer is not None
    speaker = await scripted(published.answer or "") if rewarded else agent
    reward = create_correctness_reward() if rewarded else one
    first = environment.scenarios("train")[:1]
    result = await evaluate(speaker, environment, reward, first)
    assert result.mean_reward == 1.0
    [trajectory] = result.groups[0].trajectories
    assert trajectory.turns[0].prompt_ids == prompt_ids(speaker, published)


DOORS: dict[str, Callable[[Any, Published, MultiTurnAgent], Awaitable[None]]] = {
    "scenarios": scenarios,
    "ChatLogs": chat_logs,
    "sft": sft,
    "distill": distill,
    "evaluate": evaluated,
}


async def answer_of(door: str, published: Published, agent: MultiTurnAgent) -> str:
    """`read`, where what is asked and trained is right, else the line that refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source = published.written(Path(folder))
        try:
            await DOORS[door](source, published, agent)
        except ConfigurationError as error:
            line = str(error).replace(f"{folder}/", "")
            assert "\n" not in line
            return line
    return "read"


async def row_of(published: Published, agent: MultiTurnAgent) -> str:
    """The row of the table that these doors make; AssertionError where one does something else."""
    cells = []
    for door in DOORS:
        answer = await answer_of(door, published, agent)
        refusal = published.refused.get(door, published.refused.get("all"))
        assert answer == "read" if refusal is None else refusal in answer, (door, answer)
        cells.append("read" if refusal is None else f"refused: {refusal}")
    return f"| {published.name} | {' | '.join(cells)} |"


async def table() -> str:
    """The table in Markdown."""
    rows = [f"| a row is | {' | '.join(DOORS)} |", f"|---{'|---' * len(DOORS)}|"]
    with tempfile.TemporaryDirectory() as folder:
        sees, reads = await vision_agent(Path(folder)), await scripted("It is in Lyon.")
        for published in PUBLISHED:
            rows.append(await row_of(published, sees if published.is_picture else reads))
    return "\n".join(rows)


if __name__ == "__main__":
    write_table("evidence/published-rows.md", "rows", f"\n{asyncio.run(table())}\n")
