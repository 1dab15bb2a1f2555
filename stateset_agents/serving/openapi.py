"""`/openapi.json`: requests and answers of the server. `chat_body` has the request's schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from stateset_agents.serving.conversation_ids import HEADER
from stateset_agents.serving.routing import OutcomeBody

OPEN_PATHS = ("/health", "/ready")
"""Answered without a key: a load balancer asks them."""

ERRORS = {
    400: (
        "the request cannot be served as it stands",
        "invalid_request",
        "invalid_messages",
        "context_length_exceeded",
        "invalid_conversation_id",
    ),
    401: ("no key, or a wrong one", "invalid_api_key"),
    403: ("a foreign Host", "host_not_served"),
    404: ("no such model, or conversation", "model_not_found", "conversation_not_found"),
    408: ("the body took too long to come", "request_timeout"),
    413: ("the body is too large", "request_too_large"),
    415: (
        "the body is not application/json, or packed otherwise",
        "content_type_not_served",
        "unsupported_encoding",
    ),
    429: ("too many answers wait; Retry-After says when to ask again", "too_many_requests"),
    500: ("the server broke on this request", "internal_error", "backend_error"),
    501: ("prometheus_client is not installed", "metrics_not_installed"),
    503: ("it is shutting down, or its backend broke", "shutting_down", "unhealthy"),
}
"""By status: its meaning, then its error codes."""


def document(
    body: type[BaseModel], *, version: str, asks_for_key: bool, takes_outcomes: bool = False
) -> dict[str, Any]:
    """The OpenAPI document of a server whose requests `body` validates.

    `takes_outcomes`: of conversations of a deployment.
    """
    schemas = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schemas.pop("$defs", {})
    for_all = (401, 403, 500) if asks_for_key else (403, 500)

    def get_operation(summary: str, schema: dict[str, Any], *errors: int, **fields: Any) -> dict[str, Any]:
        return {"get": _operation(summary, "application/json", schema, (*for_all, *errors)) | fields}

    chat = _operation(
        "Answer a conversation",
        "application/json",
        _COMPLETION,
        (*for_all, 400, 404, 408, 413, 415, 429, 503),
    )
    chat["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {
            "description": "with stream: each event's data is a chunk as JSON, the last one's is [DONE]",
            "type": "object",
            "properties": {"data": {"type": "string"}},
            "required": ["data"],
        }
    }
    chat["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ChatBody"}}},
    }
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    text = {"type": "string"}
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": chat},
        "/v1/models": get_operation("The served model", _list_of(_MODEL)),
        "/v1/models/{id}": get_operation("The served model", _MODEL, 404, parameters=[model_id]),
        "/health": get_operation("Can it answer at all?", _STATUS, 503, security=[]),
        "/ready": get_operation("Should it get requests?", _STATUS, 503, security=[]),
        "/version": get_operation("Of the package", _object(version=text)),
        "/metrics": {"get": _operation("For Prometheus", "text/plain", text, (*for_all, 501))},
        "/openapi.json": get_operation("This document", {"type": "object"}),
    }
    if takes_outcomes:
        outcome = _operation(
            "Say how a conversation ended",
            "application/json",
            _OUTCOME,
            (*for_all, 400, 404, 408, 413, 415, 503),
        )
        outcome["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/OutcomeBody"}}},
        }
        paths["/v1/outcomes"] = {"post": outcome}
        definitions["OutcomeBody"] = OutcomeBody.model_json_schema()
        chat["parameters"] = [
            {
                "name": HEADER,
                "in": "header",
                "description": "which conversation it is; unset: metadata.conversation_id, user, or by its "
                "first messages",
                "schema": {"type": "string", "minLength": 1, "maxLength": 256},
            }
        ]
    for path in OPEN_PATHS:
        paths[path]["get"]["responses"].pop("401", None)
    spec = {
        "openapi": "3.1.0",
        "info": {"title": "stateset-agents", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**definitions, "ChatBody": schemas},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return spec | ({"security": [{"key": []}]} if asks_for_key else {})


def _operation(
    summary: str, content_type: str, schema: dict[str, Any], errors: tuple[int, ...]
) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {"description": summary, "content": {content_type: {"schema": schema}}}
    }
    for status in sorted(errors):
        meaning, *codes = ERRORS[status]
        responses[str(status)] = {
            "description": meaning,
            "content": {"application/json": {"schema": _error_body(codes)}},
        }
    return {"summary": summary, "responses": responses}


def _object(**properties: Any) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return _object(object={"const": "list"}, data={"type": "array", "items": item})


def _error_body(codes: list[str]) -> dict[str, Any]:
    return _object(
        error=_object(
            message={"type": "string", "minLength": 1},
            type={"enum": ["invalid_request_error", "server_error"]},
            param={"type": ["string", "null"]},
            code={"enum": codes},
        )
    )


_COUNT = {"type": "integer", "minimum": 0}
_STATUS = _object(status={"const": "ok"})
_MODEL = _object(
    id={"type": "string"}, object={"const": "model"}, created=_COUNT, owned_by={"const": "stateset-agents"}
)
_OUTCOME = _object(conversation={"type": "string"}, report={"enum": ["counted", "again", "late"]})
_CALL = _object(
    id={"type": "string"},
    type={"const": "function"},
    function=_object(name={"type": "string"}, arguments={"type": "string"}),
)
_MESSAGE = _object(
    role={"const": "assistant"}, content={"type": ["string", "null"]}, refusal={"type": "null"}
)
_MESSAGE["properties"]["tool_calls"] = {"type": "array", "minItems": 1, "items": _CALL}
_MESSAGE["properties"]["reasoning"] = {"type": "string"}
_TOKEN = _object(
    token={"type": "string"},
    logprob={"type": "number", "maximum": 0, "minimum": -9999},
    bytes={"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    top_logprobs={"type": "array", "maxItems": 0},
)
_LOGPROBS = _object(content={"type": "array", "items": _TOKEN}, refusal={"type": "null"})
_CHOICE = _object(
    index=_COUNT,
    message=_MESSAGE,
    finish_reason={"enum": ["stop", "length", "tool_calls"]},
    logprobs={"anyOf": [_LOGPROBS, {"type": "null"}]},
)
_COMPLETION = _object(
    id={"type": "string"},
    object={"const": "chat.completion"},
    created=_COUNT,
    model={"type": "string"},
    choices={"type": "array", "minItems": 1, "items": _CHOICE},
    usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
)
