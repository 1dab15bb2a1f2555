"""A desk whose replies must call one of its tools, whatever the prompt shows."""

from __future__ import annotations

import pytest

from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.environments.retail_desk.tools import SCHEMAS, TOOLS, WRITES
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message


async def test_the_first_reply_must_call_and_later_ones_may() -> None:
    desk = RetailDesk(tool_choice="first")
    conversation = await desk.start(desk.scenarios("test")[0], 0)
    assert conversation.tools == ()
    limits = conversation.reply_limits
    assert limits is not None
    assert (limits.tool_choice, limits.callable_tools) == ("required", SCHEMAS)
    assert not limits.parallel_tool_calls
    await conversation.step(Message(role="assistant", content="one moment"))
    assert conversation.reply_limits is not None
    assert conversation.reply_limits.tool_choice == "auto"
    plain = await RetailDesk().start(desk.scenarios("test")[0], 0)
    assert plain.reply_limits is None


async def test_all_replies_must_call_or_look_up_and_then_change() -> None:
    message = Message(role="assistant", content="one moment")
    for tool_choice, writes in (("required", None), ("read, write", (False, True))):
        desk = RetailDesk(tool_choice=tool_choice)  # type: ignore[arg-type]  # a str to mypy
        conversation = await desk.start(desk.scenarios("test")[0], 0)
        for number in range(2):
            limits = conversation.reply_limits
            assert limits is not None
            assert limits.tool_choice == "required"
            names = {schema["function"]["name"] for schema in limits.callable_tools}
            if writes is None:
                assert names == set(TOOLS)
            else:
                assert names == {name for name in TOOLS if (name in WRITES) is writes[number]}
            await conversation.step(message)


def test_another_choice_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match="tool_choice must be one of 'auto', 'first', 'required', 'read, write'"
    ):
        RetailDesk(tool_choice="all")  # type: ignore[arg-type]  # on purpose
