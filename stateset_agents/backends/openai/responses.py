"""Parse the responses of a chat endpoint, complete or streamed; for `ChatClient`.

A stream is a sequence of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html),
each with one chunk of the answer in OpenAI's format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from stateset_agents.types.messages import MAX_NESTING, ToolCall, call_arguments, is_nested_deeper

# --- an answer's words, without the thoughts that a thinking model wrote before them
#
# A server that reads thoughts gives them beside the content (`reasoning`). Others leave them in it, between
# `<think>` and `</think>`, without the first where the chat template has written it into the prompt.

_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|\\Z)", re.DOTALL)


def words_of(content: str) -> str:
    """The content as it is, or without thoughts where it holds any; a thought may end with the text."""
    begins_in_thought = _begins_in_thought(content)
    if _OPEN not in content and not begins_in_thought:
        return content
    words = WordStream(in_thought=begins_in_thought)
    return words.add(content) + words.finish()


def thoughts_of(content: str) -> str | None:
    """The thoughts that stand in a content, white space around them aside; None where it holds none."""
    thoughts = _THOUGHT.findall(_OPEN + content if _begins_in_thought(content) else content)
    return "\n".join(thought.strip() for thought in thoughts) if thoughts else None


def _begins_in_thought(content: str) -> bool:
    opened, closed = content.find(_OPEN), content.find(_CLOSE)
    return closed >= 0 and not 0 <= opened < closed


@dataclass(slots=True)
class WordStream:
    """The words of a content while it comes: `add` its pieces.

    That a thought is over which nothing has opened is only known at its end: `in_thought` tells it before.
    """

    in_thought: bool = False
    _rest: str = ""
    """Text that may be the beginning of a delimiter."""
    _strips: bool = False
    """True while white space behind a thought is still to be dropped."""

    def add(self, piece: str) -> str:
        """The words that are certain now."""
        text, words = self._rest + piece, ""
        while True:
            delimiter = _CLOSE if self.in_thought else _OPEN
            before, separator, after = text.partition(delimiter)
            if not separator:
                break
            words += self._words(before)
            self.in_thought = not self.in_thought
            self._strips = self._strips or not self.in_thought
            text = after
        overlap = next(n for n in range(len(delimiter), -1, -1) if text.endswith(delimiter[:n]))
        self._rest = text[len(text) - overlap :]
        return words + self._words(text[: len(text) - overlap])

    def finish(self) -> str:
        """The words that were held back until nothing more can come."""
        rest, self._rest = self._rest, ""
        return self._words(rest)

    def _words(self, text: str) -> str:
        if self.in_thought:
            return ""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text


_TRANSIENT = frozenset({408, 409, 425, 429})
"""Statuses besides every 5xx after which the same request may succeed."""
_THOUGHTS = ("reasoning", "reasoning_content")
"""Names of the thoughts beside an answer's content."""
_TOO_LONG = re.compile(
    "context_length_exceeded|exceed_context_size|maximum context length|available context size"
    "|model's context length|context window|prompt is too long"
)
"""The words with which OpenAI and serve, llama.cpp, vLLM, SGLang and others say that a conversation does not
fit."""
_CHARACTERS_A_TOKEN = 4
"""Estimate for an endpoint that does not report its usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """An endpoint's answer."""

    text: str
    """The answer's words, without what the model thought; empty where it was cut in its thoughts."""
    finish_reason: str
    """"length" if the text was cut."""
    prompt_tokens: int
    """Tokens as the endpoint counted them; else estimated from the characters."""
    completion_tokens: int
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that it wants called, of those that the request offered."""
    reasoning: str | None = None
    """The model's thoughts, beside its words or between `<think>` and `</think>` in them; None in a
    stream."""
    message: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The message as the endpoint wrote it; empty for a stream."""
    is_counted: bool = True
    """True if the endpoint reported the tokens."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why there is no answer."""

    why: str
    transient: bool
    """True if the same request may succeed later."""
    retry_after: float | None = None
    """Seconds that the server asks the client to wait."""
    status: int | None = None
    """The response's, or the code of the error that a response of status 200 holds; None without either."""
    wants_newer_name: bool = False
    """True if it refused `max_tokens` and named `max_completion_tokens`."""
    refuses_seed: bool = False
    """True if it knows no `seed`."""
    exceeds_context: bool = False
    """The conversation is longer than the model's context."""


def http_failure(status: int, text: str, headers: Mapping[str, str]) -> Failure:
    """The failure of a response with a status other than 200, which tells `Retry-After`, or a redirect's
    `Location`, in its headers."""
    transient, refused = status >= 500 or status in _TRANSIENT, status in (400, 413, 422)
    why = f"status {status}: {' '.join(text.split())!r:.200}"
    if 300 <= status < 400:
        to = headers.get("Location", "")
        why = f"status {status}: it redirects to {to!r:.200}: give that url if you trust it"
    return Failure(
        why,
        transient=transient,
        retry_after=_seconds(headers.get("Retry-After")) if transient else None,
        status=status,
        wants_newer_name=status == 400 and "max_completion_tokens" in text,
        refuses_seed=refused and re.search(r"\bseed\b", text) is not None,
        exceeds_context=refused and _TOO_LONG.search(text) is not None,
    )


def read_answer(text: str, body: Mapping[str, Any], *, may_be_empty: bool = False) -> ChatAnswer | Failure:
    """A complete answer to the request `body`; `may_be_empty`: a message of no words is an answer too."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return Failure(f"its answer is not JSON: {text!r:.80}", transient=True)
    if not isinstance(data, Mapping):
        return _without_text(data)
    if data.get("error"):
        return _reported_failure(data["error"])
    choice = _first_choice(data)
    if choice.get("error"):
        return _reported_failure(choice["error"])
    message = choice.get("message")
    if message is None:
        return _without_text(data, transient=True)  # a proxy whose model did not answer sends such
    try:
        content, beside = _content(message), _thoughts_beside(message)
        calls = _tool_calls(message) if body.get("tools") else ()
        if content is None and may_be_empty:
            content = message.get("refusal") or ""
    except (AttributeError, LookupError, TypeError):
        return _without_text(data)
    if choice.get("finish_reason") == "error":
        return _without_text(data, transient=True)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        gave_up = content is None and choice.get("finish_reason") is None
        return _without_text(data, transient=gave_up)
    answer = _counted(content, choice.get("finish_reason"), data.get("usage"), body)
    thoughts = beside if beside is not None else thoughts_of(content)
    return replace(answer, tool_calls=calls, reasoning=thoughts, message=message)


@dataclass(slots=True)
class StreamedAnswer:
    """A parser for a streamed answer: `feed` it bytes, and `on_text` gets its words."""

    body: Mapping[str, Any]
    """The request."""
    on_text: Callable[[str], None]
    is_over: bool = False
    """The stream has sent its end."""
    failure: Failure | None = None
    text: str | None = None
    """The content so far, thoughts included; None before its first piece, which may be empty."""
    _words: WordStream = field(default_factory=WordStream)
    _finish_reason: str | None = None
    _usage: Any = None
    _bytes: bytes = b""
    _data: list[str] = field(default_factory=list)

    def feed(self, raw: bytes) -> bool:
        """Parse received bytes. Do they complete an event?

        Comments are no events. They only keep the connection open: a server that sends nothing else is stuck.
        """
        lines = (self._bytes + raw).splitlines(keepends=True)
        self._bytes = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        events = list(self._events(lines))
        for event in events:
            self._take_event(event)
        return bool(events)

    def end(self) -> ChatAnswer | Failure:
        """The answer or failure, once the connection has ended."""
        if not self.is_over and self.failure is None:  # the last event's empty line may be missing
            self.feed(b"\n\n")
        if self.failure is not None:
            return self.failure
        if not self.is_over and self._finish_reason is None:
            return Failure("its answer broke off", transient=True)
        if self._finish_reason == "error":
            return Failure("its answer broke off", transient=True)
        if self.text is None:
            return _without_text(None)
        if words := self._words.finish():
            self.on_text(words)
        return _counted(self.text, self._finish_reason, self._usage, self.body)

    @property
    def tokens_so_far(self) -> int:
        """Estimate of tokens read and written, for an answer that broke off."""
        part = _counted(self.text or "", None, None, self.body)
        return part.prompt_tokens + part.completion_tokens

    def _events(self, lines: Sequence[bytes]) -> Iterator[str]:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r\n")
            if text.startswith("data:"):
                self._data.append(text[5:].removeprefix(" "))
            elif not text and self._data:
                yield "\n".join(self._data)
                self._data.clear()

    def _take_event(self, event: str) -> None:
        if self.is_over or self.failure is not None:
            return
        if event.strip() == "[DONE]":
            self.is_over = True
            return
        try:
            data = json.loads(event)
        except (ValueError, RecursionError):
            self.failure = Failure(f"a piece of its answer is not JSON: {event!r:.80}", transient=True)
            return
        if not isinstance(data, Mapping):
            self.failure = _without_text(data)
        elif data.get("error"):
            self.failure = _reported_failure(data["error"])
        else:
            self._take_chunk(data)

    def _take_chunk(self, data: Mapping[str, Any]) -> None:
        self._usage = data.get("usage") or self._usage
        try:
            choice = (data.get("choices") or [{}])[0]
            if choice.get("error"):
                self.failure = _reported_failure(choice["error"])
                return
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece = _content(choice.get("delta") or {})
        except (AttributeError, LookupError, TypeError):
            self.failure = _without_text(data)
            return
        if isinstance(piece, str):
            self.text = (self.text or "") + piece
            if words := self._words.add(piece):
                self.on_text(words)


def _first_choice(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Empty where a response holds none."""
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return choice if isinstance(choice, Mapping) else {}


def _content(message: Mapping[str, Any]) -> Any:
    """A message's content, the text of its parts where it is a list; "" where the model has only thought so
    far."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if part.get("type") == "text"]
        content = "".join(texts) if texts else None
    return "" if content is None and _thoughts_beside(message) is not None else content


def _thoughts_beside(message: Mapping[str, Any]) -> str | None:
    """The thoughts that a message holds under a name of their own, or as parts of its content."""
    beside = next((message[name] for name in _THOUGHTS if isinstance(message.get(name), str)), None)
    content = message.get("content")
    if beside is not None or not isinstance(content, list):
        return beside
    thoughts = [part["thinking"] for part in content if part.get("type") == "thinking"]
    texts = [_content({"content": thought}) if isinstance(thought, list) else thought for thought in thoughts]
    return "".join(text or "" for text in texts) if texts else None


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The message's calls; one whose arguments are no JSON object says so in its `error`.

    Raises KeyError, TypeError or AttributeError for what is no call at all: the endpoint's own fault.
    """
    calls = []
    for item in message.get("tool_calls") or ():
        name, error, source = item["function"]["name"], None, item["function"]
        try:
            arguments_text, unknown = call_arguments(item["function"])
            source = arguments_text or "{}"
            arguments = json.loads(source) if isinstance(source, str) else source
        except (ValueError, RecursionError):
            arguments, unknown = None, []
        if unknown and not arguments:
            error = f"the call of {name} has no arguments, and {unknown[0]!r} beside its name"
        elif not isinstance(arguments, dict):
            error = f"the arguments of {name} are not a JSON object"
        elif is_nested_deeper(arguments, MAX_NESTING):
            error = f"the arguments of {name} have more than {MAX_NESTING} levels of objects and lists"
        calls.append(
            ToolCall(
                name=str(name),
                arguments={} if error else arguments,
                id=str(item.get("id") or ""),
                error=error,
                written=str(source) if error else "",
            )
        )
    return tuple(calls)


def _reported_failure(error: Any) -> Failure:
    """An error inside a response of status 200: in the middle of a stream, or as OpenRouter sends an error of
    the provider behind it (https://openrouter.ai/docs/api-reference/errors)."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    code, kind = fields.get("code"), fields.get("type")
    message = str(fields.get("message") or kind or code)
    why = f"it says {message!r:.200}"
    status = int(str(code)) if re.fullmatch("[345][0-9]{2}", str(code)) else None
    if status is not None:
        return replace(http_failure(status, message, {}), why=why)
    is_too_long = _TOO_LONG.search(f"{code} {message}") is not None
    return Failure(
        why, transient=kind != "invalid_request_error" and not is_too_long, exceeds_context=is_too_long
    )


def _without_text(data: Any, *, transient: bool = False) -> Failure:
    excerpt = "" if data is None else f": {json.dumps(data)[:160]}"
    return Failure(f"its answer holds no text{excerpt}", transient=transient)


def _counted(text: str, finish_reason: Any, usage: Any, body: Mapping[str, Any]) -> ChatAnswer:
    usage = usage if isinstance(usage, Mapping) else {}
    prompt_characters = sum(len(message.get("content") or "") for message in body["messages"])
    return ChatAnswer(
        text=words_of(text),
        finish_reason=str(finish_reason or "stop"),
        prompt_tokens=_count(usage.get("prompt_tokens"), prompt_characters),
        completion_tokens=_count(usage.get("completion_tokens"), len(text)),
        is_counted=_is_count(usage.get("prompt_tokens")) and _is_count(usage.get("completion_tokens")),
    )


def _count(reported: Any, characters: int) -> int:
    return int(reported) if _is_count(reported) else math.ceil(characters / _CHARACTERS_A_TOKEN)


def _is_count(reported: Any) -> bool:
    return isinstance(reported, int) and not isinstance(reported, bool) and reported >= 0


def _seconds(value: str | None) -> float | None:
    """The header's seconds, from a number or a date (RFC 9110, 10.2.3); None if it cannot be parsed."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            until = parsedate_to_datetime(value)
        except ValueError:
            return None
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        seconds = (until - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
