"""Reads tool calls out of what an agent sampled; the agent calls it after every turn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

from stateset_agents.types.messages import Completion, Message, ToolCall

__all__ = ["certain_content", "parse_reply", "read_completion"]

_CALL = re.compile(
    r"(?P<thought><think>.*?(?:</think>|\Z))|<tool_call>(?P<call>.*?)(?P<end></tool_call>|\Z)", re.DOTALL
)
"""Whichever opens first: what a thought holds is no call, and the arguments of a call are no thought."""
_OPENS = "<tool_call>"
_MOST_LEVELS = 32
"""Of objects and lists inside one another; real arguments have a handful."""


def parse_reply(text: str, turn: int = 0) -> Message:
    """The assistant message that a sampled text stands for, tool calls read out of it; never raises.

    `ok <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>` -> content "ok", one call. A call that
    cannot be read keeps its reason in `ToolCall.error`, which the environment shows to the agent. Inside a
    thought, `<think>` to `</think>` or to the end, nothing is called: it stays in the content as written.
    """
    found = [match for match in _CALL.finditer(text) if match["thought"] is None]
    calls = tuple(_read_call(match, f"call_{turn}_{number}") for number, match in enumerate(found))
    return Message(role="assistant", content=_without_calls(text).strip(), tool_calls=calls)


def read_completion(completion: Completion, turn: int = 0) -> Completion:
    """The completion with its raw text read as `parse_reply` does.

    Of a reply that a limit cut within a tool call the call's error says so: that the call is not closed would
    not tell the agent what to do.
    """
    message = parse_reply(completion.message.content, turn)
    last = message.tool_calls[-1] if message.tool_calls else None
    if completion.finish_reason == "length" and last is not None and not _is_closed(last):
        at = len(completion.token_ids)
        error = f"the reply was cut at {at} tokens, before the tool call was complete: write a shorter one"
        message = replace(message, tool_calls=(*message.tool_calls[:-1], replace(last, error=error)))
    return replace(completion, message=message)


def _is_closed(call: ToolCall) -> bool:
    return call.error is None or call.written.endswith("</tool_call>")


def certain_content(text: str) -> str:
    """What `parse_reply` will have as content for sure, of a text that is still being sampled.

    Calls are left out, and an end that may become the beginning of one, or white space at the end.
    """
    words = _without_calls(text)
    kept = next((n for n in range(len(_OPENS) - 1, 0, -1) if words.endswith(_OPENS[:n])), 0)
    return words[: len(words) - kept].strip()


def _without_calls(text: str) -> str:
    return _CALL.sub(lambda match: match["thought"] or "", text)


def _read_call(found: re.Match[str], call_id: str) -> ToolCall:
    def broken(why: str) -> ToolCall:
        return ToolCall(name="", id=call_id, error=why, written=found.group())

    text = found["call"]
    if not found["end"]:
        return broken("the tool call is not closed by </tool_call>")
    try:
        data = json.loads(text)
    except RecursionError:
        return broken(_TOO_DEEP)
    except ValueError as error:  # not JSON, or an integer of thousands of digits
        return broken(f"the tool call is not JSON: {error}")
    fault = _fault(data)
    if fault is not None:
        return broken(fault)
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return broken('the tool call must be an object with "name" and "arguments"')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return broken("the tool call's arguments must be an object")
    return ToolCall(name=data["name"], arguments=arguments, id=call_id)


_TOO_DEEP = f"the tool call has more than {_MOST_LEVELS} levels of objects and lists"


def _fault(value: Any, level: int = 0) -> str | None:
    """Why a value that Python reads as JSON must not travel on, or None.

    NaN and infinities are no JSON, half a surrogate pair cannot be written to a file, and deep nesting
    would break whoever walks it.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "the tool call holds a number that is not finite"
    if isinstance(value, str):
        has_half = not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
        return "the tool call holds half a character" if has_half else None
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        if level == _MOST_LEVELS:
            return _TOO_DEEP
        faults = (_fault(item, level + 1) for item in value)
        return next((fault for fault in faults if fault is not None), None)
    return None
