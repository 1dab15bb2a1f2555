"""A desk whose replies must call one of its tools, whatever the prompt shows."""

from __future__ import annotations

import pytest

from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.environments.retail_desk.tools import SCHEMAS, TOOLS, WRITES
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

LOOK_UPS = {"get_order", "get_product", "track_shipment"}


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
                assert names == (set(WRITES) if writes[number] else LOOK_UPS)
            await conversation.step(message)


def calls(name: str, **arguments: str) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


async def test_a_guided_conversation_looks_up_then_acts_or_speaks_and_speaks_behind_both() -> None:
    desk = RetailDesk(tool_choice="guided", families=["cancel"])
    granted = next(one for one in desk.scenarios("test") if not desk.is_denial(one))
    conversation = await desk.start(granted, 0)
    order_id = granted.context["order_id"]

    def due() -> tuple[str, set[str]]:
        limits = conversation.reply_limits
        assert limits is not None
        assert limits.callable_tools is not None
        return limits.tool_choice, {schema["function"]["name"] for schema in limits.callable_tools}

    assert due() == ("required", LOOK_UPS)
    await conversation.step(calls("get_order", order_id="Z99"))
    assert due()[0] == "none"  # it failed
    await conversation.step(Message(role="assistant", content="which order is it?"))
    assert due() == ("required", LOOK_UPS)
    await conversation.step(calls("get_order", order_id=order_id))
    assert due() == ("auto", set(WRITES))
    copy = conversation.fork()
    await conversation.step(calls("cancel_order", order_id="Z99"))
    assert due()[0] == "none"
    await conversation.step(Message(role="assistant", content="one moment"))
    assert due() == ("auto", set(WRITES))
    conversation = copy
    await conversation.step(calls("cancel_order", order_id=order_id))
    assert due()[0] == "none"
    await conversation.step(Message(role="assistant", content="one moment"))
    assert due()[0] == "none"  # nothing is changed twice


def test_full_calls_are_not_guided() -> None:
    with pytest.raises(
        ConfigurationError, match=r"guided is for the learnable families, got [a-z_, ]+: leave them out"
    ):
        RetailDesk(tool_choice="guided", families="all")


async def test_a_full_call_may_look_anything_up_first() -> None:
    desk = RetailDesk(tool_choice="read, write", families="full")
    limits = (await desk.start(desk.scenarios("test")[0], 0)).reply_limits
    assert limits is not None
    assert limits.callable_tools is not None
    names = {schema["function"]["name"] for schema in limits.callable_tools}
    assert names == {name for name in TOOLS if name not in WRITES}


def test_another_choice_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigurationError,
        match="tool_choice must be one of 'auto', 'first', 'required', 'read, write', 'guided'",
    ):
        RetailDesk(tool_choice="all")  # type: ignore[arg-type]  # on purpose
