"""OpenAI's Responses API, `/v1/responses`: a conversation is a list of items, and the server may keep it."""

from __future__ import annotations

import base64
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stateset_agents.backends.dialects.chat import (
    ChosenFunction,
    GenerationBody,
    NamedSchema,
    OfferedFunction,
    TextFormat,
    error_body,
    format_schema,
)
from stateset_agents.backends.dialects.request import (
    Answer,
    ApiError,
    ChatRequest,
    Closed,
    Events,
    Part,
    Text,
    Thoughts,
    Tokens,
    function_tool,
    given_fields,
    invalid,
    read_choice,
    read_messages,
    stream_events,
    validated,
    with_limits,
    written_arguments,
)
from stateset_agents.types.messages import Message

# --- the body of a request


class ItemPart(Part):
    """A part of an item: words, a picture, or a thought."""

    type: Literal[
        "input_text", "output_text", "text", "refusal", "input_image", "reasoning_text", "summary_text"
    ]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(default=None, description="data:image/png;base64,...: nothing is fetched")


Parts = Annotated[list[ItemPart], Field(fail_fast=True)]


class Item(Part):
    """A message, a call or its result, or what the agent thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = Field(
        default=None, description="of a message"
    )
    content: str | Parts | None = Field(default=None, description="of a message, or the agent's thoughts")
    name: str | None = Field(default=None, description="of a call's function")
    call_id: str | None = Field(default=None, description="of a call and of its result")
    arguments: str | None = Field(default=None, description="of a call: the text of a JSON object")
    output: str | Parts | None = Field(default=None, description="of a result")
    summary: Parts | None = Field(default=None, description="the agent's thoughts, where content has none")
    encrypted_content: Thoughts = Field(default=None, description="the same, as it was answered")


class _Function(Part):
    type: Literal["function"]


class FunctionTool(OfferedFunction, _Function):  # checked from the last base on: a web search has no name
    """A tool that the agent may call."""


class NamedFunction(ChosenFunction):
    """A `tool_choice` that names a tool."""

    type: Literal["function"]


class JsonFormat(NamedSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextOptions(Closed):
    """What an answer's words are."""

    format: TextFormat | JsonFormat | None = Field(
        default=None, description="json_object and json_schema: by a grammar"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="without effect")


class ReasoningOptions(Closed):
    """Hints on thoughts, without effect: the agent thinks as it was trained to."""

    effort: Text | None = None
    summary: Text | None = None
    generate_summary: Text | None = None


class ResponseStreamOptions(Closed):
    """Options of a streamed response."""

    include_obfuscation: bool | None = Field(default=None, description="without effect")


class ResponseBody(GenerationBody):
    """A request for a response."""

    input: str | Annotated[list[Item], Field(fail_fast=True, min_length=1)] = Field(
        description="the last item is not the assistant's"
    )
    instructions: str | None = Field(default=None, description="a system message before all others")
    previous_response_id: Text | None = Field(
        default=None, description="the response that the input goes on from, where it was stored"
    )
    store: bool | None = Field(default=None, description="false: no other request can go on from this one")
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | None = Field(
        default=None, description="none: as if no tool were offered; required, or a tool: by a grammar"
    )
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Tokens | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0, description="not served")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=16)] | None = Field(
        default=None, description="thoughts once more, in one text that clients pass on"
    )
    truncation: Literal["disabled"] | None = None
    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = Field(
        default=None, description="its conversation_id names the conversation likewise, before user"
    )


# --- responses that later requests go on from


class StoredResponses:
    """Conversations by the id of the response that they end with; each client has its own.

    Together they have `max_characters`, and one client a quarter of them; the oldest are forgotten.
    """

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._clients: OrderedDict[str, OrderedDict[str, tuple[Message, ...]]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        self._total = 0

    def add(self, client: str, id: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation; one that is larger than a client's quarter is not kept."""
        stored = self._clients.setdefault(client, OrderedDict())
        self._clients.move_to_end(client)
        stored[id] = messages
        self._resize(client, _size(messages))
        while self._sizes[client] > self._max_characters // 4:
            self._resize(client, -_size(stored.popitem(last=False)[1]))
        while self._total > self._max_characters:
            self.forget(next(iter(self._clients)))

    def find(self, client: str, id: str) -> tuple[Message, ...]:
        """Raises ApiError, status 404, for one that is not kept."""
        messages = self._clients[client].get(id) if client in self._clients else None
        if messages is None:
            raise ApiError(
                f"there is no response {id!r:.60} here: it was not stored, or is forgotten: send all items",
                code="previous_response_not_found",
                status=404,
                param="previous_response_id",
            )
        return messages

    def forget(self, client: str) -> None:
        """Drop all of a client's."""
        if self._clients.pop(client, None) is not None:
            self._total -= self._sizes.pop(client)

    def _resize(self, client: str, characters: int) -> None:
        self._sizes[client] += characters
        self._total += characters


def _size(messages: Sequence[Message]) -> int:
    """Characters, and what an object takes; messages that conversations share count in each."""
    return sum(
        200
        + len(message.content)
        + len(message.reasoning or "")
        + sum(len(image.data) for image in message.images)
        + (len(repr(message.tool_calls)) if message.tool_calls else 0)
        for message in messages
    )


class Responses:
    """OpenAI's Responses API as a dialect."""

    path = "/v1/responses"

    def __init__(self, *, max_output_tokens: int | None = None, max_stored: int = 2**24) -> None:
        """The limits are a server's; `max_stored`: characters of all conversations that it keeps."""
        tokens: Any = (int | None, Field(default=None, ge=1, le=max_output_tokens or 2**31 - 1))
        self.body = with_limits(ResponseBody, max_output_tokens=tokens)
        self.stored = StoredResponses(max_stored)

    def read(self, data: Any, client: str, *, ignore: Collection[str] = ()) -> ResponseExchange:
        """See `Dialect.read`."""
        body = validated(self.body, data, ignore)
        previous = body.previous_response_id
        before = () if previous is None else self.stored.find(client, previous)
        messages = read_messages(_chat_items(body.input), before=before)
        tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in body.tools or ()]
        choice = body.tool_choice or "auto"
        is_name = isinstance(choice, NamedFunction)
        word = choice if isinstance(choice, str) else choice.name
        format = body.text.format if body.text else None
        system = [Message(role="system", content=body.instructions)] if body.instructions else []
        request = ChatRequest(
            messages=(*system, *messages),
            tools=() if choice == "none" else tuple(tools),
            model=body.model or "",
            stream=bool(body.stream),
            sampling=given_fields(
                temperature=body.temperature, top_p=body.top_p, max_tokens=body.max_output_tokens
            ),
            single_call=body.parallel_tool_calls is False,
            tool_choice=read_choice(word, tools, is_name=is_name),
            answer_schema=format_schema(format),
            user=body.user or "",
            metadata=body.metadata or {},
        )
        return ResponseExchange(request, body, messages, self.stored, client)


# --- items as messages: what the agent thought, said and called in one reply are items of their own


def _chat_items(items: str | list[Item]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The messages in the shape of chat completions, each with its first item's place."""
    if isinstance(items, str):
        yield "input", {"role": "user", "content": items}
        return
    reply: dict[str, Any] = {}
    first = ""
    for number, item in enumerate(items):
        place = f"input[{number}]"
        fields = _item_fields(place, item)
        is_reply = fields.get("role", "assistant") == "assistant"
        is_next = "reasoning" in fields or ("content" in fields and reply.keys() & {"content", "tool_calls"})
        if reply and (is_next or not is_reply):
            yield first, reply
            reply = {}
        if not is_reply:
            yield place, fields
            continue
        if not reply:
            first, reply = place, {"role": "assistant"}
        if calls := fields.pop("tool_calls", None):
            reply.setdefault("tool_calls", []).extend(calls)
        reply |= fields
    if reply:
        yield first, reply


def _item_fields(place: str, item: Item) -> dict[str, Any]:
    """What an item says, under the names of chat completions."""
    if item.type == "message":
        role = _expect(place, "role", item.role)
        return {"role": role, "content": _content(place, item.content)}
    if item.type == "reasoning":
        return {"reasoning": _thoughts(place, item) or None}
    call_id = _expect(place, "call_id", item.call_id)
    if item.type == "function_call":
        function = {"name": _expect(place, "name", item.name), "arguments": item.arguments}
        return {"tool_calls": [{"id": call_id, "function": function}]}
    return {"role": "tool", "tool_call_id": call_id, "content": _content(place, item.output)}


def _expect(place: str, name: str, value: str | None) -> str:
    if value is None:
        raise invalid(f"{place}.{name} is missing", "input", code="invalid_messages")
    return value


def _content(place: str, content: str | list[ItemPart] | None) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if part.type == "input_image":
            url = _expect(f"{place}.content[{number}]", "image_url", part.image_url)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            text = part.refusal if part.type == "refusal" else part.text
            parts.append({"type": "text", "text": _expect(f"{place}.content[{number}]", "text", text)})
    return parts


def _thoughts(place: str, item: Item) -> str:
    """A thought's content, else its summary, else what `_encoded` wrote."""
    for parts in (item.content, item.summary):
        if text := parts if isinstance(parts, str) else "".join(part.text or "" for part in parts or ()):
            return text
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except ValueError as error:
        problem = f"{place}.encrypted_content is not of this server ({error}): send the content"
        raise invalid(problem, "input", code="invalid_messages") from error


def _encoded(thoughts: str) -> str:
    """Thoughts in one text, for clients that pass on no other: they are no secret."""
    return base64.b64encode(thoughts.encode()).decode()


# --- responses

_TYPES = {"reasoning": "reasoning", "content": "message"}
"""Types of the items of a reply's thoughts and words."""


@dataclass(slots=True)
class ResponseExchange:
    """A request for a response, and its output so far."""

    closing: ClassVar[bytes] = b""
    request: ChatRequest
    _body: ResponseBody
    _messages: tuple[Message, ...]
    """The conversation as it is stored, without instructions."""
    _stored: StoredResponses
    _client: str
    _events: Iterator[int] = field(default_factory=itertools.count)
    _output: list[dict[str, Any]] = field(default_factory=list)
    """The items; the last one may be open."""
    _is_open: bool = False
    _head: Answer | None = None

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `Exchange`, as for the others."""
        (answer,) = answers
        deque(stream_events(self, answer), maxlen=0)
        return self._response(answer, _status(answer))

    def start(self, head: Answer) -> Events:
        self._head = head
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(head, "in_progress"))

    def add(self, head: Answer, delta: Mapping[str, str]) -> Events:
        for name, text in delta.items():
            if not self._is_open or self._output[-1]["type"] != _TYPES[name]:
                yield from self._close()
                yield from self._open(self._text_item(head, name))
            part = self._output[-1]["content"][0]
            part["text"] += text
            yield self._in_part(f"response.{part['type']}.delta", delta=text, **_logprobs(part))

    def finish(self, answer: Answer) -> Events:
        if not self._output and not answer.message.tool_calls:
            yield from self.add(answer, {"content": ""})
        yield from self._close(_status(answer))
        for call in answer.message.tool_calls:
            id, arguments = f"fc_{answer.id}_{len(self._output)}", written_arguments(call)
            item = {"type": "function_call", "id": id, "call_id": call.id, "name": call.name}
            yield from self._open({**item, "arguments": "", "status": "in_progress"})
            kind = "response.function_call_arguments"
            yield self._in_item(f"{kind}.delta", delta=arguments)
            self._output[-1]["arguments"] = arguments
            yield self._in_item(f"{kind}.done", arguments=arguments)
            yield from self._close()
        if self._body.store is not False:
            self._stored.add(self._client, f"resp_{answer.id}", (*self._messages, answer.message))

    def end(self, answers: Sequence[Answer]) -> Events:
        status = _status(answers[0])
        yield self._event(f"response.{status}", response=self._response(answers[0], status))

    def fail(self, error: ApiError) -> Events:
        yield self._event("error", code=error.code, message=str(error), param=error.param)
        if self._head is not None:
            response = self._response(self._head, "failed")
            response["error"] = {"code": "server_error", "message": str(error)}
            yield self._event("response.failed", response=response)

    def _text_item(self, head: Answer, name: str) -> dict[str, Any]:
        """An item of thoughts or words, without them."""
        number = len(self._output)
        if name == "reasoning":
            content = [{"type": "reasoning_text", "text": ""}]
            return {"type": "reasoning", "id": f"rs_{head.id}_{number}", "summary": [], "content": content}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{head.id}_{number}", "role": "assistant", "content": [part]}
        return {**item, "status": "in_progress"}

    def _open(self, item: dict[str, Any]) -> Events:
        self._output.append(item)
        self._is_open = True
        parts = item.get("content", [])
        opening_item = {**item, "content": []} if parts else item
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=opening_item)
        for part in parts:
            yield self._in_part("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> Events:
        if not self._is_open:
            return
        self._is_open = False
        item = self._output[-1]
        for part in item.get("content", ()):
            text = part["text"]
            yield self._in_part(f"response.{part['type']}.done", text=text, **_logprobs(part))
            yield self._in_part("response.content_part.done", part=part)
            if item["type"] == "reasoning" and self._body.include:
                item["encrypted_content"] = _encoded(text)
        if "status" in item:
            item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _in_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._in_item(kind, content_index=0, **fields)

    def _in_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = len(self._output) - 1
        return self._event(kind, item_id=self._output[number]["id"], output_index=number, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._events), **fields}

    def _response(self, answer: Answer, status: str) -> dict[str, Any]:
        """The response as it stands; the request's own fields are said again."""
        body = self._body
        names = {"tools", "tool_choice", "text", "metadata"}
        request_fields = body.model_dump(include=names, exclude_none=True, by_alias=True)
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": answer.model,
            "output": [] if status == "in_progress" else self._output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user,
            "usage": None if status in ("in_progress", "failed") else _usage(answer),
            **{"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}, "metadata": {}},
            **request_fields,
        }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _logprobs(part: Mapping[str, Any]) -> dict[str, Any]:
    """Events of words have a field for log-probs, those of thoughts have none."""
    return {"logprobs": []} if part["type"] == "output_text" else {}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


_PARAMS = {"messages": "input", "response_format": "text"}
"""Names that fields of chat completions have here."""


def response_error_body(error: ApiError) -> dict[str, Any]:
    """An error in OpenAI's shape, with this API's names of fields."""
    body = error_body(error)
    body["error"]["param"] = _PARAMS.get(error.param or "", error.param)
    return body
