"""The chat template of models that bring none: role-prefixed lines. Chosen by core/agent.py."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.backends.base import Tokenizer
from stateset_agents.core.chat.escaping import ControlTokenEscaper, MarkupEncoder, encodable
from stateset_agents.core.chat.replies.parsing import HERMES
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Message, ToolCall

_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
"""Whatever `str.splitlines` takes for the end of a line."""


_JINJA = Path(__file__).with_name("plain.jinja").read_text(encoding="utf-8")
"""The format of `PlainTemplate` for renderers of jinja; `_plain_text` sets the end of a reply."""


class PlainTemplate:
    """Role-prefixed lines, for base models that have no chat template.

        system: Be brief.
        user: Hello
        assistant: Hi.<eos>
        user: Bye
        assistant:

    Further lines of a message are indented, so no text can begin a line with a role, and control tokens in
    it are encoded as plain text. A BOS stands in front where the tokenizer itself would put one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigurationError for a tokenizer that has no control token as its eos."""
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
        self.text = ""
        """No jinja."""
        self._end = tokenizer.piece(self.end_id)
        if tokenizer.encode_markup(self._end) != [self.end_id]:
            raise ConfigurationError(
                f"the plain chat template ends turns with {self._end!r}, which is no control token: add it "
                "as a special token to the tokenizer, or give a jinja text as AgentConfig(chat_template=...)"
            )
        self._encoder = MarkupEncoder(tokenizer)
        raw = getattr(tokenizer, "hf", None)
        self._start = raw.bos_token if raw is not None and starts_with_bos(tokenizer) else ""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a conversation so far, ending where the agent begins to speak."""
        return self._encoder.encode(
            lambda escaper: self._start + self._text([*_tool_lines(tools, escaper.text)], messages, escaper)
        )

    def delta(
        self, messages: Sequence[Message], calls: Sequence[ToolCall] = (), *, end: int | None = None
    ) -> list[int]:
        """Ids from right after a reply to where the agent speaks again, whatever it called; with the eos in
        front where a limit cut the reply."""
        ids = self._encoder.encode(lambda escaper: self._text([self._end], messages, escaper))
        return ids if end is None else ids[1:]

    def goes_on(
        self,
        shown: Sequence[Message],
        reply: Message,
        following: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        sampled: Sequence[int] | None = None,
    ) -> bool:
        """True if it writes this reply as it was sampled, white space aside, and ends it so: it only
        appends."""
        if not sampled:
            return True
        ends = sampled[-1] in self.stop_ids
        text = self.tokenizer.decode_markup(sampled[:-1] if ends else sampled)
        is_same = "".join(text.split()) == "".join(_body(reply).split())
        return is_same and (not ends or sampled[-1] == self.end_id)

    def render_reply(self, reply: Message) -> str:
        """The template's text of a reply, without its end."""
        return " " + _body(reply)

    def reply(self, message: Message, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of a reply as the agent would sample it after a prompt, its eos included."""
        return [*self._encoder.encode(lambda escaper: " " + _body(message, escaper.text)), self.end_id]

    def pixels(self, messages: Sequence[Message]) -> tuple[PixelValues, ...]:
        """An empty tuple. Raises ConfigurationError for messages with pictures."""
        if any(message.images for message in messages):
            raise ConfigurationError(
                "a message has a picture, and the plain chat template writes text alone: give a "
                "vision-language model with a chat template of its own"
            )
        return ()

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """A number that the prompt is never shorter than, computed without tokenising it."""
        return self.tokenizer.least_tokens("".join(message.content for message in messages))

    def written(self) -> str:
        """The jinja text by which plain transformers, without arguments, makes the same prompts."""
        return _plain_text(self.tokenizer)

    def _text(self, lines: list[str], messages: Sequence[Message], escaper: ControlTokenEscaper) -> str:
        for message in messages:
            end = self._end if message.role == "assistant" else ""
            lines.append(f"{message.role}: {_body(message, escaper.text)}{end}")
        return "\n".join([*lines, "assistant:"])


def with_calls_as_text(message: Message) -> str:
    """An assistant message's words with its tool calls written behind them; an unreadable call as it was."""
    return message.content + _calls_as_text(message)


def with_thought_as_text(message: Message) -> str:
    """An assistant message's words with its thought before them."""
    if message.reasoning is None:
        return message.content
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"


def _calls_as_text(message: Message, write: Callable[[str], str] = str) -> str:
    """The message's tool calls behind one another; `write` makes what stands between the frames."""
    texts: list[str] = []
    for call in message.tool_calls:
        if call.error is not None and call.written:
            texts.append(write(call.written))
        else:
            body = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
            texts.append(f"<tool_call>{write(body)}</tool_call>")
    return "".join(texts)


def _body(message: Message, escaped: Callable[[str], str] = str) -> str:
    """The message's thought, words and calls, each but the frames `escaped`; further lines are indented."""

    def text(value: str) -> str:
        return escaped(_LINE_END.sub("\n  ", encodable(value)))

    thought = "" if message.reasoning is None else f"<think>\n  {text(message.reasoning)}\n  </think>\n  \n  "
    return thought + text(message.content) + _calls_as_text(message, text)


def _tool_lines(tools: Sequence[Mapping[str, Any]], escaped: Callable[[str], str]) -> list[str]:
    if not tools:
        return []
    how = 'To use a tool write <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Tools:'
    return [f"tools: {how}", *("  " + escaped(json.dumps(tool.get("function", tool))) for tool in tools)]


def is_plain(tokenizer: Any) -> bool:
    """True if a `HuggingFaceTokenizer`'s own template writes the same as `PlainTemplate`."""
    return bool(tokenizer.eos_ids) and tokenizer.hf.chat_template == _plain_text(tokenizer)


def _plain_text(tokenizer: Any) -> str:
    bos = "{{- bos_token }}" if starts_with_bos(tokenizer) else ""
    return bos + _JINJA.replace("END", repr(tokenizer.piece(tokenizer.eos_ids[0])))


def starts_with_bos(tokenizer: Any) -> bool:
    """True if a `HuggingFaceTokenizer` puts a BOS before every text. (GPT-2's has one and does not.)"""
    raw = tokenizer.hf
    return raw.bos_token_id is not None and list(raw("x").input_ids)[:1] == [raw.bos_token_id]


# --- ChatML ---

_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
"""The built-in ChatML template with a place for tools, for models that speak ChatML and whose own template
lists no tools. It is Qwen 2.5's own (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct) without its default
system message. Tools, calls and results are written as Qwen 2.5 and Hermes write them, so that `HERMES`
reads the calls:

    <|im_start|>system          the system message, then the tools as JSON between <tools> and </tools>
    <|im_start|>assistant       words, then <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <|im_start|>user            results, each between <tool_response> and </tool_response>

It shows everything that was said, thoughts too, and only appends.
"""


def speaks_chatml(tokenizer: Any) -> bool:
    """True if a `HuggingFaceTokenizer` has the control tokens that frame ChatML's messages."""
    added = {token.content for token in tokenizer.hf.added_tokens_decoder.values()}
    return added.issuperset(_TOKENS)


def chatml_text(tokenizer: Any) -> str:
    """The template for a `HuggingFaceTokenizer`, with a BOS in front where the tokenizer itself puts one.

    Raises ConfigurationError for a tokenizer without ChatML's control tokens.
    """
    if not speaks_chatml(tokenizer):
        raise ConfigurationError(
            "the chatml template frames messages by the control tokens <|im_start|> and <|im_end|>, which "
            'this model\'s tokenizer does not have: set AgentConfig(chat_template="plain")'
        )
    return "{{- bos_token }}" + CHATML if starts_with_bos(tokenizer) else CHATML
