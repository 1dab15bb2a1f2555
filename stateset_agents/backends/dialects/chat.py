"""OpenAI's chat completions, `/v1/chat/completions`: requests are read, answers and chunks are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stateset_agents.backends.dialects.request import (
    INT64,
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
    read_choice,
    read_messages,
    validated,
    with_limits,
)
from stateset_agents.types.messages import Message


class ImageUrl(Part):
    """Where a picture is."""

    url: str = Field(description="data:image/png;base64,...: nothing is fetched")


class ContentPart(Part):
    """A part of a message's content: a text or a picture."""

    text: str | None = None
    image_url: ImageUrl | None = None


class Function(Part):
    """The function that a tool call calls."""

    name: str
    arguments: str | dict[str, Any] | None = Field(
        default=None, description="a JSON object, or the text of one"
    )


class Call(Part):
    """A tool call that the assistant made."""

    function: Function
    id: str | None = None


class ChatMessage(Part):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: Thoughts = Field(default=None, description="the assistant's thoughts, as they were answered")
    reasoning_content: Thoughts = Field(default=None, description="an older name of `reasoning`")


class OfferedFunction(Part):
    """A tool that the assistant may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema of its arguments")
    strict: Strict = None


class OfferedTool(Part):
    """An entry of `tools`."""

    type: Literal["function"] = "function"
    function: OfferedFunction


class StreamOptions(Closed):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(default=None, description="end the stream with the token counts")
    include_obfuscation: bool | None = Field(default=None, description="without effect")


class TextFormat(Closed):
    """Words, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(Closed):
    """The schema of an answer, with its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema", description="the answer keeps to it, by a grammar")
    strict: bool | None = Field(default=None, description="without effect: the answer always keeps to it")


class SchemaFormat(Closed):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChosenFunction(Closed):
    """The tool that has to be called."""

    name: Annotated[str, Field(min_length=1)]


class ChosenTool(Closed):
    """A `tool_choice` that names a tool."""

    type: Literal["function"]
    function: ChosenFunction


class GenerationBody(Closed):
    """The fields that a request has by either of OpenAI's protocols."""

    model: str | None = Field(default=None, description="the served model; unset: the same")
    parallel_tool_calls: bool | None = Field(
        default=None, description="false: at most one tool call an answer"
    )
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    user: Text | None = Field(
        default=None, description="names the conversation where a deployment is served; else without effect"
    )
    service_tier: Text | None = Field(default=None, description="without effect, as the three below")
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class ChatBody(GenerationBody):
    """A request for a chat completion."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, description="the last one is not the assistant's"
    )
    tools: Annotated[list[OfferedTool], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenTool | None = Field(
        default=None, description="none: as if no tool were offered; required, or a tool: by a grammar"
    )
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=8, description="answers to this request")
    logprobs: bool | None = Field(
        None, description="of the sampled tokens, under what they were sampled from"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=0, description="other tokens than the sampled are not told"
    )
    top_k: TopK | None = Field(default=None, description="0 keeps every token")
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = Field(
        default=None, description="another name of max_tokens; of two bounds the lower holds"
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64, description="the same one, the same answer")
    frequency_penalty: float | None = Field(default=None, ge=0, le=0, description="not served")
    presence_penalty: float | None = Field(default=None, ge=0, le=0, description="not served")
    response_format: TextFormat | SchemaFormat | None = Field(
        default=None, description="json_object and json_schema: by a grammar"
    )
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = Field(
        default=None, description="its conversation_id names the conversation likewise, before user"
    )
    store: bool | None = Field(default=None, description="without effect, as those below")
    reasoning_effort: Text | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ChatCompletions:
    """OpenAI's chat completions as a dialect."""

    path = "/v1/chat/completions"

    def __init__(self, *, max_output_tokens: int | None = None, max_choices: int = 8) -> None:
        """The limits are a server's."""
        tokens: Any = (int | None, Field(default=None, ge=1, le=max_output_tokens or 2**31 - 1))
        choices = (
            int | None,
            Field(default=None, ge=1, le=max_choices, description="answers to this request"),
        )
        self.body = with_limits(ChatBody, max_tokens=tokens, max_completion_tokens=tokens, n=choices)

    def read(self, data: Any, client: str, *, ignore: Collection[str] = ()) -> ChatExchange:
        """See `Dialect.read`."""
        body = validated(self.body, data, ignore)
        functions = [tool.function for tool in body.tools or ()]
        tools = [function_tool(tool.name, tool.description, tool.parameters) for tool in functions]
        lengths = [length for length in (body.max_tokens, body.max_completion_tokens) if length is not None]
        stop = (body.stop,) if isinstance(body.stop, str) else body.stop
        named = body.tool_choice.function.name if isinstance(body.tool_choice, ChosenTool) else None
        choice = named or str(body.tool_choice or "auto")
        options = body.stream_options
        request = ChatRequest(
            messages=read_messages((f"messages[{n}]", item) for n, item in enumerate(data["messages"])),
            tools=() if body.tool_choice == "none" else tuple(tools),
            model=body.model or "",
            stream=bool(body.stream),
            sampling=given_fields(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                max_tokens=min(lengths, default=None),
                stop=tuple(stop) if stop and choice in ("auto", "none") else None,  # it ends words
                seed=body.seed,
            ),
            num_choices=body.n or 1,
            logprobs=bool(body.logprobs),
            single_call=body.parallel_tool_calls is False,
            tool_choice=read_choice(choice, tools, is_name=named is not None),
            answer_schema=format_schema(body.response_format),
            user=body.user or "",
            metadata=body.metadata or {},
        )
        return ChatExchange(request, include_usage=bool(options and options.include_usage))


def format_schema(format: TextFormat | SchemaFormat | NamedSchema | None) -> Mapping[str, Any] | None:
    """The schema that an answer's words keep to; None: any words."""
    if isinstance(format, TextFormat):
        return {"type": "object"} if format.type == "json_object" else None
    schema = format.json_schema if isinstance(format, SchemaFormat) else format
    return None if schema is None else schema.json_schema


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """A request for a chat completion; a stream's chunks have no state but its answers'."""

    closing: ClassVar[bytes] = b"data: [DONE]\n\n"
    request: ChatRequest
    include_usage: bool = field(default=False, kw_only=True)
    """True if the token counts are sent at the end of a stream."""

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """See `Exchange`, as for the others."""
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

    def start(self, head: Answer) -> Events:
        yield _chunk(head, {"role": "assistant", "content": ""})

    def add(self, head: Answer, delta: Mapping[str, str]) -> Events:
        yield _chunk(head, delta)

    def finish(self, answer: Answer) -> Events:
        """The last chunk of an answer has its log-probs."""
        calls = _message_body(answer.message).get("tool_calls", ())
        if calls:
            yield _chunk(answer, {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]})
        yield _chunk(answer, {}, finish_reason=answer.finish_reason, logprobs=_logprobs(answer))

    def end(self, answers: Sequence[Answer]) -> Events:
        if self.include_usage:
            head = _head(answers[0], "chat.completion.chunk")
            yield {**head, "choices": [], "usage": _usage(answers)}

    def fail(self, error: ApiError) -> Events:
        yield error_body(error)


def _chunk(
    answer: Answer,
    delta: Mapping[str, Any],
    *,
    finish_reason: str | None = None,
    logprobs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    choice = {"index": answer.index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
    return {**_head(answer, "chat.completion.chunk"), "choices": [choice]}


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in the shape that all of OpenAI's APIs have."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


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
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _message_body(message: Message) -> dict[str, Any]:
    data = message.to_openai()
    data.pop("role")
    if message.reasoning is not None:
        data["reasoning"] = message.reasoning
    if message.tool_calls and not message.content:
        data["content"] = None
    return data
