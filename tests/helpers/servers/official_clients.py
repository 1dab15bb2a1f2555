"""OpenAI's and Anthropic's clients, each of whose answers is validated against the types of its package."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import anthropic
import anthropic.types
import httpx2
import openai
import openai.types.chat
import openai.types.responses
from pydantic import BaseModel, TypeAdapter

from stateset_agents.serving.openapi import ERRORS

OURS = {("ChatCompletionMessage", "reasoning"), ("ChoiceDelta", "reasoning")}
"""Fields that no package has, and several servers: the thoughts of a chat completion."""


class Judge:
    """Sees every body that a server sends; an unknown or a missing field fails."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        """Validated bodies and events by type."""

    async def __call__(self, response: httpx2.Response) -> None:
        text = (await response.aread()).decode()
        path = response.request.url.path
        if response.headers["content-type"].startswith("text/event-stream"):
            for name, data in events(text):
                self._event(path, name, data)
            return
        data = json.loads(text)
        if response.status_code != 200:
            self._error(path, data)
        else:
            self._expect(_BODIES[path.rpartition("/v1/")[2].replace("models/mine", "model")], data)

    def _event(self, path: str, name: str | None, data: dict[str, Any]) -> None:
        if path.endswith("/chat/completions"):
            assert name is None
            if "error" in data:
                return self._error(path, data)
            return self._expect(openai.types.chat.ChatCompletionChunk, data)
        assert name == data["type"]
        if name == "error" and path.endswith("/messages"):
            return self._error(path, data)
        return self._expect(_event_types()[name], data)

    def _error(self, path: str, data: dict[str, Any]) -> None:
        if "/v1/messages" in path:
            return self._expect(anthropic.types.ErrorResponse, data)
        assert set(data["error"]) == {"message", "type", "param", "code"}
        assert any(data["error"]["code"] in codes for codes in ERRORS.values()) or data["error"]["code"]
        self.seen["OpenAI's error"] += 1
        return None

    def _expect(self, kind: type[BaseModel], data: dict[str, Any]) -> None:
        value = _adapter(kind).validate_json(json.dumps(data), strict=True)
        assert list(unknown_fields(value)) == [], data
        self.seen[kind.__name__] += 1


def events(text: str) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """The events of a stream: name and data."""
    for block in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            yield lines.get("event"), json.loads(lines["data"])


def unknown_fields(value: Any) -> Iterator[tuple[str, str]]:
    """Fields of models, however deep, that their package does not have."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            if (type(value).__name__, name) not in OURS:
                yield type(value).__name__, name
        for name in type(value).model_fields:
            yield from unknown_fields(getattr(value, name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from unknown_fields(item)
    elif isinstance(value, dict):
        yield from unknown_fields(list(value.values()))


_BODIES: dict[str, type[BaseModel]] = {
    "chat/completions": openai.types.chat.ChatCompletion,
    "responses": openai.types.responses.Response,
    "messages": anthropic.types.Message,
    "model": openai.types.Model,
    "messages/count_tokens": anthropic.types.MessageTokensCount,
}


@cache
def _adapter(kind: type[BaseModel]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _event_types() -> dict[str, type[BaseModel]]:
    unions = (openai.types.responses.ResponseStreamEvent, anthropic.types.RawMessageStreamEvent)
    kinds = [kind for union in unions for kind in get_args(get_args(union)[0])]
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}


def openai_client(url: str, judge: Judge, **settings: Any) -> openai.AsyncOpenAI:
    """`url`: of the server, with /v1."""
    settings = {"api_key": "none", "max_retries": 0, **settings}
    http = httpx2.AsyncClient(event_hooks={"response": [judge]}, timeout=60)
    return openai.AsyncOpenAI(base_url=url, http_client=http, **settings)


def anthropic_client(url: str, judge: Judge, **settings: Any) -> anthropic.AsyncAnthropic:
    """`url`: of the server, with /v1."""
    settings = {"api_key": "none", "max_retries": 0, **settings}
    http = httpx2.AsyncClient(event_hooks={"response": [judge]}, timeout=60)
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), http_client=http, **settings)
