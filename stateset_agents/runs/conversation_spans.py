"""A conversation as spans, by OpenTelemetry's semantic conventions for generative AI.

One trace each: `invoke_agent`, below it a `chat` for every reply and an `execute_tool` for every call that
could be read, with the reward and the verdict as events `gen_ai.evaluation.result`. `OpenTelemetryTracker`
calls this.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.types.messages import Message, calls_answered, tool_results
from stateset_agents.types.trajectory import Span, Trajectory


def record_conversation(
    tracer: Any, talk: Trajectory, *, name: str, model: str, content: bool, attributes: Mapping[str, Any]
) -> None:
    """Start and end the spans of a conversation, at the times at which it was played.

    `name`: its id among all conversations; `content`: whether its words and calls are attributes, too;
    `attributes`: more for the first span. Where a summary follows a reply at once, their times are recorded
    as one: then all spans have the conversation's whole time.
    """
    trace = importlib.import_module("opentelemetry.trace")
    now = time.monotonic()
    laps = talk.spans or (Span("environment", now, now),)
    replies = [place for place, lap in enumerate(laps) if lap.doing == "model"]
    whole = Span("environment", laps[0].begin, laps[-1].end)
    epoch = time.time_ns() - time.monotonic_ns()
    common = {"gen_ai.provider.name": "stateset_agents", "gen_ai.conversation.id": name}

    def started(title: str, lap: Span, parent: Any = None, **values: Any) -> Any:
        begin = epoch + round(lap.begin * 1e9)
        return tracer.start_span(title, parent, start_time=begin, attributes={**common, **values})

    def end(span: Any, lap: Span) -> None:
        span.end(epoch + round(lap.end * 1e9))

    root = started("invoke_agent", whole, **_operation("invoke_agent", model), **attributes)
    below = trace.set_span_in_context(root)
    history = list(talk.opening)
    for number, turn in enumerate(talk.turns):
        is_timed = len(replies) == len(talk.turns)
        place = replies[number] if is_timed else 0
        lap = laps[place] if is_timed else whole
        after = laps[place + 1] if is_timed and place + 1 < len(laps) else whole
        completion = turn.completion
        values = {
            **_operation("chat", model),
            "gen_ai.usage.input_tokens": len(completion.prompt_ids),
            "gen_ai.usage.output_tokens": len(completion.token_ids),
            "gen_ai.response.finish_reasons": [completion.finish_reason],
        }
        if content:
            values["gen_ai.input.messages"] = _messages(history)
            values["gen_ai.output.messages"] = _messages([completion.message])
        end(started(f"chat {model}", lap, below, **values), lap)
        calls, results = completion.message.tool_calls, tool_results(turn.feedback)
        result_of = dict(zip(calls_answered(calls, results), results, strict=True))
        for index, call in ((index, call) for index, call in enumerate(calls) if call.error is None):
            tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.type": "function"}
            tool |= {"gen_ai.tool.name": call.name, "gen_ai.tool.call.id": call.id}
            if content:
                tool["gen_ai.tool.call.arguments"] = json.dumps(call.arguments, default=str)
                tool["gen_ai.tool.call.result"] = result_of[index].content if index in result_of else ""
            end(started(f"execute_tool {call.name}", after, below, **tool), after)
        history += turn.feedback if turn.is_summary else (completion.message, *turn.feedback)
    for what, value in (("reward", talk.reward), ("success", talk.success)):
        if value is not None:
            label = (
                {"gen_ai.evaluation.score.label": "pass" if value else "fail"} if what == "success" else {}
            )
            score = {"gen_ai.evaluation.name": what, "gen_ai.evaluation.score.value": float(value), **label}
            root.add_event("gen_ai.evaluation.result", score, epoch + round(whole.end * 1e9))
            root.set_attribute(f"stateset_agents.{what}", value)
    if talk.error is not None:
        root.set_attribute("error.type", talk.error.partition(":")[0])
        root.set_status(trace.StatusCode.ERROR, talk.error)
    end(root, whole)


def _operation(name: str, model: str) -> dict[str, str]:
    return {"gen_ai.operation.name": name, "gen_ai.request.model": model}


def _messages(messages: Sequence[Message]) -> str:
    """Messages in the conventions' JSON."""
    parts = []
    for message in messages:
        texts = {"reasoning": message.reasoning, "text": message.content}
        said: list[dict[str, Any]] = [{"type": kind, "content": text} for kind, text in texts.items() if text]
        if message.role == "tool":
            said = [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}]
        said += [
            {"type": "tool_call", "id": call.id, "name": call.name, "arguments": dict(call.arguments)}
            for call in message.tool_calls
        ]
        parts.append({"role": message.role, "parts": said})
    return json.dumps(parts, default=str)
