"""A sampled text becomes a message, whatever it holds."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.replies.parsing import HERMES, parse_reply
from stateset_agents.core.tools import Toolbox
from stateset_agents.types.messages import Message, ToolCall

BROKEN = [
    ('{"name": "f"', "not JSON"),
    ("f(1)", "not JSON"),
    ("", "not JSON"),
    ("[1]", 'an object with "name" and "arguments"'),
    ("3", 'an object with "name" and "arguments"'),
    ('{"arguments": {}}', 'an object with "name" and "arguments"'),
    ('{"name": 3}', 'an object with "name" and "arguments"'),
    ('{"name": "f", "arguments": [1]}', "arguments must be an object"),
    ('{"name": "f", "arguments": null}', "arguments must be an object"),
    ('{"name": "f", "arguments": {"x": NaN}}', "not finite"),
    ('{"name": "f", "arguments": {"x": -Infinity}}', "not finite"),
    ('{"name": "f", "arguments": {"x": 1e999}}', "not finite"),
    ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not JSON"),
    ('{"name": "f", "arguments": {"x": "\\ud800"}}', "half a character"),
    ('{"name": "f", "arguments": {"\\udfff": 1}}', "half a character"),
    ('{"name": "f", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}", "more than 32 levels"),
    ("[" * 100_000, "more than 32 levels"),
    ('{"name": "f", "arguments": ' + '{"x": ' * 100_000, "more than 32 levels"),
    ("<tool_call>{}", "not JSON"),
]


@pytest.mark.parametrize(
    "said", ['<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f"}', "<tool_call>"]
)
async def test_a_call_that_the_limit_of_tokens_cut_says_so(said: str) -> None:
    backend = ScriptedBackend([said + "x" * 40])
    async with MultiTurnAgent(AgentConfig(max_new_tokens=len(said)), backend=backend) as agent:
        completion = await agent.reply([1], agent.sampling(stream=0))
    [call] = completion.message.tool_calls
    assert completion.finish_reason == "length"
    at = len(said)
    why = f"the reply was cut at {at} tokens, before the tool call was complete: write a shorter one"
    assert call.error == why
    answer = await Toolbox().call(call)
    assert answer.content == f"error: {why}"


async def test_a_call_before_the_cut_is_whole() -> None:
    said = wrapped('{"name": "f", "arguments": {}}') + wrapped("?")
    backend = ScriptedBackend([said + "x" * 40])
    async with MultiTurnAgent(AgentConfig(max_new_tokens=len(said)), backend=backend) as agent:
        calls = (await agent.reply([1], agent.sampling(stream=0))).message.tool_calls
    assert [call.error and call.error[:25] for call in calls] == [None, "the tool call is not JSON"]


def wrapped(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


def test_calls_are_read_out_of_the_text() -> None:
    message = parse_reply('ok <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> bye', turn=3)
    assert message.content == "ok  bye"
    assert message.tool_calls == (ToolCall(name="f", arguments={"x": 1}, id="call_3_0"),)


def test_several_calls_keep_their_order_and_get_their_own_ids() -> None:
    message = parse_reply(wrapped('{"name": "f"}') + wrapped("?") + wrapped('{"name": "g", "arguments": {}}'))
    assert [call.name for call in message.tool_calls] == ["f", "", "g"]
    assert [call.id for call in message.tool_calls] == ["call_0_0", "call_0_1", "call_0_2"]
    assert [call.error is None for call in message.tool_calls] == [True, False, True]


CALL = wrapped('{"name": "f"}')


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names"),
    [
        (f"<think>I could {CALL} or not</think>No.", "No.", f"I could {CALL} or not", []),
        (f"<think>a</think> {CALL}", "", "a", ["f"]),
        (f"{CALL}<think>{CALL}</think>{CALL}", "", CALL, ["f", "f"]),
        (f"<think>cut off {CALL}", "", f"cut off {CALL}", []),
        (f"<think>a<think>b</think>{CALL}", "", "a<think>b", ["f"]),
        (wrapped('{"name": "f", "arguments": {"x": "<think>"}}') + CALL, "", None, ["f", "f"]),
        ("<think>a <tool_call> b</think> c", "c", "a <tool_call> b", []),
        ("<think>\n\n</think>\n\nYes.", "Yes.", "", []),
        ("so <think>a</think> then <think> b\n</think>it is", "so then it is", "a\n\nb", []),
        ("a </think> b", "a </think> b", None, []),
    ],
)
def test_what_a_thought_holds_is_no_call_and_no_content(
    text: str, content: str, reasoning: str | None, names: list[str]
) -> None:
    message = parse_reply(text)
    assert (message.content, message.reasoning) == (content, reasoning)
    assert [call.name for call in message.tool_calls] == names


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "<th", "{}", "a ", " "]
        ),
        max_size=10,
    ).map("".join),
    st.booleans(),
)
def test_words_and_thoughts_that_are_certain_stay_where_they_are_while_more_comes(
    text: str, calls: bool
) -> None:
    message = HERMES.read(text, calls=calls)
    said = HERMES.stream(calls=calls)
    for character in text:
        said.add(character)
        assert message.content.startswith(said.content)
        assert (message.reasoning or "").startswith(said.reasoning or "")
    said.finish()
    assert (said.content, said.reasoning) == (message.content, message.reasoning)


@pytest.mark.parametrize("text", [" Hello\n", f"take {CALL} ", "a<b ", " \n"])
def test_without_calls_words_stay_as_they_were_sampled(text: str) -> None:
    assert HERMES.read(text, calls=False) == Message(role="assistant", content=text)
    assert HERMES.read(f"\n<think>so</think>\n\n{text}x", calls=False).content == f"{text}x".lstrip()


def test_a_call_that_is_cut_says_so() -> None:
    message = parse_reply('wait <tool_call>{"name": "f"}\n')
    assert message.content == "wait"
    assert message.tool_calls[0].error == "the tool call is not closed by </tool_call>"


@pytest.mark.parametrize(("text", "why"), BROKEN, ids=[why + str(i) for i, (_, why) in enumerate(BROKEN)])
async def test_a_call_that_cannot_be_read_keeps_its_reason(text: str, why: str) -> None:
    (call,) = parse_reply(wrapped(text)).tool_calls
    assert call.name == ""
    assert why in str(call.error)
    assert "\n" not in str(call.error)
    answer = await Toolbox().call(call)
    assert answer.content == f"error: {call.error}"


def test_a_key_that_stands_twice_means_its_last_value() -> None:
    (call,) = parse_reply(wrapped('{"name": "f", "arguments": {"x": 1, "x": 2}}')).tool_calls
    assert call.arguments == {"x": 2}


def test_characters_beyond_ascii_pass() -> None:
    (call,) = parse_reply(wrapped('{"name": "f", "arguments": {"x": "\\ud83d\\ude00 ü"}}')).tool_calls
    assert call.arguments == {"x": "😀 ü"}


fragments = st.one_of(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '{"name": ',
            '"f"',
            ', "arguments": ',
            "{",
            "}",
            "[",
            "]",
            "NaN",
            "1e999",
        ]
    ),
    st.text(max_size=4),
    st.sampled_from(['"\\ud800"', "-", "0", "\ud800", "\\u", "9" * 5000]),
)


@settings(max_examples=300)
@given(st.lists(fragments, max_size=12).map("".join))
def test_no_text_raises_and_every_call_that_is_read_can_be_written_again(text: str) -> None:
    for call in parse_reply(text).tool_calls:
        assert (call.name == "") or call.error is None
        if call.error is None:
            json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()


def test_reading_takes_time_in_proportion_to_the_text() -> None:
    start = time.process_time()
    parse_reply("<tool_call>" * 50_000)
    parse_reply("<tool_call></tool_call>" * 20_000)
    assert time.process_time() - start < 2


ELSEWHERE = [
    ("parameters", '{"name": "cancel", "parameters": {"status": "draft"}}', {"status": "draft"}),
    ("args", '{"name": "cancel", "args": {"status": "draft"}}', {"status": "draft"}),
    ("wrapped", '{"type": "function", "function": {"name": "cancel", "arguments": {"a": 1}}}', {"a": 1}),
    ("with an id", '{"name": "cancel", "arguments": {}, "id": "call_1"}', {}),
    ("none", '{"name": "cancel"}', {}),
    ("top level", '{"name": "cancel", "status": "draft"}', "'status' beside its name"),
    (
        "beside arguments",
        '{"name": "cancel", "arguments": {}, "status": "draft"}',
        "'status' beside its name",
    ),
    ("an id alone", '{"name": "cancel", "id": "K27"}', "'id' beside its name"),
    ("input", '{"name": "cancel", "input": {"status": "draft"}}', "'input' beside its name"),
    ("twice", '{"name": "cancel", "arguments": {}, "parameters": {"status": 1}}', "arguments and parameters"),
    ("beside its wrapper", '{"function": {"name": "cancel"}, "status": "draft"}', "'status' beside its name"),
    ("no name", '{"name": " ", "arguments": {}}', "names no tool"),
]


@pytest.mark.parametrize(("text", "wanted"), [case[1:] for case in ELSEWHERE], ids=[c[0] for c in ELSEWHERE])
async def test_a_call_never_runs_without_its_arguments(text: str, wanted: object) -> None:
    (call,) = parse_reply(wrapped(text)).tool_calls
    if isinstance(wanted, dict):
        assert (call.name, call.arguments, call.error) == ("cancel", wanted, None)
    else:
        assert str(wanted) in str(call.error)
        assert (await Toolbox().call(call)).content == f"error: {call.error}"


def test_a_closing_delimiter_in_a_text_closes_nothing() -> None:
    text = '{"name": "f", "arguments": {"x": "a </tool_call> b"}}'
    message = parse_reply(f"{wrapped(text)} done {wrapped('{}')}")
    assert message.tool_calls[0].arguments == {"x": "a </tool_call> b"}
    assert message.content == "done"
    broken = parse_reply('<tool_call>{"name": "f</tool_call> and on')
    assert (broken.content, len(broken.tool_calls)) == ("and on", 1)
