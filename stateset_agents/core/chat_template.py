"""Messages to token ids, and sampled ids back to a message.

An episode renders its first prompt whole and afterwards only appends: the *delta* of a template is what
stands between the agent's end-of-turn token and the agent's next words. What was sampled is never
rendered again, so a template must not rewrite history; one that does is refused when it is loaded.

Text from users and tools cannot forge roles: control tokens written out in it are encoded as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stateset_agents.backends.base import Tokenizer
from stateset_agents.errors import ConfigurationError
from stateset_agents.messages import Message, ToolCall

__all__ = ["ChatTemplate", "JinjaTemplate", "PlainTemplate", "parse_reply"]

ToolSchemas = Sequence[Mapping[str, Any]]


class ChatTemplate(Protocol):
    """How one model writes conversations down."""

    end_id: int
    """Put, untrained, after a turn that was cut by length."""
    stop_ids: tuple[int, ...]
    """Sampling any of these ends a turn."""

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        """Ids of a conversation so far, ending where the agent begins to speak."""
        ...

    def delta(self, messages: Sequence[Message]) -> list[int]:
        """Ids from right after the agent's end-of-turn token to where it speaks again."""
        ...


class PlainTemplate:
    """Role-prefixed lines, for base models that have no chat template.

        system: Be brief.
        user: Hello
        assistant: Hi.<eos>
        user: Bye
        assistant:

    Further lines of a message are indented, so text cannot begin a line with a role.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_ids:
            raise ConfigurationError(
                "the plain chat template needs a tokenizer with an end-of-sequence token"
            )
        self.tokenizer = tokenizer
        self.end_id = tokenizer.eos_ids[0]
        self.stop_ids = tokenizer.eos_ids

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        lines = [*self._tool_lines(tools), *(line for message in messages for line in self._lines(message))]
        return self.tokenizer.encode("\n".join([*lines, "assistant:"]))

    def delta(self, messages: Sequence[Message]) -> list[int]:
        lines = [line for message in messages for line in self._lines(message)]
        return self.tokenizer.encode("\n" + "\n".join([*lines, "assistant:"]))

    def _lines(self, message: Message) -> list[str]:
        calls = "".join(
            "<tool_call>"
            + json.dumps({"name": call.name, "arguments": dict(call.arguments)})
            + "</tool_call>"
            for call in message.tool_calls
        )
        return [f"{message.role}: " + (message.content + calls).replace("\r", "\n").replace("\n", "\n  ")]

    def _tool_lines(self, tools: ToolSchemas) -> list[str]:
        if not tools:
            return []
        how = 'To use a tool write <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Tools:'
        return [f"tools: {how}", *("  " + json.dumps(tool.get("function", tool)) for tool in tools)]


class JinjaTemplate:
    """The tokenizer's own chat template (transformers), used by whole prompt once and by delta after that."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """`tokenizer` is a `HuggingFaceTokenizer`; `chat_template` replaces the tokenizer's own text."""
        self.tokenizer = tokenizer
        self._template = chat_template
        self._controls = re.compile(
            "|".join(re.escape(text) for text in sorted(_control_texts(tokenizer.hf), key=len, reverse=True))
            or r"(?!)"
        )
        self.end_id, self._after_end = self._find_end()
        self.stop_ids = tuple(dict.fromkeys((self.end_id, *tokenizer.eos_ids)))
        self._refuse_rewritten_history()

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> list[int]:
        guarded = _Guard(self._controls)
        text = self._render(guarded.messages(messages), tools, generate=True)
        return guarded.encode(text, self.tokenizer)

    def delta(self, messages: Sequence[Message]) -> list[int]:
        guarded = _Guard(self._controls)
        before = [Message(role="user", content="x"), Message(role="assistant", content="y")]
        head = self._render(before)
        text = self._render([*before, *guarded.messages(messages)], generate=True)
        if not text.startswith(head):
            raise ConfigurationError(_REWRITES)
        return guarded.encode(self._after_end + text[len(head) :], self.tokenizer)

    def _render(self, messages: Sequence[Message], tools: ToolSchemas = (), generate: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.hf.apply_chat_template(
                [_template_message(message) for message in messages],
                tools=list(tools) or None,
                chat_template=self._template,
                add_generation_prompt=generate,
                tokenize=False,
            )
        except (TemplateError, ValueError) as error:
            raise ConfigurationError(
                f"the chat template cannot render this conversation ({error}); "
                'set AgentConfig(chat_template="plain") or give one that can'
            ) from error
        return str(text)

    def _find_end(self) -> tuple[int, str]:
        """The end-of-turn token after an assistant message, and the template text that follows it."""
        reply = "zqreplyqz"
        head = self._render([Message(role="user", content="x"), Message(role="assistant", content=reply)])
        tail = head.rpartition(reply)[2]
        end = self._controls.match(tail.lstrip()) if head.count(reply) == 1 else None
        if end is None:
            raise ConfigurationError(
                "the chat template does not end an assistant message with a control token, so nothing could "
                'stop a turn; set AgentConfig(chat_template="plain") or give a template that ends turns'
            )
        (end_id,) = self.tokenizer.encode_markup(end.group())
        return end_id, tail.lstrip()[end.end() :]

    def _refuse_rewritten_history(self) -> None:
        """Prompt, reply and deltas laid end to end must be what the template renders as a whole."""
        talk = [
            Message(role="system", content="s"),
            Message(role="user", content="first"),
            Message(role="assistant", content="one"),
            Message(role="user", content="second"),
            Message(role="assistant", content="two"),
        ]
        follow = Message(role="user", content="third")
        try:
            whole = self._render([*talk, follow], generate=True)
        except ConfigurationError:  # a template without a system role is fine
            talk = talk[1:]
            whole = self._render([*talk, follow], generate=True)
        pieces = [*self.prompt(talk[:-3]), *self._said("one"), *self.delta(talk[-2:-1]), *self._said("two")]
        if [*pieces, *self.delta([follow])] != self.tokenizer.encode_markup(whole):
            raise ConfigurationError(_REWRITES)

    def _said(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text), self.end_id]


_REWRITES = (
    "the chat template rewrites history (an earlier turn reads differently once the conversation goes on), "
    'so sampled tokens could not be trained as they were sampled; set AgentConfig(chat_template="plain") '
    "or give a template that only appends"
)


class _Guard:
    """Keeps control tokens in untrusted text from becoming control tokens.

    Each one is swapped for a private mark before rendering; when the rendered text is encoded, the mark
    becomes the plain-text tokens of what stood there. Text without control tokens is encoded in one
    piece, exactly as the template alone would be.
    """

    _mark = re.compile("\ue0f0([0-9]+)\ue0f1")

    def __init__(self, controls: re.Pattern[str]) -> None:
        self._controls = controls
        self._found: list[str] = []

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        return [
            Message(
                role=message.role,
                content=self._hide(message.content),
                tool_calls=message.tool_calls,
                tool_call_id=message.tool_call_id,
                name=message.name,
            )
            for message in messages
        ]

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        ids: list[int] = []
        for place, piece in enumerate(self._mark.split(text)):
            if place % 2:
                ids.extend(tokenizer.encode(self._found[int(piece)]))
            elif piece:
                ids.extend(tokenizer.encode_markup(piece))
        return ids

    def _hide(self, text: str) -> str:
        def swap(match: re.Match[str]) -> str:
            self._found.append(match.group())
            return f"\ue0f0{len(self._found) - 1}\ue0f1"

        return self._controls.sub(swap, text.replace("\ue0f0", "").replace("\ue0f1", ""))


def _control_texts(tokenizer: Any) -> set[str]:
    """Every written form that the tokenizer would read as one control token."""
    return {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
        tokenizer.all_special_tokens
    )


def _template_message(message: Message) -> dict[str, Any]:
    """As chat templates expect it: OpenAI's shape with tool arguments as an object."""
    data = message.to_openai()
    for call, item in zip(message.tool_calls, data.get("tool_calls", ()), strict=True):
        item["function"]["arguments"] = dict(call.arguments)
    return data


_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)


def parse_reply(text: str, turn: int = 0) -> Message:
    """The assistant message that a sampled text stands for, tool calls read out of it.

    `ok <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>` -> content "ok", one call. A call that
    cannot be read keeps its reason in `ToolCall.error`.
    """
    calls = tuple(
        _read_call(match.group(1), bool(match.group(2)), f"call_{turn}_{number}")
        for number, match in enumerate(_CALL.finditer(text))
    )
    return Message(role="assistant", content=_CALL.sub("", text).strip(), tool_calls=calls)


def _read_call(text: str, closed: bool, call_id: str) -> ToolCall:
    def broken(why: str) -> ToolCall:
        return ToolCall(name="", id=call_id, error=why)

    if not closed:
        return broken("the tool call is not closed by </tool_call>")
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return broken(f"the tool call is not JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return broken('the tool call must be an object with "name" and "arguments"')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return broken("the tool call's arguments must be an object")
    return ToolCall(name=data["name"], arguments=arguments, id=call_id)
