"""What a chat endpoint sends back, whole or in pieces, as values: for `ChatClient`, which asks.

A stream is server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), one chunk of
the answer in each, as OpenAI's interface has them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

__all__ = ["ChatAnswer", "Failure", "StreamedAnswer", "read_answer", "refusal"]

_TRANSIENT = frozenset({408, 409, 425, 429})
"""Besides every 5xx: statuses after which the same request may succeed."""
_CHARACTERS_A_TOKEN = 4
"""Of an endpoint that does not say what it used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What the endpoint said."""

    text: str
    finish_reason: str
    """"length" where its words were cut."""
    prompt_tokens: int
    """As it counted them; estimated by the characters where it did not."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer."""

    why: str
    transient: bool
    retry_after: float | None = None
    """Seconds that the server asks for."""
    wants_newer_name: bool = False
    """It refused `max_tokens` and named `max_completion_tokens`."""


def refusal(status: int, text: str, retry_after: str | None) -> Failure:
    """Of a response with a status other than 200; `retry_after` is the header of that name."""
    transient = _may_pass(status)
    why = f"status {status}: {' '.join(text.split())!r:.200}"
    newer = status == 400 and "max_completion_tokens" in text
    wait = _seconds(retry_after) if transient else None
    return Failure(why, transient=transient, retry_after=wait, wants_newer_name=newer)


def read_answer(text: str, body: Mapping[str, Any]) -> ChatAnswer | Failure:
    """A whole answer to the request `body`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return Failure(f"its answer is not JSON: {text!r:.80}", transient=True)
    try:
        choice = data["choices"][0]
        content = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        return _without_text(data)
    return _counted(content, choice.get("finish_reason"), data.get("usage"), body)


@dataclass(slots=True)
class StreamedAnswer:
    """An answer that comes in pieces: bytes go in, words come out."""

    body: Mapping[str, Any]
    """The request."""
    on_text: Callable[[str], None]
    is_over: bool = False
    """The stream has said that nothing follows."""
    failure: Failure | None = None
    text: str | None = None
    """The words so far; None before the first piece of them, if an empty one."""
    _finish_reason: str | None = None
    _usage: Any = None
    _bytes: bytes = b""
    _data: list[str] = field(default_factory=list)

    def take(self, raw: bytes) -> bool:
        """Read what came; is there an event in it, or nothing but a part of one and comments?

        Comments only keep the connection open, so a server that sends no more than them is silent.
        """
        lines = (self._bytes + raw).splitlines(keepends=True)
        self._bytes = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        events = list(self._events(lines))
        for event in events:
            self._take_event(event)
        return bool(events)

    def end(self) -> ChatAnswer | Failure:
        """What it was, once the connection has nothing more."""
        if not self.is_over and self.failure is None:  # the last event's empty line may be missing
            self.take(b"\n\n")
        if self.failure is not None:
            return self.failure
        if not self.is_over and self._finish_reason is None:
            return Failure("its answer broke off", transient=True)
        if self.text is None:
            return _without_text(None)
        return _counted(self.text, self._finish_reason, self._usage, self.body)

    @property
    def tokens_so_far(self) -> int:
        """Read and written, estimated: for one that broke off."""
        part = _counted(self.text or "", None, None, self.body)
        return part.prompt_tokens + part.completion_tokens

    def _events(self, lines: Sequence[bytes]) -> Iterator[str]:
        for line in lines:
            words = line.decode(errors="replace").rstrip("\r\n")
            if words.startswith("data:"):
                self._data.append(words[5:].removeprefix(" "))
            elif not words and self._data:
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
            self.failure = _told(data["error"])
        else:
            self._take_chunk(data)

    def _take_chunk(self, data: Mapping[str, Any]) -> None:
        self._usage = data.get("usage") or self._usage
        try:
            choices = data.get("choices") or [{}]
            choice = choices[0]
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece = (choice.get("delta") or {}).get("content")
        except (AttributeError, LookupError, TypeError):
            self.failure = _without_text(data)
            return
        if isinstance(piece, str):
            self.text = (self.text or "") + piece
            if piece:
                self.on_text(piece)


def _may_pass(status: int) -> bool:
    return status >= 500 or status in _TRANSIENT


def _told(error: Any) -> Failure:
    """An error in the middle of a stream, where no status can be sent any more."""
    told = error if isinstance(error, Mapping) else {"message": error}
    code, kind = told.get("code"), told.get("type")
    status = code if isinstance(code, int) else None
    lasts = kind == "invalid_request_error" if status is None else not _may_pass(status)
    return Failure(f"it says {told.get('message') or kind or code!r:.200}", transient=not lasts)


def _without_text(data: Any) -> Failure:
    shown = "" if data is None else f": {json.dumps(data)[:160]}"
    return Failure(f"its answer holds no text{shown}", transient=False)


def _counted(text: str, finish_reason: Any, usage: Any, body: Mapping[str, Any]) -> ChatAnswer:
    usage = usage if isinstance(usage, Mapping) else {}
    read = sum(len(message["content"]) for message in body["messages"])
    return ChatAnswer(
        text=text,
        finish_reason=str(finish_reason or "stop"),
        prompt_tokens=_count(usage.get("prompt_tokens"), read),
        completion_tokens=_count(usage.get("completion_tokens"), len(text)),
    )


def _count(told: Any, characters: int) -> int:
    if isinstance(told, int) and not isinstance(told, bool) and told >= 0:
        return told
    return math.ceil(characters / _CHARACTERS_A_TOKEN)


def _seconds(value: str | None) -> float | None:
    """Of the header, a number or a date (RFC 9110, 10.2.3); None where it cannot be read."""
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
