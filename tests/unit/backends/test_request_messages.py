"""Messages and tools of a request, as the server reads them, and errors as each dialect has them."""

from __future__ import annotations

from typing import Any

import pytest

from stateset_agents.backends.dialects.anthropic import Messages, message_error_body
from stateset_agents.backends.dialects.chat import ChatCompletions
from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.backends.dialects.responses import Responses


def test_a_result_has_the_name_of_the_call_before_it_though_an_id_occurs_twice() -> None:
    """Many clients number the calls of each reply anew."""

    def reply(*names: str) -> dict[str, Any]:
        calls = [{"id": "call_0", "function": {"name": name}} for name in names]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    def result(id: str | None = "call_0") -> dict[str, Any]:
        return {"role": "tool", "content": "found", **({} if id is None else {"tool_call_id": id})}

    messages = [
        {"role": "user", "content": "hi"},
        *(reply("look"), result()),
        *(reply("buy", "sell"), result(), result(), result()),
        {"role": "user", "content": "and?"},
        *(reply("ask", "tell"), result(None), {**result(None), "name": "own"}),
    ]
    read = ChatCompletions().read({"messages": messages}, "").request.messages
    names = [message.name for message in read if message.role == "tool"]
    assert names == ["look", "buy", "sell", "sell", "ask", "own"]


def test_a_tool_is_the_same_in_every_dialect_whatever_a_client_says_beside_it() -> None:
    """Its prompt is the one that training has: nothing that is null, and nothing without effect."""
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    function = {"name": "look", "description": None, "strict": True}
    chat = [{"type": "function", "function": {**function, "parameters": schema}, "vendor": 1}]
    flat = [{"type": "function", **function, "parameters": schema}]
    blocks = [{**function, "input_schema": schema, "cache_control": {"type": "ephemeral"}}]
    expected = ({"type": "function", "function": {"name": "look", "parameters": schema}},)
    assert ChatCompletions().read({**talk, "tools": chat}, "").request.tools == expected
    assert Responses().read({"input": "hi", "tools": flat}, "").request.tools == expected
    messages = {**talk, "model": "m", "max_tokens": 4, "tools": blocks}
    assert Messages().read(messages, "").request.tools == expected


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
    ],
)
def test_an_error_has_the_type_that_anthropic_gives_its_status(status: int, kind: str) -> None:
    assert message_error_body(ApiError("no", code="any", status=status))["error"]["type"] == kind
