"""Parse the responses of a chat endpoint, complete or streamed; for `ChatClient`.

A stream is a sequence of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html),
each with one chunk of the answer in OpenAI's format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from stateset_agents.backends.openai.thoughts import WordStream, words_of
from stateset_agents.types.messages import ToolCall

__all__ = ["ChatAnswer", "Failure", "StreamedAnswer", "http_failure", "read_answer"]

_TRANSIENT = frozenset({408, 409, 425, 429})
"""Besides every 5xx: statuses after which the same request may succeed."""
_THOUGHTS = ("reasoning", "reasoning_content")
"""Names of the thoughts beside an answer's content."""
_CHARACTERS_A_TOKEN = 4
"""Estimate for an endpoint that does not report its usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """An endpoint's answer."""

    text: str
    """Its words, without what the model thought; empty where it was cut in its thoughts."""
    finish_reason: str
    """"length" if the text was cut."""
    prompt_tokens: int
    """As the endpoint counted them; else estimated from the characters."""
    completion_tokens: int
    tool_calls: tuple[ToolCall, ...] = ()
    """Which tools it wants called, of those that the request offered."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer."""

    why: str
    transient: bool
    """May the same request succeed later?"""
    retry_after: float | None = None
    """Seconds that the server asks the client to wait."""
    wants_newer_name: bool = False
    """It refused `max_tokens` and named `max_completion_tokens`."""


def http_failure(status: int, text: str, retry_after: str | None) -> Failure:
    """The failure of a response with a status other than 200; `retry_after` is the header's value."""
    transient = _is_transient(status)
    why = f"status {status}: {' '.join(text.split())!r:.200}"
    newer = status == 400 and "max_completion_tokens" in text
    wait = _seconds(retry_after) if transient else None
    return Failure(why, transient=transient, retry_after=wait, wants_newer_name=newer)


def read_answer(text: str, body: Mapping[str, Any]) -> ChatAnswer | Failure:
    """A complete answer to the request `body`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return Failure(f"its answer is not JSON: {text!r:.80}", transient=True)
    try:
        choice = data["choices"][0]
        content = _content(choice["message"])
        calls = _tool_calls(choice["message"]) if body.get("tools") else ()
    except (AttributeError, LookupError, TypeError):
        content, calls = None, ()
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        return _without_text(data)
    answer = _counted(content, choice.get("finish_reason"), data.get("usage"), body)
    return replace(answer, tool_calls=calls)


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
            self.failure = _stream_failure(data["error"])
        else:
            self._take_chunk(data)

    def _take_chunk(self, data: Mapping[str, Any]) -> None:
        self._usage = data.get("usage") or self._usage
        try:
            choices = data.get("choices") or [{}]
            choice = choices[0]
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece = _content(choice.get("delta") or {})
        except (AttributeError, LookupError, TypeError):
            self.failure = _without_text(data)
            return
        if isinstance(piece, str):
            self.text = (self.text or "") + piece
            if words := self._words.add(piece):
                self.on_text(words)


def _content(message: Mapping[str, Any]) -> Any:
    """A message's content; "" where the model has only thought so far."""
    content = message.get("content")
    has_thought = any(isinstance(message.get(name), str) for name in _THOUGHTS)
    return "" if content is None and has_thought else content


def _tool_calls(message: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    """The message's calls; one whose arguments are no JSON object says so in its `error`."""
    calls = []
    for item in message.get("tool_calls") or ():
        name, written = item["function"]["name"], item["function"].get("arguments") or "{}"
        try:
            arguments = json.loads(written) if isinstance(written, str) else written
        except (ValueError, RecursionError):
            arguments = None
        is_object = isinstance(arguments, dict)
        calls.append(
            ToolCall(
                name=str(name),
                arguments=arguments if is_object else {},
                id=str(item.get("id") or ""),
                error=None if is_object else f"the arguments of {name} are not a JSON object",
            )
        )
    return tuple(calls)


def _is_transient(status: int) -> bool:
    return status >= 500 or status in _TRANSIENT


def _stream_failure(error: Any) -> Failure:
    """An error in the middle of a stream, when no status can be sent any more."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    code, kind = fields.get("code"), fields.get("type")
    status = code if isinstance(code, int) else None
    is_final = kind == "invalid_request_error" if status is None else not _is_transient(status)
    return Failure(f"it says {fields.get('message') or kind or code!r:.200}", transient=not is_final)


def _without_text(data: Any) -> Failure:
    shown = "" if data is None else f": {json.dumps(data)[:160]}"
    return Failure(f"its answer holds no text{shown}", transient=False)


def _counted(text: str, finish_reason: Any, usage: Any, body: Mapping[str, Any]) -> ChatAnswer:
    usage = usage if isinstance(usage, Mapping) else {}
    prompt_characters = sum(len(message["content"]) for message in body["messages"])
    return ChatAnswer(
        text=words_of(text),
        finish_reason=str(finish_reason or "stop"),
        prompt_tokens=_count(usage.get("prompt_tokens"), prompt_characters),
        completion_tokens=_count(usage.get("completion_tokens"), len(text)),
    )


def _count(reported: Any, characters: int) -> int:
    if isinstance(reported, int) and not isinstance(reported, bool) and reported >= 0:
        return reported
    return math.ceil(characters / _CHARACTERS_A_TOKEN)


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
