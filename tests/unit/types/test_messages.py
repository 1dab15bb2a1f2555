"""Messages come in and go out in OpenAI's chat shape; a completion is what it says it is."""

from __future__ import annotations

from typing import Any

import pytest

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message, ToolCall, VersionSpan


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function, **more}]}


def test_a_message_survives_the_round_trip() -> None:
    message = Message(
        role="assistant",
        content="ok",
        tool_calls=(ToolCall(name="f", arguments={"x": [1, None, "ü"]}, id="a"),),
        name="Ada",
    )
    assert Message.from_openai(message.to_openai()) == message
    result = Message(role="tool", content="1", tool_call_id="a")
    assert Message.from_openai(result.to_openai()) == result


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("hi", "hi"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_content_may_be_text_nothing_or_text_parts(content: Any, text: str) -> None:
    assert Message.from_openai({"role": "user", "content": content}).content == text


def test_a_developer_s_message_is_the_system_s() -> None:
    assert Message.from_openai({"role": "developer", "content": "be brief"}) == Message(
        role="system", content="be brief"
    )


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_arguments_may_be_json_text_or_an_object(arguments: Any) -> None:
    message = Message.from_openai(call(arguments, id="a"))
    assert message.tool_calls == (ToolCall(name="f", arguments={"x": 1}, id="a"),)


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    assert Message.from_openai(call(arguments)).tool_calls == (ToolCall(name="f"),)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("hi", "a message must be a mapping or a Message, got str: 'hi'"),
        (None, "a message must be a mapping or a Message, got NoneType"),
        ({"rol": "user", "content": "hi"}, "got None: write 'role', not 'rol'"),
        ({"content": "hi"}, "role must be one of system, user, assistant, tool, got None"),
        ({"role": "bot", "content": "hi"}, "role must be one of system, user, assistant, tool, got 'bot'"),
        ({"role": ["user"], "content": "hi"}, "role must be one of"),
        ({"role": "user", "content": 3}, "content must be text or a list of parts, got int: 3"),
        ({"role": "user", "content": {"text": "a"}}, "content must be text or a list of parts, got dict"),
        ({"role": "user", "content": [{"type": "audio"}]}, "got dict: {'type': 'audio'}"),
        ({"role": "user", "content": ["a"]}, 'must be {"type": "text", "text": ...} or {"type": "image_url"'),
        ({"role": "user", "content": "a", "name": 3}, "message name must be text, got int: 3"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, "message tool_call_id must be text, got int"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls must be a list, got str"),
        ({"role": "assistant", "tool_calls": {"f": 1}}, "tool_calls must be a list, got dict"),
        ({"role": "assistant", "tool_calls": ["f"]}, "a tool call must be"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "a tool call must be"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}, "a tool call must be"),
        ({"role": "assistant", "tool_calls": [{"function": None}]}, "a tool call must be"),
        (call('{"x": '), "the arguments of tool call 'f' are not JSON"),
        (call("[1]"), "the arguments of tool call 'f' must be an object, got list"),
        (call([1]), "the arguments of tool call 'f' must be an object, got list"),
        (call("[" * 100_000), "the arguments of tool call 'f' are not JSON"),
    ],
)
def test_a_message_that_cannot_be_read_is_one_clear_line(data: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Message.from_openai(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def completion(**fields: Any) -> Completion:
    arguments = {"token_ids": (1, 2, 3), "logprobs": (-1.0, -1.0, -1.0), **fields}
    message = Message(role="assistant", content="")
    return Completion(message=message, prompt_ids=(0,), finish_reason="stop", **arguments)


def test_every_token_needs_its_log_prob() -> None:
    with pytest.raises(ValueError, match="one log-prob per token, got 3 tokens and 2 log-probs"):
        completion(logprobs=(-1.0, -1.0))


def test_version_spans_say_which_policy_sampled_each_token() -> None:
    assert list(completion(version_spans=(VersionSpan(4, 0, 2), VersionSpan(5, 2, 3))).versions) == [4, 4, 5]
    assert list(completion().versions) == [0, 0, 0]


@pytest.mark.parametrize("spans", [((1, 0, 2),), ((1, 0, 2), (2, 1, 3)), ((1, 1, 3),), ((1, 0, 4),)], ids=str)
def test_version_spans_must_cover_every_token_once(spans: Any) -> None:
    with pytest.raises(ValueError, match="do not cover 3 tokens"):
        completion(version_spans=tuple(VersionSpan(*span) for span in spans))


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_thoughts_are_read_by_either_name_and_written_nowhere(key: str) -> None:
    message = Message.from_openai({"role": "assistant", "content": "Monday", key: "it was sent on Friday"})
    assert message.reasoning == "it was sent on Friday"
    assert message.to_openai() == {"role": "assistant", "content": "Monday"}


def test_thoughts_must_be_text() -> None:
    with pytest.raises(ConfigurationError, match="message reasoning must be text, got int: 3"):
        Message.from_openai({"role": "assistant", "content": "", "reasoning": 3})


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
@pytest.mark.parametrize("is_text", [False, True])
def test_a_call_s_arguments_may_stand_under_another_name(key: str, is_text: bool) -> None:
    function = {"name": "cancel", key: '{"status": "draft"}' if is_text else {"status": "draft"}}
    for item in ({"id": "c1", "type": "function", "function": function}, {"id": "c1", **function}):
        (call,) = Message.from_openai({"role": "assistant", "tool_calls": [item]}).tool_calls
        assert (call.name, call.arguments, call.id) == ("cancel", {"status": "draft"}, "c1")


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"name": "cancel", "status": "draft"}, "no arguments, and 'status' beside its name"),
        ({"function": {"name": "cancel", "arguments": {}, "status": "x"}}, "'status' beside its name"),
        ({"function": {"name": "cancel", "args": {"a": 1}, "arguments": {}}}, "arguments and args"),
    ],
)
def test_a_call_whose_arguments_would_get_lost_is_refused(item: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Message.from_openai({"role": "assistant", "tool_calls": [item]})


def test_what_a_vendor_adds_to_a_call_is_no_argument() -> None:
    item = {
        "function": {"name": "ping", "arguments": "{}", "parsed_arguments": None},
        "extra_content": {"google": {}},
    }
    (call,) = Message.from_openai({"role": "assistant", "tool_calls": [item]}).tool_calls
    assert call.arguments == {}
    beside = {"function": {"name": "ping"}, "arguments": {"a": 1}}
    (call,) = Message.from_openai({"role": "assistant", "tool_calls": [beside]}).tool_calls
    assert call.arguments == {"a": 1}
