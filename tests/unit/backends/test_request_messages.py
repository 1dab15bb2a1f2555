"""Messages of a request, as the server reads them."""

from __future__ import annotations

from typing import Any

from stateset_agents.backends.dialects.chat import ChatCompletions


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
