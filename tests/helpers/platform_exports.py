"""What the SDKs of tracing platforms write of one agent's two conversations, for tests/fixtures/exports.

    .venv-telemetry/bin/python tests/helpers/platform_exports.py telemetry tests/fixtures/exports
    .venv-inspect/bin/python tests/helpers/platform_exports.py inspect tests/fixtures/exports

The agent is OpenAI's client, instrumented as each platform's documentation says, against a model on loopback.
The same server takes what the SDKs send. langfuse and langsmith 's files are what their clients return when
they ask that server for what they sent before.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "track",
        "description": "Where a parcel is.",
        "parameters": {
            "type": "object",
            "properties": {"order_id": {"type": "string"}},
            "required": ["order_id"],
        },
    },
}
SYSTEM = "You answer for a shop."
CALL = {"id": "call_1", "type": "function", "function": {"name": "track", "arguments": '{"order_id": "K27"}'}}
ANSWERS = {"Lyon": "In Lyon.", "Hello!": "Hi."}


def reply_to(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model: it tracks the parcel, then says where it is."""
    last = messages[-1]["content"]
    if isinstance(last, list):
        last = last[0]["text"]
    if "Where" in last:
        return {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"role": "assistant", "content": ANSWERS.get(last, "You are welcome.")}


class Model(BaseHTTPRequestHandler):
    """Answers chat completions; keeps what else is sent to it, and gives it back as `stored` says."""

    protocol_version = "HTTP/1.1"
    stored: Callable[[str], Any] = staticmethod(lambda path: {})
    sent: list[tuple[str, str, bytes]] = []  # noqa: RUF012 - one server, one list

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self._body()
        if self.path.endswith("/chat/completions"):
            message = reply_to(json.loads(body)["messages"])
            choice = {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
            }
            usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
            head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "shop-1"}
            self._answer({**head, "choices": [choice], "usage": usage})
            return
        self.sent.append((self.path, self.headers.get("Content-Type", ""), body))
        self._answer(type(self).stored(self.path))

    def do_GET(self) -> None:
        self._answer(type(self).stored(self.path))

    do_PATCH = do_POST

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def talk(client: Any, *users: str, tools: bool = True) -> None:
    """One conversation of the agent: it asks the model until it says something, for each of the words."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for words in users:
        messages.append({"role": "user", "content": words})
        while True:
            offered = {"tools": [TOOL]} if tools else {}
            answer = client.chat.completions.create(model="shop-1", messages=messages, **offered)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "Lyon"})


def both(client: Any) -> None:
    talk(client, "Where is K27?", "Thanks, write to ann@example.org!")
    talk(client, "Hello!", tools=False)


# --- langfuse


def langfuse(url: str, folder: Path) -> None:
    os.environ |= {
        "LANGFUSE_PUBLIC_KEY": "pk-1",
        "LANGFUSE_SECRET_KEY": "sk-1",
        "LANGFUSE_BASE_URL": url,
        "LANGFUSE_HOST": url,
    }
    from langfuse import get_client, observe, propagate_attributes
    from langfuse.openai import OpenAI
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    @observe(name="shop")
    def conversation(number: int) -> None:
        with propagate_attributes(session_id=f"session-{number}"):
            if number:
                talk(client, "Hello!", tools=False)
            else:
                talk(client, "Where is K27?", "Thanks, write to ann@example.org!")

    Model.sent.clear()
    for number in range(2):
        conversation(number)
    lf = get_client()
    lf.flush()
    observations = []
    for path, _, body in Model.sent:
        if "otel" not in path:
            continue
        request = ExportTraceServiceRequest.FromString(_unpacked(body))
        for spans in (scope.spans for of in request.resource_spans for scope in of.scope_spans):
            observations += map(_observation, spans)
    observations.sort(key=lambda item: item["startTime"])

    def stored(path: str) -> Any:
        return {"data": observations, "meta": {}}

    Model.stored = staticmethod(stored)
    page = lf.api.observations.get_many(limit=100, fields="core,basic,io,model,trace_context")
    lines = [item.model_dump_json(by_alias=True, exclude_none=True) for item in page.data]
    (folder / "langfuse-observations.jsonl").write_text("\n".join(lines) + "\n")
    Model.stored = staticmethod(lambda path: {})


def _unpacked(body: bytes) -> bytes:
    import gzip

    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


def _observation(span: Any) -> dict[str, Any]:
    """The span as the server's API gives it back."""
    from langfuse._client.attributes import LangfuseOtelSpanAttributes as Names

    values = {item.key: item.value.string_value for item in span.attributes}
    session = next((values[key] for key in ("session.id", "langfuse.session.id") if key in values), None)
    return {
        "id": span.span_id.hex(),
        "traceId": span.trace_id.hex(),
        "projectId": "shop",
        "startTime": datetime.fromtimestamp(span.start_time_unix_nano / 1e9, UTC).isoformat(),
        "endTime": datetime.fromtimestamp(span.end_time_unix_nano / 1e9, UTC).isoformat(),
        "parentObservationId": span.parent_span_id.hex() or None,
        "type": values[Names.OBSERVATION_TYPE].upper(),
        "name": span.name,
        "sessionId": session,
        "model": values.get(Names.OBSERVATION_MODEL),
        "input": values.get(Names.OBSERVATION_INPUT),
        "output": values.get(Names.OBSERVATION_OUTPUT),
    }


# --- langsmith


def langsmith(url: str, folder: Path) -> None:
    os.environ |= {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": url, "LANGSMITH_API_KEY": "none"}
    import openai
    from langsmith import Client, traceable
    from langsmith.wrappers import wrap_openai

    platform = Client(api_url=url, api_key="none", auto_batch_tracing=False, info={"batch_ingest_config": {}})
    client = wrap_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
        tracing_extra={"client": platform},
    )

    @traceable(name="shop", client=platform)
    def conversation(number: int) -> None:
        if number:
            talk(client, "Hello!", tools=False)
        else:
            talk(client, "Where is K27?", "Thanks, write to ann@example.org!")

    Model.sent.clear()
    for number in range(2):
        conversation(number)
    platform.flush()
    runs: dict[str, dict[str, Any]] = {}
    for path, kind, body in Model.sent:
        if "json" in kind:
            data = json.loads(body)
            run_id = data.get("id") or path.rpartition("/")[2]
            known = {key: value for key, value in data.items() if value is not None and key != "attachments"}
            runs.setdefault(run_id, {"id": run_id, "session_id": "00000000-0000-4000-8000-000000000000"})
            runs[run_id] |= known
    stored = {"runs": list(runs.values()), "cursors": {}}
    Model.stored = staticmethod(lambda path: stored)
    lines = [
        run.model_dump_json(exclude_none=True)
        for run in platform.list_runs(project_id="00000000-0000-4000-8000-000000000000")
    ]
    (folder / "langsmith-runs.jsonl").write_text("\n".join(sorted(lines)) + "\n")
    Model.stored = staticmethod(lambda path: {})


# --- OpenTelemetry


def opentelemetry(url: str, folder: Path) -> None:
    """By OpenTelemetry's own helper: the newest conventions, content in spans and in events; and the events
    of the first conventions, one for each message, which the SDK's logger writes."""
    os.environ |= {
        "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
        "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_and_event",
        "OTEL_INSTRUMENTATION_GENAI_EMIT_EVENT": "true",
    }
    import openai
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import (
        ConsoleLogRecordExporter,
        InMemoryLogRecordExporter,
        SimpleLogRecordProcessor,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.util.genai.handler import TelemetryHandler

    spans, logs, first = InMemorySpanExporter(), InMemoryLogRecordExporter(), InMemoryLogRecordExporter()
    with (
        open(folder / "otel-spans-console.json", "w") as console,
        open(folder / "otel-logs-console.json", "w") as log_console,
    ):
        tracers, loggers, first_loggers = TracerProvider(), LoggerProvider(), LoggerProvider()
        for exporter in (ConsoleSpanExporter(out=console), spans):
            tracers.add_span_processor(SimpleSpanProcessor(exporter))
        for record_exporter in (ConsoleLogRecordExporter(out=log_console), logs):
            loggers.add_log_record_processor(SimpleLogRecordProcessor(record_exporter))
        first_loggers.add_log_record_processor(SimpleLogRecordProcessor(first))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        handler = TelemetryHandler(tracer_provider=tracers, logger_provider=loggers)
        watched = Watched(client, handler, first_loggers.get_logger("shop"))
        tracer = tracers.get_tracer("shop")
        with tracer.start_as_current_span("invoke_agent shop"):
            talk(watched, "Where is K27?", "Thanks, write to ann@example.org!")
        with tracer.start_as_current_span("invoke_agent shop"):
            talk(watched, "Hello!", tools=False)
    for name, request in (
        ("otlp-spans.json", encode_spans(spans.get_finished_spans())),
        ("otlp-logs.json", encode_logs(logs.get_finished_logs())),
        ("otlp-logs-by-message.json", encode_logs(first.get_finished_logs())),
    ):
        (folder / name).write_text(json.dumps(with_hex_ids(MessageToDict(request))) + "\n")


def with_hex_ids(value: Any) -> Any:
    """OTLP's JSON has ids in hexadecimal, and protobuf's writer has bytes in base64."""
    if isinstance(value, list):
        return [with_hex_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64decode(item).hex()
        if key in ("traceId", "spanId", "parentSpanId")
        else with_hex_ids(item)
        for key, item in value.items()
    }


class Watched:
    """OpenAI's client; each call is told to OpenTelemetry."""

    def __init__(self, client: Any, handler: Any, logger: Any) -> None:
        self.chat = self.completions = self
        self._client, self._handler, self._logger = client, handler, logger

    def create(self, *, model: str, messages: list[dict[str, Any]], **more: Any) -> Any:
        from opentelemetry._logs import LogRecord
        from opentelemetry.util.genai import types

        def parts(message: dict[str, Any]) -> list[Any]:
            if message["role"] == "tool":
                return [types.ToolCallResponsePart(response=message["content"], id=message["tool_call_id"])]
            words = [types.TextPart(content=message["content"])] if message.get("content") else []
            return words + [
                types.ToolCallRequestPart(
                    name=call["function"]["name"],
                    arguments=json.loads(call["function"]["arguments"]),
                    id=call["id"],
                )
                for call in message.get("tool_calls") or ()
            ]

        def emit(name: str, body: dict[str, Any]) -> None:
            self._logger.emit(LogRecord(event_name=name, body=body, attributes={"gen_ai.system": "openai"}))

        with self._handler.inference("openai", request_model=model) as invocation:
            invocation.system_instruction = [types.TextPart(content=messages[0]["content"])]
            invocation.input_messages = [
                types.InputMessage(role=message["role"], parts=parts(message)) for message in messages[1:]
            ]
            invocation.tool_definitions = [
                types.FunctionToolDefinition(**tool["function"]) for tool in more.get("tools", ())
            ]
            answer = self._client.chat.completions.create(model=model, messages=messages, **more)
            [choice] = answer.choices
            said = choice.message.model_dump(exclude_none=True)
            invocation.output_messages = [
                types.OutputMessage(role="assistant", parts=parts(said), finish_reason=choice.finish_reason)
            ]
            for message in messages:
                body = {key: value for key, value in message.items() if key != "tool_call_id"}
                if "tool_call_id" in message:
                    body["id"] = message["tool_call_id"]
                emit(f"gen_ai.{message['role']}.message", body)
            emit("gen_ai.choice", {"index": 0, "finish_reason": choice.finish_reason, "message": said})
        return answer


def telemetry(folder: Path) -> None:
    with serving() as url:
        opentelemetry(url, folder)
        langfuse(url, folder)
        langsmith(url, folder)


# --- Inspect


def inspect(folder: Path) -> None:
    import tempfile

    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message, use_tools
    from inspect_ai.tool import tool

    @tool
    def track() -> Any:
        async def execute(order_id: str) -> str:
            """Where a parcel is.

            Args:
                order_id: E.g. K27.
            """
            return "Lyon"

        return execute

    outputs = [
        ModelOutput.for_tool_call("mockllm", "track", {"order_id": "K27"}),
        ModelOutput.from_content("mockllm", "In Lyon."),
        ModelOutput.from_content("mockllm", "Hi."),
    ]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=10, output_tokens=5, total_tokens=15)
    shop = Task(
        dataset=[
            Sample(id="1-k27", input="Where is K27?", target="Lyon"),
            Sample(id="2-hello", input="Hello!", target="Lyon"),
        ],
        solver=[system_message(SYSTEM), use_tools(track()), generate()],
        scorer=includes(),
        name="shop",
    )
    for kind in ("json", "eval"):
        with tempfile.TemporaryDirectory() as made:
            [log] = eval(
                shop,
                model=get_model("mockllm/model", custom_outputs=outputs),
                log_format=kind,
                log_dir=made,
                max_samples=1,
                display="none",
            )
            assert log.status == "success", log.error
            [file] = Path(made).glob(f"*.{kind}")
            (folder / f"inspect.{kind}").write_bytes(file.read_bytes())


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    {"telemetry": telemetry, "inspect": inspect}[sys.argv[1]](target)
    for file in target.glob("*.json*"):  # the same wherever they were made
        file.write_text(file.read_text().replace(platform.platform(), "Linux"))
