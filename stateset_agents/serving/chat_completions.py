"""OpenAI's chat-completions interface as values: requests read and checked, answers, chunks and errors made.

Nothing here knows of agents; the servers beside it do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from stateset_agents.errors import ConfigurationError, StatesetError
from stateset_agents.messages import FinishReason, Message

if TYPE_CHECKING:
    from aiohttp import web

__all__ = [
    "Answer",
    "ApiError",
    "ChatRequest",
    "as_sent",
    "chunk",
    "chunks",
    "in_openai_s_format",
    "read_json",
    "read_request",
    "whole",
]

SAMPLING = frozenset({"temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed"})
"""How an answer is drawn: a server takes them from the request, or refuses them."""
_WITHOUT_EFFECT = frozenset(
    {
        *("model", "messages", "tools", "stream", "stream_options", "user", "metadata", "store"),
        *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    }
)
"""Read elsewhere, or of no influence on an answer."""
_ONLY: Mapping[str, Any] = {
    "n": 1,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "top_logprobs": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
}
"""The one value of these that is served."""


class ApiError(StatesetError):
    """What a client is told instead of an answer, in OpenAI's error format."""

    def __init__(self, message: str, *, code: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request for a chat completion."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As they were given: OpenAI's shape of JSON schemas."""
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    """End a stream with the token counts?"""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Those of `SAMPLING` that it names."""


def read_request(data: Any, *, ignore: Collection[str] = ()) -> ChatRequest:
    """The request that a JSON body stands for; fields in `ignore` count as absent.

    Raises ApiError that names the first field that cannot be served.
    """
    if not isinstance(data, Mapping):
        raise _invalid(f"the body must be a JSON object, got {_shown(data)}", None)
    given = {name: value for name, value in data.items() if value is not None and name not in ignore}
    for name, value in given.items():
        if name in _ONLY and value != _ONLY[name]:
            raise _invalid(
                f"{name} can only be {json.dumps(_ONLY[name])} here, got {_shown(value)}: leave it out", name
            )
        if name not in _ONLY and name not in _WITHOUT_EFFECT and name not in SAMPLING:
            raise _invalid(f"{name} is not served here: leave it out", name)
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise _invalid(f"stream_options must be an object, got {_shown(options)}", "stream_options")
    return ChatRequest(
        messages=_messages(given.get("messages")),
        tools=_tools(given.get("tools", [])),
        model=str(given.get("model", "")),
        stream=given.get("stream", False) is True,
        include_usage=options.get("include_usage", False) is True,
        sampling={name: value for name, value in given.items() if name in SAMPLING},
    )


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise _invalid(f"messages must be a list of at least one message, got {_shown(given)}", "messages")
    read = []
    for place, item in enumerate(given):
        try:
            read.append(Message.from_openai(item))
        except ConfigurationError as error:
            raise _invalid(f"messages[{place}]: {error}", "messages") from error
    if read[-1].role == "assistant":
        raise _invalid("the last message is the assistant's own: end with a user's or a tool's", "messages")
    return tuple(read)


def _tools(given: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise _invalid(f"tools must be a list, got {_shown(given)}", "tools")
    for place, tool in enumerate(given):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(
                f'tools[{place}] must be {{"type": "function", "function": {{"name": ...}}}}, '
                f"got {_shown(tool)}",
                "tools",
            )
    return tuple(given)


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(message, code="invalid_request", param=param)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.80}" if value is not None else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, ready to be sent whole or in chunks."""

    id: str
    model: str
    message: Message
    """As `as_sent` has it."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        """How many tokens were read and said."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    @staticmethod
    def reason(message: Message, reason: FinishReason) -> Literal["stop", "length", "tool_calls"]:
        """OpenAI's finish reason for a message as it is sent."""
        if reason == "length":
            return "length"
        return "tool_calls" if message.tool_calls else "stop"


def as_sent(reply: Message) -> Message:
    """A reply as a client gets it, and is expected to send it back with its next request.

    A tool call that could not be read has no name to call: it stays in the words, as it was written.
    """
    readable = tuple(call for call in reply.tool_calls if call.error is None)
    broken = [call.written for call in reply.tool_calls if call.error is not None]
    return replace(reply, content="\n".join(filter(None, [reply.content, *broken])), tool_calls=readable)


def whole(answer: Answer) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": {**_spoken(answer.message), "role": "assistant", "refusal": None},
        "finish_reason": answer.finish_reason,
        "logprobs": None,
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": answer.usage}


def chunks(answer: Answer, *, include_usage: bool, said: str | None = None) -> Iterator[dict[str, Any]]:
    """The same answer as the chunks of a stream; the server adds `[DONE]`.

    `said`: the words that were sent already, after the role; None where nothing was.
    """
    spoken = _spoken(answer.message)
    calls = [{"index": place, **call} for place, call in enumerate(spoken.pop("tool_calls", ()))]
    if said is None:
        yield chunk(answer, {"role": "assistant", "content": spoken["content"]})
    elif len(answer.message.content) > len(said):
        yield chunk(answer, {"content": answer.message.content[len(said) :]})
    if calls:
        yield chunk(answer, {"tool_calls": calls})
    yield chunk(answer, {}, answer.finish_reason)
    if include_usage:
        yield {**_head(answer, "chat.completion.chunk"), "choices": [], "usage": answer.usage}


def chunk(answer: Answer, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """One chunk of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return {**_head(answer, "chat.completion.chunk"), "choices": [choice]}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _spoken(message: Message) -> dict[str, Any]:
    data = message.to_openai()
    data.pop("role")
    if message.tool_calls and not message.content:
        data["content"] = None
    return data


async def read_json(http: web.Request) -> Any:
    """The body of a request; raises ApiError where it is no JSON."""
    try:
        return json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error})", code="invalid_request") from error


async def in_openai_s_format(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware: what cannot be answered is told as OpenAI's clients expect it.

    They try some statuses again by themselves; nothing here gets better by that.
    """
    from aiohttp import web

    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except web.HTTPException as error:
        what = f"{request.method} {request.path.rpartition('/v1')[2] or request.path}"
        told = ApiError(
            f"{what}: {error.reason}; served are POST /chat/completions and GET /models"
            if error.status in (404, 405)
            else error.text or error.reason,
            code=_CODES.get(error.status, "not_served"),
            status=error.status,
        )
        headers = {name: error.headers[name] for name in _KEPT if name in error.headers}
    return web.json_response(told.body, status=told.status, headers={**headers, "x-should-retry": "false"})


_CODES = {
    401: "invalid_api_key",
    403: "host_not_served",
    404: "not_served",
    405: "method_not_served",
    413: "body_too_large",
    415: "content_type_not_served",
}
"""OpenAI's where it has one."""
_KEPT = ("Allow", "WWW-Authenticate")
"""Headers of aiohttp's refusals that belong to them."""
