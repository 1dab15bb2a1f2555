"""Which conversation a request belongs to: a client sends all of it each time, and rarely says its name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from stateset_agents.backends.openai.protocol import ApiError, ChatRequest
from stateset_agents.types.messages import Message

HEADER = "X-Conversation-Id"
"""Of a request, and of its answer where the id can stand in a header."""
_MAX_LENGTH = 256


def conversation_id(headers: Mapping[str, str], request: ChatRequest) -> str:
    """The header `X-Conversation-Id`, else `metadata.conversation_id`, else `user`, else a hash of the
    messages up to the user's first, which all requests of a conversation have in common.

    Raises ApiError for an id that is no text of 1 to 256 characters.
    """
    for name, given in (
        (HEADER, headers.get(HEADER)),
        ("metadata.conversation_id", request.metadata.get("conversation_id")),
        ("user", request.user or None),
    ):
        if given is None:
            continue
        if not isinstance(given, str) or not 1 <= len(given) <= _MAX_LENGTH or not _is_unicode(given):
            raise ApiError(
                f"{name} must be a text of 1 to {_MAX_LENGTH} characters, got {given!r:.60}",
                code="invalid_conversation_id",
                param=name.partition(".")[0],
            )
        return given
    return f"opening-{_opening(request)}"


def _opening(request: ChatRequest) -> str:
    """128 bits of BLAKE2b of roles and texts."""
    opening: list[Message] = []
    for message in request.messages:
        opening.append(message)
        if message.role == "user":
            break
    text = json.dumps([(message.role, message.content) for message in opening])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _is_unicode(text: str) -> bool:
    """Not so a header with bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
