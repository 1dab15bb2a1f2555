"""Conversations as spans by OpenTelemetry's own SDK, in memory and over OTLP/HTTP to a server of the test."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from engines import make_engine
from tiny_training import make_trainer

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.sources.imports import read_import
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.runs.conversation_spans import record_conversation
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory

pytestmark = pytest.mark.trackers


@pytest.fixture(scope="session")
def traced() -> tuple[Any, Any]:
    """The application's own provider, of which a process sets one, and its exporter."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider, exporter


@pytest.fixture
def provider(traced: tuple[Any, Any]) -> Any:
    return traced[0]


@pytest.fixture
def spans(traced: tuple[Any, Any]) -> Any:
    traced[1].clear()
    return traced[1]


def test_without_a_provider_it_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", None)  # as where nobody has set one
    trainer = make_trainer(tmp_path, report_to="opentelemetry")
    with pytest.raises(ConfigurationError, match="needs a tracer provider, or nothing would be sent: call"):
        asyncio.run(trainer.initialize())


async def played(*replies: str, fails: bool = False) -> Trajectory:
    async def get_order(order_id: str) -> str:
        """Look it up."""
        await asyncio.sleep(0.05)
        return f"{order_id} is shipped"

    def user(scenario: Any, seed: int) -> Any:
        raise RuntimeError("no user")

    environment = ConversationEnvironment(
        [{"id": "t", "family": "status", "opening": "where is K27?"}],
        tools=[get_order],
        user=user if fails else None,
        success=lambda messages: "shipped" in messages[-1].content,
        system_prompt="be brief",
    )
    agent = MultiTurnAgent(backend=ScriptedBackend(list(replies), delay=lambda request: 0.02))
    async with agent:
        engine = make_engine(agent, environment, EnvironmentReward(), num_generations=1, episode_retries=0)
        (group,) = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    return group.trajectories[0]


CALL = '<tool_call>{"name": "get_order", "arguments": {"order_id": "K27"}}</tool_call>'


@pytest.mark.parametrize("content", [False, True])
async def test_replies_calls_and_verdict_are_spans_of_one_trace_at_their_times(
    provider: Any, spans: Any, content: bool
) -> None:
    before = time.time_ns()
    talk = await played(CALL, "It is shipped.")
    after = time.time_ns()
    tracer = provider.get_tracer("test")
    record_conversation(tracer, talk, name="run/t/0", model="m", content=content, attributes={"a": 1})
    first, tool, second, root = spans.get_finished_spans()
    assert [s.name for s in (first, tool, second, root)] == [
        "chat m",
        "execute_tool get_order",
        "chat m",
        "invoke_agent",
    ]
    assert {span.context.trace_id for span in (first, tool, second)} == {root.context.trace_id}
    assert {span.parent.span_id for span in (first, tool, second)} == {root.context.span_id}
    assert before <= root.start_time <= first.start_time < first.end_time == tool.start_time
    assert tool.end_time <= second.start_time < second.end_time <= root.end_time <= after
    assert first.end_time - first.start_time >= 0.02e9 * 0.9
    assert tool.end_time - tool.start_time >= 0.05e9 * 0.9

    assert dict(root.attributes) == {
        "gen_ai.provider.name": "stateset_agents",
        "gen_ai.conversation.id": "run/t/0",
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.request.model": "m",
        "a": 1,
        "stateset_agents.reward": 1.0,
        "stateset_agents.success": True,
    }
    events = [(event.name, dict(event.attributes)) for event in root.events]
    assert events == [
        (
            "gen_ai.evaluation.result",
            {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 1.0},
        ),
        (
            "gen_ai.evaluation.result",
            {
                "gen_ai.evaluation.name": "success",
                "gen_ai.evaluation.score.value": 1.0,
                "gen_ai.evaluation.score.label": "pass",
            },
        ),
    ]
    for span, turn in zip((first, second), talk.turns, strict=True):
        assert span.attributes["gen_ai.usage.input_tokens"] == len(turn.completion.prompt_ids)
        assert span.attributes["gen_ai.usage.output_tokens"] == len(turn.completion.token_ids)
        assert span.attributes["gen_ai.response.finish_reasons"] == (turn.completion.finish_reason,)
    assert tool.attributes["gen_ai.tool.name"] == "get_order"
    assert tool.attributes["gen_ai.tool.call.id"] == talk.turns[0].completion.message.tool_calls[0].id
    words = json.dumps([dict(span.attributes) for span in (first, tool, second, root)], default=str)
    assert ("K27" in words) is content
    if content:
        assert json.loads(tool.attributes["gen_ai.tool.call.arguments"]) == {"order_id": "K27"}
        assert tool.attributes["gen_ai.tool.call.result"] == "K27 is shipped"
        inputs = json.loads(first.attributes["gen_ai.input.messages"])
        assert [(message["role"], message["parts"][0]["content"]) for message in inputs] == [
            ("system", "be brief"),
            ("user", "where is K27?"),
        ]
        (call,) = json.loads(first.attributes["gen_ai.output.messages"])[0]["parts"]
        assert (call["type"], call["name"]) == ("tool_call", "get_order")
        history = json.loads(second.attributes["gen_ai.input.messages"])
        assert history[:3] == [*inputs, *json.loads(first.attributes["gen_ai.output.messages"])]
        (result,) = history[3]["parts"]
        assert (result["type"], result["response"]) == ("tool_call_response", "K27 is shipped")


async def test_import_reads_the_spans_back_as_the_conversation(
    provider: Any, spans: Any, tmp_path: Path
) -> None:
    talk = await played(f"<think>Look it up.</think>{CALL}", "It is shipped.")
    first, last = talk.turns
    first = replace(first, feedback=tuple(replace(one, tool_call_id=None) for one in first.feedback))
    talk = replace(talk, turns=(first, last))
    tracer = provider.get_tracer("test")
    record_conversation(tracer, talk, name="n", model="m", content=True, attributes={})
    _, tool, *_ = spans.get_finished_spans()
    assert tool.attributes["gen_ai.tool.call.result"] == "K27 is shipped"
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(f"{span.to_json(indent=None)}\n" for span in spans.get_finished_spans()))
    [(_, row)] = read_import(file).rows
    said = [*talk.opening, first.completion.message, *first.feedback, last.completion.message]
    assert first.completion.message.reasoning == "Look it up."
    assert list(map(parts, (*row.prompt, *row.completion))) == list(map(parts, said))


def parts(message: Message) -> tuple[Any, ...]:
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    return message.role, message.content, message.reasoning, calls, message.tool_call_id


async def test_names_are_those_of_the_conventions(provider: Any, spans: Any) -> None:
    from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

    talk = await played(CALL, "It is shipped.")
    tracer = provider.get_tracer("test")
    record_conversation(tracer, talk, name="n", model="m", content=True, attributes={})
    listed = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    operations = {one.value for one in gen_ai_attributes.GenAiOperationNameValues}
    for span in spans.get_finished_spans():
        assert span.attributes["gen_ai.operation.name"] in operations
        events = [key for event in span.events for key in event.attributes]
        assert {key for key in (*span.attributes, *events) if key.startswith("gen_ai.")} <= listed
    assert error_attributes.ERROR_TYPE == "error.type"


async def test_a_conversation_that_failed_is_an_error(provider: Any, spans: Any) -> None:
    talk = await played("hi", fails=True)
    record_conversation(provider.get_tracer("test"), talk, name="n", model="m", content=False, attributes={})
    root = spans.get_finished_spans()[-1]
    assert root.attributes["error.type"] == "EnvironmentFailure"
    assert root.status.status_code.name == "ERROR"
    assert "no user" in root.status.description
    assert root.events == ()


async def test_a_training_reports_each_conversation_once(provider: Any, spans: Any, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, report_to="opentelemetry", max_steps=2, save_steps=0, eval_steps=2, eval_episodes=2
    )
    async with trainer:
        await trainer.train()
    rollouts = list(RunLog(trainer.run).rollouts())
    roots = [span for span in spans.get_finished_spans() if span.name == "invoke_agent"]
    run = trainer.run.path.name
    named = {span.attributes["gen_ai.conversation.id"]: span for span in roots}
    assert len(named) == len(roots) == len(rollouts) > 16
    numbers: Counter[tuple[str, int]] = Counter()
    for one in rollouts:
        span = named[f"{run}/{one.stage}/{one.step}/{numbers[one.stage, one.step]}"]
        numbers[one.stage, one.step] += 1
        assert span.attributes["stateset_agents.scenario"] == one.scenario
        assert span.attributes["stateset_agents.member"] == one.member
        assert span.attributes["stateset_agents.reward"] == pytest.approx(one.reward)
        assert span.attributes["stateset_agents.run"] == run
        assert span.attributes["gen_ai.request.model"] == trainer.agent.config.model_name
        children = [
            c for c in spans.get_finished_spans() if c.parent and c.parent.span_id == span.context.span_id
        ]
        sampled = [child.attributes["gen_ai.usage.output_tokens"] for child in children]
        assert sampled == [len(turn.completion.token_ids) for turn in trajectory_of(one).turns]
        assert all(
            span.start_time <= child.start_time <= child.end_time <= span.end_time for child in children
        )


async def test_otlp_over_http_reaches_a_collector(provider: Any, tmp_path: Path) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
    processor = BatchSpanProcessor(
        exporter, schedule_delay_millis=3_600_000
    )  # only the tracker's flush sends
    provider.add_span_processor(processor)
    try:
        trainer = make_trainer(tmp_path, report_to="opentelemetry", max_steps=1, save_steps=0)
        async with trainer:
            await trainer.train()
        received = [
            span
            for path, body in bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if path == "/v1/traces" and scope.scope.name == "stateset_agents"
        ]
    finally:
        processor.shutdown()
        server.shutdown()
        server.server_close()
    rollouts = list(RunLog(trainer.run).rollouts())
    assert len([span for span in received if span.name == "invoke_agent"]) == len(rollouts) > 0
    turns = sum(len(trajectory_of(one).turns) for one in rollouts)
    assert len([span for span in received if span.name.startswith("chat ")]) == turns
