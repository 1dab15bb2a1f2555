"""OpenAI's chat-completions API as values: parse and check requests, format answers, chunks and errors.

It knows nothing of agents. Used by serving/ and environments/programs/.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from stateset_agents.backends.openai.chat_body import ChatBody, validation_message
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import MAX_VALUES, FinishReason, Message, calls_answered, num_values

if TYPE_CHECKING:
    from aiohttp import web


_log = get_logger(__name__)

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""Id of the current request; every response has it as X-Request-Id."""
SAMPLING = frozenset({"temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed"})
"""Fields that say how an answer is sampled. A server uses or refuses them."""


class ApiError(StatesetError):
    """An error for the client, in OpenAI's format."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int = 400,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """`retry_after`: seconds after which the same request may succeed; None: never."""
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param
        self.headers = {"x-should-retry": "false"}
        if retry_after is not None:
            self.headers = {"x-should-retry": "true", "Retry-After": str(retry_after)}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request for a chat completion."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """As the client sent them: JSON schemas in OpenAI's format."""
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    """Send the token counts at the end of a stream?"""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `SAMPLING` in the request."""
    num_choices: int = 1
    logprobs: bool = False
    """Send the log-probs of the sampled tokens?"""
    single_call: bool = False
    """At most one tool call per answer?"""
    user: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_request(data: Any, *, body: type[ChatBody] = ChatBody, ignore: Collection[str] = ()) -> ChatRequest:
    """The request of a JSON body; fields in `ignore` count as absent.

    Raises ApiError, with the field's name, for a field that is invalid or not supported.
    """
    if not isinstance(data, Mapping):
        raise _invalid(f"the body must be a JSON object, got {_shown(data)}", None)
    sent = {name: _number(value) for name, value in data.items() if value is not None and name not in ignore}
    try:
        read = body.model_validate(sent)
    except ValidationError as error:
        raise _invalid(*validation_message(error)) from error
    if sum(map(num_values, _written_arguments(read))) > MAX_VALUES:
        raise _invalid(f"the arguments of tool calls hold more than {MAX_VALUES:,} JSON values", "messages")
    options = read.stream_options
    return ChatRequest(
        messages=_messages(sent["messages"]),
        tools=() if read.tool_choice == "none" else tuple(sent.get("tools", ())),
        model=read.model or "",
        stream=bool(read.stream),
        include_usage=bool(options and options.include_usage),
        sampling={name: value for name, value in sent.items() if name in SAMPLING},
        num_choices=read.n or 1,
        logprobs=bool(read.logprobs),
        single_call=read.parallel_tool_calls is False,
        user=read.user or "",
        metadata=read.metadata or {},
    )


def _written_arguments(read: ChatBody) -> Iterator[bytes]:
    """Arguments that are JSON texts: when the body was counted, each was a single value."""
    for message in read.messages:
        for call in message.tool_calls or ():
            if isinstance(call.function.arguments, str):
                yield call.function.arguments.encode("utf-8", "surrogatepass")


def _number(value: Any) -> Any:
    """4.0 is an integer in JSON Schema, as in JavaScript."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _messages(items: Sequence[Any]) -> tuple[Message, ...]:
    messages = []
    for index, item in enumerate(items):
        try:
            messages.append(Message.from_openai(item))
        except ConfigurationError as error:
            raise ApiError(
                f"messages[{index}]: {error}", code="invalid_messages", param="messages"
            ) from error
    if messages[-1].role == "assistant":
        raise ApiError(
            "the last message is the assistant's own: end with a user's or a tool's",
            code="invalid_messages",
            param="messages",
        )
    return _with_tool_names(messages)


def _with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool results with their tool's name, which OpenAI's shape leaves to the call: of the reply before, or,
    for one that comes late, the last call of its id."""
    named: list[Message] = list(messages)
    late: dict[str, str] = {}
    replies = [place for place, message in enumerate(messages) if message.role == "assistant"]
    for place, following in itertools.pairwise([*replies, len(messages)]):
        calls = messages[place].tool_calls
        late |= {call.id: call.name for call in calls}
        results = [at for at in range(place + 1, following) if messages[at].role == "tool"]
        numbers = calls_answered(calls, [messages[at] for at in results])
        for at, number in zip(results, numbers, strict=True):
            result = messages[at]
            if result.name is None:
                name = late.get(result.tool_call_id or "") if number is None else calls[number].name
                named[at] = replace(result, name=name)
    return tuple(named)


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(message, code="invalid_request", param=param)


def _shown(value: Any) -> str:
    return f"{json.dumps(value):.80}" if value is not None else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, ready to be sent complete or in chunks."""

    id: str
    model: str
    message: Message
    """As `as_sent` returns it."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int = 0
    """Among the answers to one request."""
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """Of each sampled token, if the request asks for them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def reason(message: Message, reason: FinishReason) -> Literal["stop", "length", "tool_calls"]:
        """OpenAI's finish reason of a message as it is sent."""
        if reason == "length":
            return "length"
        return "tool_calls" if message.tool_calls else "stop"


def as_sent(reply: Message) -> Message:
    """A reply as the client gets it, and should send it back with its next request.

    A tool call that could not be parsed stays in the content, as the model wrote it.
    """
    parsed = tuple(call for call in reply.tool_calls if call.error is None)
    broken = [call.written for call in reply.tool_calls if call.error is not None]
    return replace(reply, content="\n".join(filter(None, [reply.content, *broken])), tool_calls=parsed)


def completion_body(*answers: Answer) -> dict[str, Any]:
    """The body of a response that is not streamed, with all answers to one request."""
    choices = [
        {
            "index": answer.index,
            "message": {**_message_body(answer.message), "role": "assistant", "refusal": None},
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(answer),
        }
        for answer in answers
    ]
    return {**_head(answers[0], "chat.completion"), "choices": choices, "usage": _usage(answers)}


def new_text(message: Message, sent: Message) -> dict[str, str]:
    """The delta of a stream from the thoughts and words that were sent before to those of `message`."""
    texts = {"reasoning": (message.reasoning, sent.reasoning), "content": (message.content, sent.content)}
    return {
        name: text[len(before or "") :]
        for name, (text, before) in texts.items()
        if text is not None and len(text) > len(before or "")
    }


def chunks(answer: Answer, *, sent: Message | None = None) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed answer; the server adds the usage and `[DONE]`.

    `sent`: the thoughts and words that were sent before, after the role; None if nothing was.
    """
    body = _message_body(answer.message)
    calls = [{"index": index, **call} for index, call in enumerate(body.pop("tool_calls", ()))]
    if sent is None:
        yield chunk(answer, {"role": "assistant", **body})
    elif delta := new_text(answer.message, sent):
        yield chunk(answer, delta)
    if calls:
        yield chunk(answer, {"tool_calls": calls})
    yield chunk(answer, {}, answer.finish_reason)


def chunk(answer: Answer, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """One chunk of a stream; the last chunk of an answer has its log-probs."""
    logprobs = _logprobs(answer) if finish_reason else None
    choice = {"index": answer.index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
    return {**_head(answer, "chat.completion.chunk"), "choices": [choice]}


def usage_chunk(*answers: Answer) -> dict[str, Any]:
    """The last chunk of a stream whose client asked for the token counts."""
    return {**_head(answers[0], "chat.completion.chunk"), "choices": [], "usage": _usage(answers)}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    """Token counts: the prompt's, counted once for all answers, and the sampled ones."""
    prompt, completion = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    return None if answer.logprobs is None else {"content": list(answer.logprobs), "refusal": None}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _message_body(message: Message) -> dict[str, Any]:
    data = message.to_openai()
    data.pop("role")
    if message.reasoning is not None:
        data["reasoning"] = message.reasoning
    if message.tool_calls and not message.content:
        data["content"] = None
    return data


async def openai_error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware that returns errors in OpenAI's format, whose clients retry some statuses by themselves.

    Every response has an id; the log has unexpected errors under that id.
    """
    from aiohttp import web

    id = f"req-{secrets.token_hex(8)}"
    REQUEST_ID.set(id)
    try:
        response = await handler(request)
    except ConnectionError:  # the client left
        raise
    except Exception as error:
        answer = as_api_error(error, request)
        response = web.json_response(answer.body, status=answer.status, headers=answer.headers)
    if not response.prepared:
        response.headers["X-Request-Id"] = id
    return response


def as_api_error(error: Exception, request: web.Request) -> ApiError:
    """The client's view of an error; an unexpected error is logged."""
    from aiohttp import web

    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        path = request.path  # shown from /v1 on: the part before it names a rollout
        endpoint = f"{request.method} {path[max(path.rfind('/v1/'), 0) :]}"
        answer = ApiError(
            f"{endpoint}: {error.reason}; served are POST /v1/chat/completions and GET /v1/models"
            if error.status in (404, 405)
            else error.text or error.reason,
            code=_CODES.get(error.status, "invalid_request"),
            status=error.status,
        )
        answer.headers |= {name: error.headers[name] for name in _KEPT if name in error.headers}
        return answer
    _log.error(f"request {REQUEST_ID.get()} broke", exc_info=error)
    return ApiError(
        f"the server broke on this request; its log says why under {REQUEST_ID.get()}",
        code="internal_error",
        status=500,
    )


_CODES = {
    401: "invalid_api_key",
    403: "host_not_served",
    404: "not_served",
    405: "method_not_served",
    408: "request_timeout",
    413: "request_too_large",
    415: "content_type_not_served",
}
"""Error codes by status; OpenAI's if it has one."""
_KEPT = ("Allow", "WWW-Authenticate")
"""Headers of aiohttp's errors that are kept."""
