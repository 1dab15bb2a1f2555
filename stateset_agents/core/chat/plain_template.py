"""The chat template of models that bring none: role-prefixed lines. Chosen by core/agent.py."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.backends.base import Tokenizer
from stateset_agents.core.chat.escaping import encodable
from stateset_agents.core.chat.replies.parsing import HERMES
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Message, ToolCall

__all__ = ["PlainTemplate", "starts_with_bos", "with_calls_as_text", "with_thought_as_text"]

_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
"""Whatever `str.splitlines` takes for the end of a line."""


class PlainTemplate:
    """Role-prefixed lines, for base models that have no chat template.

        system: Be brief.
        user: Hello
        assistant: Hi.<eos>
        user: Bye
        assistant:

    Further lines of a message are indented, so no text can begin a line with a role, and all of it is
    encoded as plain text. A BOS stands in front where the tokenizer itself would put one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigurationError for a tokenizer without an end-of-sequence token."""
        if not tokenizer.eos_ids:
            raise ConfigurationError(
                "the plain chat template ends turns with the tokenizer's eos token and it has none; "
                "set tokenizer.eos_token, or give a jinja text as AgentConfig(chat_template=...)"
            )
        self.tokenizer = tokenizer
        self.appends = True
        self.date: datetime.date | None = None
        self.end_id = tokenizer.eos_ids[0]
        self.stop_ids = tokenizer.eos_ids
        self.parser = HERMES
        raw = getattr(tokenizer, "hf", None)
        self._start = [raw.bos_token_id] if raw is not None and starts_with_bos(tokenizer) else []

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a conversation so far, ending where the agent begins to speak."""
        return [*self._start, *self._ids(_tool_lines(tools), messages)]

    def delta(
        self, messages: Sequence[Message], calls: Sequence[ToolCall] = (), *, end: int | None = None
    ) -> list[int]:
        """Ids from right after a reply to where the agent speaks again, whatever it called; with the eos in
        front where a limit cut the reply."""
        return [*([self.end_id] if end is None else []), *self._ids([""], messages)]

    def goes_on(
        self,
        shown: Sequence[Message],
        reply: Message,
        following: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        sampled: Sequence[int] | None = None,
    ) -> bool:
        """Does it write this reply as it was sampled, white space aside, and end it so? It only appends."""
        if not sampled:
            return True
        ends = sampled[-1] in self.stop_ids
        said = self.tokenizer.decode_markup(sampled[:-1] if ends else sampled)
        is_same = "".join(said.split()) == "".join(_body(reply).split())
        return is_same and (not ends or sampled[-1] == self.end_id)

    def reply(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a reply as the agent would sample it after a prompt, its eos included."""
        return [*self.tokenizer.encode(" " + _body(message)), self.end_id]

    def pixels(self, messages: Sequence[Message]) -> tuple[PixelValues, ...]:
        """None. Raises ConfigurationError for messages with pictures."""
        if any(message.images for message in messages):
            raise ConfigurationError(
                "a message has a picture, and the plain chat template writes text alone: give a "
                "vision-language model with a chat template of its own"
            )
        return ()

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """A number that the prompt is never shorter than, computed without tokenising it."""
        return self.tokenizer.least_tokens("".join(message.content for message in messages))

    def _ids(self, lines: list[str], messages: Sequence[Message]) -> list[int]:
        """Each reply is a piece of its own, as if it had been sampled."""
        ids: list[int] = []
        for message in messages:
            if message.role == "assistant":
                ids += self.tokenizer.encode("\n".join([*lines, "assistant:"]))
                ids += self.reply(message)
                lines = [""]
            else:
                lines = [*lines, f"{message.role}: {_body(message)}"]
        return ids + self.tokenizer.encode("\n".join([*lines, "assistant:"]))


def with_calls_as_text(message: Message) -> str:
    """What an assistant message says, its tool calls written out behind it; an unreadable one as it was."""
    return message.content + _calls_as_text(message)


def with_thought_as_text(message: Message) -> str:
    """What an assistant message says, its thought before it."""
    if message.reasoning is None:
        return message.content
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"


def _calls_as_text(message: Message) -> str:
    return "".join(map(_written, message.tool_calls))


def _written(call: ToolCall) -> str:
    if call.error is not None and call.written:
        return call.written
    return f"<tool_call>{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}</tool_call>"


def _body(message: Message) -> str:
    return _LINE_END.sub("\n  ", encodable(with_thought_as_text(message) + _calls_as_text(message)))


def _tool_lines(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    if not tools:
        return []
    how = 'To use a tool write <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Tools:'
    return [f"tools: {how}", *("  " + json.dumps(tool.get("function", tool)) for tool in tools)]


def starts_with_bos(tokenizer: Any) -> bool:
    """Does a `HuggingFaceTokenizer` put a BOS in front of every text? (GPT-2's has one and does not.)"""
    raw = tokenizer.hf
    return raw.bos_token_id is not None and list(raw("x").input_ids)[:1] == [raw.bos_token_id]
