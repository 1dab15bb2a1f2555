"""`/openapi.json`: requests and answers of the server. The dialects have the requests' schemas."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.serving.routing import OutcomeBody

OPEN_PATHS = ("/health", "/ready")
"""Answered without a key: a load balancer asks them."""
_PAGE: dict[str, Any] = read_yaml(Path(__file__).with_name("openapi.yaml"))
ERRORS: dict[int, list[str]] = _PAGE["errors"]
"""Each status' meaning, then its error codes."""


def document(
    bodies: Iterable[type[BaseModel]],
    *,
    version: str,
    asks_for_key: bool,
    takes_outcomes: bool = False,
) -> dict[str, Any]:
    """The OpenAPI document of a server whose requests `bodies` validate.

    With `takes_outcomes` it serves a deployment, whose conversations have ids and outcomes.
    """
    definitions: dict[str, Any] = {}
    for body in [*bodies, *([OutcomeBody] if takes_outcomes else ())]:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions |= {**schema.pop("$defs", {}), body.__name__: schema}
    paths = {
        path: {method: _operation(asks_for_key, path, **fields) for method, fields in operations.items()}
        for path, operations in _PAGE["paths"].items()
    }
    if takes_outcomes:
        for path in _PAGE["answers"]:
            paths[path]["post"]["parameters"] = [_PAGE["conversation_id"]]
    else:
        del paths["/v1/outcomes"]
    spec = {
        "openapi": "3.1.0",
        "info": {"title": "stateset-agents", "version": version},
        "paths": paths,
        "components": {
            "schemas": definitions,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return spec | ({"security": [{"key": []}]} if asks_for_key else {})


def _operation(
    asks_for_key: bool, path: str, *, summary: str, errors: list[int], content: dict[str, Any], **others: Any
) -> dict[str, Any]:
    """The operation of one path and method in OpenAPI's shape."""
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    for status in errors:
        if status != 401 or asks_for_key:
            meaning, *codes = ERRORS[status]
            if path.startswith("/v1/messages"):
                schema = _PAGE["message_error_body"]
            else:
                schema = deepcopy(_PAGE["error_body"])
                schema["properties"]["error"]["properties"]["code"] = {"enum": codes}
            responses[str(status)] = {
                "description": meaning,
                "content": {"application/json": {"schema": schema}},
            }
    return {"summary": summary, "responses": responses, **others}
