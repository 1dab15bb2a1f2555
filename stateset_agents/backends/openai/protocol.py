"""OpenAI's chat-completions API as values: parse and check requests, format answers, chunks and errors.

It knows nothing of agents. Used by serving/ and environments/programs/.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import MAX_VALUES, FinishReason, Message, calls_answered, num_values

if TYPE_CHECKING:
    from aiohttp import web


# --- the body of a request: a model that validates it and is its schema in `/openapi.json`
#
# All types and limits of fields are here. Unknown fields are refused by name, except inside messages and
# tools, which clients send back as other servers made them. A null counts as absent.

_INT64 = 2**63
Text = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Thoughts = Annotated[str, Field(max_length=2**20)] | None
_SHOWN = 80
"""Characters of a client's value that an error repeats."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class TextPart(_Part):
    """A part of a message's content; only text is supported."""

    text: str


class Function(_Part):
    """The function that a tool call calls."""

    name: str
    arguments: str | dict[str, Any] | None = Field(
        default=None, description="a JSON object, or the text of one"
    )


class Call(_Part):
    """A tool call that the assistant made."""

    function: Function
    id: str | None = None


class ChatMessage(_Part):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: Thoughts = Field(default=None, description="the assistant's thoughts, as they were answered")
    reasoning_content: Thoughts = Field(default=None, description="an older name of `reasoning`")


class OfferedFunction(_Part):
    """A tool that the assistant may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema of its arguments")
    strict: bool | None = Field(
        default=None, description="true: calls keep to the schemas of the tools, by a grammar"
    )


class OfferedTool(_Part):
    """An entry of `tools`."""

    type: Literal["function"] = "function"
    function: OfferedFunction


class StreamOptions(_Part):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool | None = Field(default=None, description="end the stream with the token counts")
    include_obfuscation: bool | None = Field(default=None, description="without effect")


class TextFormat(_Part):
    """Words, or any JSON object."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object"]


class NamedSchema(_Part):
    """The schema of an answer, with its name."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema", description="the answer keeps to it, by a grammar")
    strict: bool | None = Field(default=None, description="without effect: the answer always keeps to it")


class SchemaFormat(_Part):
    """JSON of a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChosenFunction(_Part):
    """The tool that has to be called."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1)]


class ChosenTool(_Part):
    """A `tool_choice` that names a tool."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["function"]
    function: ChosenFunction


class ChatBody(_Part):
    """A request for a chat completion."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, description="the last one is not the assistant's"
    )
    model: str | None = Field(default=None, description="the served model; unset: the same")
    tools: Annotated[list[OfferedTool], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = Field(
        default=None, description="none: as if no tool were offered; required, or a tool: by a grammar"
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: at most one tool call an answer"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=8, description="answers to this request")
    logprobs: bool | None = Field(
        None, description="of the sampled tokens, under what they were sampled from"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=0, description="other tokens than the sampled are not told"
    )
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1, description="0 keeps every token")
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31 - 1, description="another name of max_tokens"
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(default=None, ge=-_INT64, lt=_INT64, description="the same one, the same answer")
    frequency_penalty: float | None = Field(default=None, ge=0, le=0, description="not served")
    presence_penalty: float | None = Field(default=None, ge=0, le=0, description="not served")
    response_format: TextFormat | SchemaFormat | None = Field(
        default=None, description="json_object and json_schema: by a grammar"
    )
    user: Text | None = Field(
        default=None, description="names the conversation where a deployment is served; else without effect"
    )
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = Field(
        default=None, description="its conversation_id names the conversation likewise, before user"
    )
    store: bool | None = Field(default=None, description="without effect, as those below")
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class RolloutBody(ChatBody):
    """A request for a chat completion in training: one answer per request, and always the request's tools."""

    n: int | None = Field(default=None, ge=1, le=1)
    logprobs: Literal[False] | None = None
    tool_choice: Literal["auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: Literal[True] | None = None


def body_for(*, max_output_tokens: int, max_choices: int) -> type[ChatBody]:
    """`ChatBody` with a server's limits."""
    tokens: Any = (int | None, Field(default=None, ge=1, le=max_output_tokens))
    choices: Any = (
        int | None,
        Field(default=None, ge=1, le=max_choices, description="answers to this request"),
    )
    return create_model(
        "ChatBody",
        __base__=ChatBody,
        __doc__=ChatBody.__doc__,
        max_tokens=tokens,
        max_completion_tokens=tokens,
        n=choices,
    )


def validation_message(error: ValidationError) -> tuple[str, str | None]:
    """The first error as one line, and the name of its field.

    `temperature must be greater than or equal to 0, got -1`
    """
    errors = error.errors(include_url=False)
    param = str(errors[0]["loc"][0])[:_SHOWN] if errors[0]["loc"] else None
    errors = [item for item in errors if not param or item["loc"][0] == errors[0]["loc"][0]]
    item = max(
        errors, key=lambda item: len(_path(item["loc"]))
    )  # of a union, the member that matched furthest
    path = _path(item["loc"])
    if item["type"] == "extra_forbidden":
        last = str(item["loc"][-1])[:_SHOWN]
        return f"{path if path.endswith(last) else f'{path}.{last}'} is not served here: leave it out", param
    if item["type"] == "missing":
        return f"{path} is missing", param
    kinds = [re.sub(r" or instance of \w+", "", item["msg"]) for item in errors if _path(item["loc"]) == path]
    expected = " or ".join(dict.fromkeys(kind.removeprefix("Input should be ") for kind in kinds))
    verb = "must be" if kinds[0].startswith("Input should be ") else "cannot be:"
    return f"{path} {verb} {expected}, got {_shown(item['input'])}", param


def _path(loc: Collection[str | int]) -> str:
    """`("messages", 0, "content", "list[TextPart]", 1)` -> `messages[0].content[1]`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _NAMES or not path:
            path += f".{part}" if path else part[:_SHOWN]
    return path or "the body"


_NAMES = {
    name
    for model in (
        *(ChatBody, ChatMessage, TextPart, Call, Function),
        *(OfferedTool, OfferedFunction, StreamOptions, TextFormat),
    )
    for name in model.model_fields
}
"""Field names. Pydantic's paths also contain the members of unions."""


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:_SHOWN]
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


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


def invalid(message: str, param: str | None = None, *, code: str = "invalid_request") -> ApiError:
    """The error of status 400 for a body, or its field `param`, that is not served."""
    return ApiError(message, code=code, param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for a chat completion, validated."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools as the client sent them: JSON schemas in OpenAI's format."""
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    """True if the token counts are sent at the end of a stream."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `SAMPLING` in the request."""
    num_choices: int = 1
    logprobs: bool = False
    """True if the log-probs of the sampled tokens are sent."""
    single_call: bool = False
    """True if an answer may have one tool call at most."""
    tool_choice: str = "auto"
    """auto, required, none, or a tool's name."""
    answer_schema: Mapping[str, Any] | None = None
    """The schema of an answer in words; None: any words."""
    user: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_request(data: Any, *, body: type[ChatBody] = ChatBody, ignore: Collection[str] = ()) -> ChatRequest:
    """The request of a JSON body; fields in `ignore` count as absent.

    Raises ApiError, with the field's name, for a field that is invalid or not supported.
    """
    if not isinstance(data, Mapping):
        raise invalid(f"the body must be a JSON object, got {'nothing' if data is None else _shown(data)}")
    data = {name: _number(value) for name, value in data.items() if value is not None and name not in ignore}
    try:
        request = body.model_validate(data)
    except ValidationError as error:
        raise invalid(*validation_message(error)) from error
    if sum(map(num_values, _written_arguments(request))) > MAX_VALUES:
        raise invalid(f"the arguments of tool calls hold more than {MAX_VALUES:,} JSON values", "messages")
    options = request.stream_options
    return ChatRequest(
        messages=_messages(data["messages"]),
        tools=() if request.tool_choice == "none" else tuple(data.get("tools", ())),
        model=request.model or "",
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        sampling={name: value for name, value in data.items() if name in SAMPLING},
        num_choices=request.n or 1,
        logprobs=bool(request.logprobs),
        single_call=request.parallel_tool_calls is False,
        tool_choice=_choice(request),
        answer_schema=_schema(request.response_format),
        user=request.user or "",
        metadata=request.metadata or {},
    )


def _choice(request: ChatBody) -> str:
    """The request's `tool_choice` in one word. Raises ApiError where it names no tool of the request."""
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        if choice == "required" and not request.tools:
            raise invalid(
                "tool_choice is required, and tools are missing: offer some",
                "tool_choice",
                code="invalid_tool_choice",
            )
        return choice or "auto"
    names = [tool.function.name for tool in request.tools or ()]
    if choice.function.name not in names:
        offered = ", ".join(names) or "none"
        raise invalid(
            f"tool_choice names {choice.function.name!r:.60}, and the tools are: {offered:.200}",
            "tool_choice",
            code="invalid_tool_choice",
        )
    return choice.function.name


def _schema(format: TextFormat | SchemaFormat | None) -> Mapping[str, Any] | None:
    if isinstance(format, SchemaFormat):
        return format.json_schema.json_schema
    return {"type": "object"} if format is not None and format.type == "json_object" else None


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
            raise invalid(f"messages[{index}]: {error}", "messages", code="invalid_messages") from error
    if messages[-1].role == "assistant":
        last = "the last message is the assistant's own: end with a user's or a tool's"
        raise invalid(last, "messages", code="invalid_messages")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, ready to be sent complete or in chunks."""

    id: str
    model: str
    message: Message
    """The message as `as_sent` returns it."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    index: int = 0
    """Index among the answers to one request."""
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """Log-probs of each sampled token, if the request asks for them."""
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
    """A chunk of a stream; the last chunk of an answer has its log-probs."""
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
