"""Anthropic's Messages API, `/v1/messages`: messages are lists of blocks, the system prompt is apart."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stateset_agents.backends.dialects.request import (
    REQUEST_ID,
    Answer,
    ApiError,
    ChatRequest,
    Closed,
    Events,
    Part,
    Stop,
    Strict,
    Temperature,
    Text,
    Thoughts,
    Tokens,
    TopK,
    TopP,
    function_tool,
    given_fields,
    invalid,
    read_choice,
    read_messages,
    validated,
    with_limits,
    written_arguments,
)
from stateset_agents.types.messages import ToolCall

# --- the body of a request


class CacheControl(Part):
    """A hint, without effect."""

    type: Literal["ephemeral"]


class ImageSource(Part):
    """A picture; nothing is fetched."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ContentBlock(Part):
    """A text or a picture."""

    type: Literal["text", "image"]
    text: str | None = None
    source: ImageSource | None = None


class TextBlock(Part):
    """A text."""

    type: Literal["text"]
    text: str


ContentBlocks = Annotated[list[ContentBlock], Field(fail_fast=True)]


class Block(Part):
    """Words, a picture, a thought, a call or its result."""

    type: Literal["text", "image", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    source: ImageSource | None = Field(default=None, description="of an image")
    thinking: Thoughts = Field(default=None, description="the agent's thoughts, as they were answered")
    id: str | None = Field(default=None, description="of a call")
    name: str | None = Field(default=None, description="of a call's tool")
    input: dict[str, Any] | None = Field(default=None, description="the arguments of a call")
    tool_use_id: str | None = Field(default=None, description="of a result: its call's id")
    content: str | ContentBlocks | None = Field(default=None, description="of a result")
    is_error: bool | None = Field(default=None, description="without effect: the result's words tell it")


class BlockMessage(Part):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class CustomTool(Closed):
    """A tool that the agent may call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="a JSON schema of its arguments")
    strict: Strict = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(default=None, description="without effect")


class ToolChoice(Closed):
    """auto; none: as if no tool were offered; any, or a tool: by a grammar."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="of the tool")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="true: at most one tool call an answer"
    )


class OutputFormat(Closed):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema", description="the answer keeps to it, by a grammar")


class OutputConfig(Closed):
    """What an answer's words are."""

    format: OutputFormat | None = None
    effort: Text | None = Field(default=None, description="a hint, without effect")


class Thinking(Closed):
    """Whether the agent thinks: it decides that itself."""

    type: Literal["adaptive"]
    display: Literal["summarized"] | None = Field(default=None, description="thoughts are sent whole")


class RequestMetadata(Closed):
    """Who asks."""

    user_id: Text | None = Field(
        default=None, description="names the conversation where a deployment is served; else without effect"
    )


class CountBody(Closed):
    """A prompt whose tokens are counted."""

    messages: Annotated[list[BlockMessage], Field(fail_fast=True)] = Field(
        min_length=1, description="the last one is not the assistant's"
    )
    model: str = Field(description="the served model")
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[CustomTool], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesBody(CountBody):
    """A request for a message."""

    max_tokens: Tokens
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = Field(default=None, description="0 keeps every token")
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    metadata: RequestMetadata | None = None
    service_tier: Text | None = Field(default=None, description="without effect")


class Messages:
    """Anthropic's Messages API as a dialect."""

    path = "/v1/messages"

    def __init__(self, *, max_output_tokens: int | None = None) -> None:
        """The limit is a server's."""
        self.body = with_limits(
            MessagesBody, max_tokens=(int, Field(ge=1, le=max_output_tokens or 2**31 - 1))
        )

    def read(self, data: Any, client: str, *, ignore: Collection[str] = ()) -> MessageExchange:
        """See `Dialect.read`."""
        body = validated(self.body, data, ignore)
        must_call = body.tool_choice is not None and body.tool_choice.type in ("any", "tool")
        sampling = given_fields(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            max_tokens=body.max_tokens,
            stop=tuple(body.stop_sequences) if body.stop_sequences and not must_call else None,
        )
        user = (body.metadata and body.metadata.user_id) or ""
        return MessageExchange(_request(body, stream=bool(body.stream), sampling=sampling, user=user))


def read_count(data: Any) -> ChatRequest:
    """The request in a JSON body whose prompt's tokens are to be counted. Raises ApiError as `read` does."""
    return _request(validated(CountBody, data))


def _request(body: CountBody, **fields: Any) -> ChatRequest:
    tools = [function_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools or ()]
    choice = body.tool_choice or ToolChoice(type="auto")
    if (choice.type == "tool") != (choice.name is not None):
        problem = "is missing" if choice.name is None else "goes with the type 'tool'"
        raise invalid(f"tool_choice.name {problem}", "tool_choice", code="invalid_tool_choice")
    word = {"any": "required", "tool": choice.name or ""}.get(choice.type, choice.type)
    format = body.output_config and body.output_config.format
    return ChatRequest(
        messages=read_messages(_chat_items(body)),
        tools=() if choice.type == "none" else tuple(tools),
        model=body.model,
        single_call=choice.disable_parallel_tool_use is True,
        tool_choice=read_choice(word, tools, is_name=choice.type == "tool"),
        answer_schema=format.json_schema if format else None,
        **fields,
    )


# --- blocks as messages: the results of calls are messages of their own


def _chat_items(body: CountBody) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The messages in the shape of chat completions, each with its place."""
    if body.system:
        texts = body.system if isinstance(body.system, str) else [block.text for block in body.system]
        yield "system", {"role": "system", "content": "".join(texts)}
    for number, message in enumerate(body.messages):
        place = f"messages[{number}]"
        if isinstance(message.content, str):
            yield place, {"role": message.role, "content": message.content}
        else:
            yield from ((place, item) for item in _block_items(place, message.role, message.content))


_ROLES = {"thinking": "assistant", "tool_use": "assistant", "image": "user", "tool_result": "user"}
"""Whose blocks stand in no other's messages."""


def _block_items(place: str, role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    num_results = 0
    for number, block in enumerate(blocks):
        at = f"{place}.content[{number}]"
        if _ROLES.get(block.type, role) != role:
            raise invalid(f"{at} of type {block.type} stands in no message of the {role}", "messages")
        if block.type == "thinking":
            thoughts.append(_expect(at, "thinking", block.thinking))
        elif block.type == "tool_use":
            function = {"name": _expect(at, "name", block.name), "arguments": block.input or {}}
            calls.append({"id": _expect(at, "id", block.id), "function": function})
        elif block.type == "tool_result":
            num_results += 1
            inner = block.content or ""
            words = inner if isinstance(inner, str) else [_part(f"{at}.content", part) for part in inner]
            call_id = _expect(at, "tool_use_id", block.tool_use_id)
            yield {"role": "tool", "tool_call_id": call_id, "content": words}
        else:
            parts.append(_part(at, block))
    if parts or not num_results:
        fields = {"reasoning": "".join(thoughts) or None, "tool_calls": calls or None}
        yield {"role": role, "content": parts, **fields}


def _part(place: str, block: Block | ContentBlock) -> dict[str, Any]:
    """A text or a picture as a part in the shape of chat completions."""
    if block.type == "text":
        return {"type": "text", "text": _expect(place, "text", block.text)}
    source = block.source
    if source is None:
        raise invalid(f"{place}.source is missing", "messages")
    url = f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _expect(place: str, name: str, value: str | None) -> str:
    if value is None:
        raise invalid(f"{place}.{name} is missing", "messages")
    return value


# --- messages

_KINDS = {"reasoning": "thinking", "content": "text"}
"""Types of the blocks of a reply's thoughts and words, and the names of their texts."""


@dataclass(slots=True)
class MessageExchange:
    """A request for a message, and its blocks so far."""

    closing: ClassVar[bytes] = b""
    request: ChatRequest
    _num_blocks: int = 0
    """Blocks that were begun; the last one may be open."""
    _open: str = ""
    """The open block's type; "" where none is."""
    _text: str = ""
    """The open block's text so far."""

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `Exchange`, as for the others."""
        (answer,) = answers
        message = answer.message
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            signature = _signature(message.reasoning)
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
        if message.content or not (blocks or message.tool_calls):
            blocks.append({"type": "text", "text": message.content})
        blocks += [{**_call(call), "input": dict(call.arguments)} for call in message.tool_calls]
        usage = {"input_tokens": answer.prompt_tokens, **_output(answer)}
        return {**_head(answer), "content": blocks, **self._ending(answer), "usage": usage}

    def start(self, head: Answer) -> Events:
        """The prompt's tokens are told at the end, when they are counted."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**_head(head), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": message}

    def add(self, head: Answer, delta: Mapping[str, str]) -> Events:
        for name, text in delta.items():
            kind = _KINDS[name]
            if self._open != kind:
                yield from self._close()
                signature = {"signature": ""} if kind == "thinking" else {}
                yield self._begin({"type": kind, kind: "", **signature})
                self._open = kind
            self._text += text
            yield self._delta({"type": f"{kind}_delta", kind: text})

    def finish(self, answer: Answer) -> Events:
        if not self._num_blocks and not answer.message.tool_calls:
            yield from self.add(answer, {"content": ""})
        yield from self._close()
        for call in answer.message.tool_calls:
            yield self._begin({**_call(call), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": written_arguments(call)})
            self._open = "tool_use"
            yield from self._close()
        usage = {"input_tokens": answer.prompt_tokens, **_output(answer)}
        yield {"type": "message_delta", "delta": self._ending(answer), "usage": usage}

    def end(self, answers: Sequence[Answer]) -> Events:
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Events:
        yield message_error_body(error)

    def _ending(self, answer: Answer) -> dict[str, Any]:
        reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
        is_stopped = reason == "end_turn" and answer.stop in self.request.sampling.get("stop", ())
        stop = answer.stop if is_stopped else None
        return {"stop_reason": "stop_sequence" if is_stopped else reason, "stop_sequence": stop}

    def _begin(self, block: Mapping[str, Any]) -> dict[str, Any]:
        self._num_blocks += 1
        return {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close(self) -> Events:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature(self._text)})
        if self._open:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = self._text = ""


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _output(answer: Answer) -> dict[str, Any]:
    details = {"thinking_tokens": answer.thought_tokens}
    return {"output_tokens": answer.completion_tokens, "output_tokens_details": details}


def _signature(thoughts: str) -> str:
    """Clients keep a thought only with a signature; it is checked by nobody."""
    return hashlib.blake2b(thoughts.encode(), digest_size=16).hexdigest()


_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors; other statuses from 500 on are `api_error`, below `invalid_request_error`."""


def message_error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": kind, "message": str(error)}
    return {"type": "error", "error": body, "request_id": REQUEST_ID.get(None)}
