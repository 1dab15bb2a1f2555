"""Errors as each dialect writes them: the middleware of every server that clients ask for answers."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.dialects.anthropic import message_error_body
from stateset_agents.backends.dialects.chat import error_body
from stateset_agents.backends.dialects.request import REQUEST_ID, ApiError
from stateset_agents.backends.dialects.responses import response_error_body
from stateset_agents.types.logs import get_logger

if TYPE_CHECKING:
    from aiohttp import web

_log = get_logger(__name__)


async def api_error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A middleware that returns errors in the format of the path's dialect; official clients retry some
    statuses by themselves.

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
        body = _body(_endpoint(request), answer)
        response = web.json_response(body, status=answer.status, headers=answer.headers)
    if not response.prepared:
        response.headers.update(id_headers())
    return response


def id_headers() -> dict[str, str]:
    """The id of the current request under the names that official clients read."""
    return dict.fromkeys(("X-Request-Id", "request-id"), REQUEST_ID.get())


def as_api_error(error: Exception, request: web.Request) -> ApiError:
    """The client's view of an error; an unexpected error is logged."""
    from aiohttp import web

    if isinstance(error, ApiError):
        return error
    if isinstance(error, web.HTTPException):
        answer = ApiError(
            f"{request.method} {_endpoint(request)}: {error.reason}; served are {_SERVED}"
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


def _endpoint(request: web.Request) -> str:
    """The path from /v1 on: the part before it names a rollout."""
    return request.path[max(request.path.rfind("/v1/"), 0) :]


def _body(endpoint: str, error: ApiError) -> dict[str, Any]:
    if endpoint == "/v1/messages" or endpoint.startswith("/v1/messages/"):
        return message_error_body(error)
    return response_error_body(error) if endpoint == "/v1/responses" else error_body(error)


_SERVED = "POST /v1/chat/completions, /v1/responses, /v1/messages and GET /v1/models"
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
