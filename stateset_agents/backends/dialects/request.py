"""A request for an answer and the answer to it, whatever API a client speaks; and what all readers share.

Behind serving/ and environments/programs/ nobody knows dialects: `chat.py`, `responses.py` and `anthropic.py`
make a `ChatRequest` of a body, and write an `Answer` in their own shape.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.messages import (
    MAX_VALUES,
    Completion,
    Message,
    ToolCall,
    calls_answered,
    num_values,
)

REQUEST_ID: ContextVar[str] = ContextVar("request_id")
"""Id of the current request; every response has it as X-Request-Id."""


class ApiError(StatesetError):
    """An error for the client; its dialect writes it in its own shape."""

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


def invalid(message: str, param: str | None = None, *, code: str = "invalid_request") -> ApiError:
    """The error of status 400 for a body, or its field `param`, that is not served."""
    return ApiError(message, code=code, param=param)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request for the agent's next message, validated."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that may be called: JSON schemas in the shape of OpenAI's chat completions."""
    model: str = ""
    stream: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How the answer is sampled: temperature, top_p, top_k, max_tokens, stop (a tuple) and seed, where the
    request tells them."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer, ready to be sent complete or in pieces."""

    model: str
    message: Message
    """The message as `as_sent` returns it."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop: str | None = None
    """The string of the request's that ended it."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    """Names the answers to one request; a dialect writes its own prefix before it."""
    index: int = 0
    """Index among the answers to one request."""
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """Log-probs of each sampled token, if the request asks for them."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def completed(self, message: Message, completion: Completion | None) -> Answer:
        """This answer with its message, and what is told of how that was sampled."""
        cut = completion is not None and completion.finish_reason == "length"
        return replace(
            self,
            message=message,
            finish_reason="length" if cut else "tool_calls" if message.tool_calls else "stop",
            stop=completion.stop if completion else None,
            prompt_tokens=len(completion.prompt_ids) if completion else 0,
            completion_tokens=len(completion.token_ids) if completion else 0,
        )

    @property
    def thought_tokens(self) -> int:
        """Estimate, by characters: how many of the sampled tokens are thoughts."""
        thought = len(self.message.reasoning or "")
        calls = sum(len(call.name) + len(written_arguments(call)) for call in self.message.tool_calls)
        total = thought + len(self.message.content) + calls
        return self.completion_tokens * thought // total if total else 0


def as_sent(reply: Message) -> Message:
    """A reply as the client gets it, and should send it back with its next request.

    A tool call that could not be parsed stays in the content, as the model wrote it.
    """
    parsed = tuple(call for call in reply.tool_calls if call.error is None)
    broken = [call.written for call in reply.tool_calls if call.error is not None]
    return replace(reply, content="\n".join(filter(None, [reply.content, *broken])), tool_calls=parsed)


def new_text(message: Message, sent: Message) -> dict[str, str]:
    """What a stream adds, thoughts and words, where those of `sent` were sent before."""
    texts = {"reasoning": (message.reasoning, sent.reasoning), "content": (message.content, sent.content)}
    return {
        name: text[len(before or "") :]
        for name, (text, before) in texts.items()
        if text is not None and len(text) > len(before or "")
    }


def written_arguments(call: ToolCall) -> str:
    """The arguments of a call as JSON text."""
    return json.dumps(dict(call.arguments))


Events = Iterator[Mapping[str, Any]]


class Exchange(Protocol):
    """One request of a client, and how the answers to it are written in the client's dialect.

    A stream is `start`, then `add` with each piece of thoughts or words, then `finish`, for each of the
    answers; and `end`, once.
    """

    closing: ClassVar[bytes]
    """Sent behind the last event of a complete stream."""

    @property
    def request(self) -> ChatRequest: ...

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        ...

    def start(self, head: Answer) -> Events:
        """The events before an answer's first piece."""
        ...

    def add(self, head: Answer, delta: Mapping[str, str]) -> Events:
        """Those of a piece: `reasoning`, `content` or both."""
        ...

    def finish(self, answer: Answer) -> Events:
        """Those after the last piece: tool calls, and how the answer ended."""
        ...

    def end(self, answers: Sequence[Answer]) -> Events:
        """Those at the end of the stream."""
        ...

    def fail(self, error: ApiError) -> Events:
        """Those of a stream that breaks off."""
        ...


def stream_events(exchange: Exchange, answer: Answer) -> Events:
    """An answer's events, all at once; `Exchange.end` has the last ones."""
    yield from exchange.start(answer)
    yield from exchange.add(answer, new_text(answer.message, Message(role="assistant", content="")))
    yield from exchange.finish(answer)


class Dialect(Protocol):
    """An API that a client may speak."""

    path: str
    """Where its requests are posted, from `/v1` on."""

    @property
    def body(self) -> type[BaseModel]:
        """Validates the body of a request, and is its schema in `/openapi.json`."""
        ...

    def read(self, data: Any, client: str, *, ignore: Collection[str] = ()) -> Exchange:
        """The request in a JSON body; fields in `ignore` count as absent.

        Raises ApiError, with the field's name, for a field that is invalid or not supported.
        """
        ...


# --- bodies: models that validate them and are their schemas in `/openapi.json`
#
# All types and limits of fields are there. Unknown fields are refused by name, except inside messages and
# tools, which clients send back as other servers made them. A null counts as absent.

INT64 = 2**63
Text = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Thoughts = Annotated[str, Field(max_length=2**20)] | None
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=0, le=2**31 - 1)]
Strict = Annotated[
    bool | None,
    Field(
        description="without effect: a required or named call always keeps to its schema, and with "
        "constrain calls or strict every call does"
    ),
]
_SHOWN = 80
"""Characters of a client's value that an error repeats."""


class Part(BaseModel):
    """Something in a body that clients send back as other servers made it: further fields are passed over."""

    model_config = ConfigDict(strict=True)


class Closed(BaseModel):
    """Something in a body whose fields are all served; others are refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)


Body = TypeVar("Body", bound=BaseModel)


def with_limits(body: type[Body], **limits: tuple[Any, Any]) -> type[Body]:
    """A body whose fields have a server's limits: each a type and a `Field`."""
    fields: dict[str, Any] = limits
    return create_model(body.__name__, __base__=body, __doc__=body.__doc__, **fields)


def validated(body: type[Body], data: Any, ignore: Collection[str] = ()) -> Body:
    """The JSON body of a request. Raises ApiError for a field that is invalid or not supported."""
    if not isinstance(data, Mapping):
        raise invalid(f"the body must be a JSON object, got {'nothing' if data is None else _shown(data)}")
    data = {name: _number(value) for name, value in data.items() if value is not None and name not in ignore}
    try:
        return body.model_validate(data)
    except ValidationError as error:
        raise invalid(*validation_message(error)) from error


def validation_message(error: ValidationError) -> tuple[str, str | None]:
    """The first error as one line, and the name of its field.

    `temperature must be greater than or equal to 0, got -1`
    """
    errors = error.errors(include_url=False)
    param = str(errors[0]["loc"][0])[:_SHOWN] if errors[0]["loc"] else None
    errors = [item for item in errors if not param or item["loc"][0] == errors[0]["loc"][0]]
    item = max(
        errors, key=lambda item: len(_names(item["loc"]))
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


_MEMBER = re.compile(r"[A-Z]|.*\[|(str|int|float|bool|dict|list|constrained-\w+|function-\w+)\Z")
"""Pydantic's paths also contain the members of unions: `list[TextPart]`, `TextPart`, `str`."""


def _names(loc: Sequence[str | int]) -> list[str | int]:
    """Names of fields and numbers of items."""
    return [part for n, part in enumerate(loc) if not n or isinstance(part, int) or not _MEMBER.match(part)]


def _path(loc: Sequence[str | int]) -> str:
    """`("messages", 0, "content", "list[TextPart]", 1)` -> `messages[0].content[1]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_SHOWN]}" for part in _names(loc))
    return "".join(parts).removeprefix(".") or "the body"


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)[:_SHOWN]
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"


def _number(value: Any) -> Any:
    """4.0 is an integer in JSON Schema, as in JavaScript."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_messages(
    items: Iterable[tuple[str, Mapping[str, Any]]], *, before: Sequence[Message] = ()
) -> tuple[Message, ...]:
    """Messages in the shape of OpenAI's chat completions, each with the place of the body that it stands in;
    `before`: those that they go on from.

    Raises ApiError for what is no message, and where the agent has nothing to answer.
    """
    places_and_items = list(items)
    param = places_and_items[0][0].partition("[")[0] if places_and_items else None
    if sum(map(num_values, _written_arguments(item for _, item in places_and_items))) > MAX_VALUES:
        raise invalid(f"the arguments of tool calls hold more than {MAX_VALUES:,} JSON values", param)
    messages = []
    for place, item in places_and_items:
        try:
            messages.append(Message.from_openai(item))
        except ConfigurationError as error:
            raise invalid(f"{place}: {error}", param, code="invalid_messages") from error
    if not messages or messages[-1].role == "assistant":
        last = "the last message is the assistant's own: end with a user's or a tool's"
        raise invalid(last, param, code="invalid_messages")
    return _with_tool_names([*before, *messages])


def _written_arguments(items: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Arguments that are JSON texts: when the body was counted, each was a single value."""
    for item in items:
        for call in item.get("tool_calls") or ():
            if isinstance(text := (call.get("function") or {}).get("arguments"), str):
                yield text.encode("utf-8", "surrogatepass")


def _with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool results with their tool's name, which most shapes leave to the call: of the reply before, or, for
    one that comes late, the last call of its id."""
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


def read_choice(choice: str, tools: Sequence[Mapping[str, Any]], *, is_name: bool) -> str:
    """auto, required, none or a tool's name. Raises ApiError where the request does not offer that tool."""
    names = [tool["function"]["name"] for tool in tools]
    if not is_name and choice == "required" and not names:
        problem = "tool_choice is required, and tools are missing: offer some"
    elif is_name and choice not in names:
        problem = f"tool_choice names {choice!r:.60}, and the tools are: {', '.join(names) or 'none':.200}"
    elif is_name and choice in ("auto", "none", "required"):
        problem = f"tool_choice cannot name a tool {choice!r}, which is one of its own words: rename the tool"
    else:
        return choice
    raise invalid(problem, "tool_choice", code="invalid_tool_choice")


def given_fields(**fields: Any) -> dict[str, Any]:
    """The fields that are told."""
    return {name: value for name, value in fields.items() if value is not None}


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool in the shape of OpenAI's chat completions."""
    function = given_fields(name=name, description=description, parameters=parameters)
    return {"type": "function", "function": function}
