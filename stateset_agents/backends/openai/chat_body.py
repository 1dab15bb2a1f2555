"""The body of a chat completion request: a model that validates it and is its schema in `/openapi.json`.

All types and limits of fields are here. Unknown fields are refused by name, except inside messages and tools,
which clients send back as other servers made them. A null counts as absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

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
    """One message of the conversation."""

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
    """The only format of answers."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]


class ChatBody(_Part):
    """A request for a chat completion."""

    model_config = ConfigDict(extra="forbid")

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, description="the last one is not the assistant's"
    )
    model: str | None = Field(default=None, description="the served model; unset: the same")
    tools: Annotated[list[OfferedTool], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: Literal["auto", "none"] | None = Field(
        default=None, description="none: as if no tool were offered"
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
    response_format: TextFormat | None = None
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
    """The same for a conversation in training: one answer per request, and always the request's tools."""

    n: int | None = Field(default=None, ge=1, le=1)
    logprobs: Literal[False] | None = None
    tool_choice: Literal["auto"] | None = None
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
    """One of the errors, as one line, and the name of its field.

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
    wanted = " or ".join(dict.fromkeys(kind.removeprefix("Input should be ") for kind in kinds))
    verb = "must be" if kinds[0].startswith("Input should be ") else "cannot be:"
    return f"{path} {verb} {wanted}, got {_shown(item['input'])}", param


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
