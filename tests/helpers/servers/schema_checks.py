"""A check of schemathesis of our own, named to it by SCHEMATHESIS_HOOKS."""

from __future__ import annotations

import re
from typing import Any

import schemathesis

BEYOND_SCHEMAS = {
    *("invalid_messages", "context_length_exceeded", "invalid_conversation_id"),
    *("invalid_tool_choice", "unsupported_constraint"),
}
"""Of refusals that no schema can say: an order of messages, arguments that are no JSON, too long a text,
metadata that names no conversation, a choice of no tool that is offered, and what no grammar keeps."""


OF_SCHEMA = re.compile(r"[\w.\[\]]+ (must be|cannot be:|is not served here)")
"""Words of all other refusals: Anthropic's errors have no codes."""


@schemathesis.check
def refuses_what_the_schema_allows_for_a_reason_only(ctx: Any, response: Any, case: Any) -> None:
    """In the place of schemathesis's own check, which knows no such reasons."""
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive or response.status_code != 400:
        return
    error = response.json()["error"]
    is_beyond = error["code"] in BEYOND_SCHEMAS if "code" in error else not OF_SCHEMA.match(error["message"])
    assert is_beyond, f"the schema allows what is refused: {error['message']}"
