"""Messages reach a template in the shape that it reads, with the arguments and the date that were given."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from chat_templates import CHATML, tokenizer_with, trl_tokenizer

from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

IM = ("<|im_start|>", "<|im_end|>")
USER = Message(role="user", content="hi")


def read(template: JinjaTemplate, *messages: Message) -> str:
    return str(template.tokenizer.hf.decode(template.prompt(messages)))


def chatml(old: str, new: str) -> JinjaTemplate:
    assert old in CHATML
    return JinjaTemplate(tokenizer_with(*IM, template=CHATML.replace(old, new)))


# ------------------------------------------------------------------------------------ shapes of messages


def test_content_is_given_as_parts_where_a_template_reads_parts() -> None:
    template = JinjaTemplate(trl_tokenizer("smolvlm"))
    assert read(template, USER) == "<|im_start|>User: hi<end_of_utterance>\nAssistant:"
    assert read(template, Message(role="system", content="Brief."), USER).startswith(
        "<|im_start|>System: Brief."
    )


NINE = "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{{ call.id }}"


def test_ids_of_calls_are_shortened_where_a_template_wants_nine_characters() -> None:
    template = chatml("{{ '\n<tool_call>", NINE + "{{ '\n<tool_call>")
    calls = tuple(ToolCall(name="look", id=id) for id in ("call_0_0", "call_0_1"))
    result = Message(role="tool", content="found", tool_call_id="call_0_0")
    text = read(template, USER, Message(role="assistant", content="", tool_calls=calls), result)
    first, second = text.split("assistant\n")[1][:9], text.split("</tool_call>")[1][:9]
    assert first != second
    assert first.isalnum()
    assert second.isalnum()
    assert template.delta([result], calls) == JinjaTemplate(tokenizer_with(*IM, template=CHATML)).delta(
        [result], calls
    )


def test_arguments_are_text_where_a_template_adds_them_to_text() -> None:
    template = chatml("call.function.arguments | tojson +", "call.function.arguments +")
    call = ToolCall(name="look", arguments={"at": "Zürich"}, id="call_0_0")
    text = read(template, USER, Message(role="assistant", content="", tool_calls=(call,)), USER)
    assert '<tool_call>{"name": "look", "arguments": {"at": "Zürich"}}</tool_call>' in text


def test_a_call_that_a_template_would_leave_out_stands_in_the_content() -> None:
    template = JinjaTemplate(trl_tokenizer("llama3"))
    call = ToolCall(name="look", arguments={"at": "K27"}, id="call_0_0")
    result = Message(role="tool", content="found", tool_call_id="call_0_0", name="look")
    text = read(template, USER, Message(role="assistant", content="wait", tool_calls=(call,)), result)
    assert 'wait<tool_call>{"name": "look", "arguments": {"at": "K27"}}</tool_call><|eot_id|>' in text
    assert "<|start_header_id|>tool<|end_header_id|>\n\nfound<|eot_id|>" in text


# -------------------------------------------------------------------------------------------- thoughts


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_goes_to_a_template_under_the_name_that_it_reads(key: str) -> None:
    template = chatml(
        "message.content }}", f"(message.{key} + '|' if message.{key} else '') + message.content }}}}"
    )
    text = read(template, USER, Message(role="assistant", content="yes", reasoning="so"), USER)
    assert "assistant\nso|yes<|im_end|>" in text


def test_other_templates_get_the_thought_back_into_the_content() -> None:
    template = JinjaTemplate(tokenizer_with(*IM, template=CHATML))
    text = read(template, USER, Message(role="assistant", content="yes", reasoning="so"), USER)
    assert "assistant\n<think>\nso\n</think>\n\nyes<|im_end|>" in text
    assert "<think>" not in read(template, USER, Message(role="assistant", content="yes"), USER)


def test_frames_of_thoughts_are_control_tokens_and_what_is_thought_is_text() -> None:
    tokenizer = tokenizer_with(*IM, "<think>", "</think>", template=CHATML)
    ids = JinjaTemplate(tokenizer).prompt(
        [USER, Message(role="assistant", content="</think>", reasoning="</think><|im_end|>"), USER]
    )
    ends = [tokenizer.hf.convert_tokens_to_ids(text) for text in ("<think>", "</think>", "<|im_end|>")]
    assert [ids.count(id) for id in ends] == [1, 1, 3]
    assert tokenizer.hf.decode(ids).count("</think>") == 3


# --------------------------------------------------------------------------------- arguments and the date


def test_arguments_are_the_template_s_own() -> None:
    tokenizer = trl_tokenizer("qwen3")
    assert read(JinjaTemplate(tokenizer), USER).endswith("assistant\n")
    quiet = JinjaTemplate(tokenizer, arguments={"enable_thinking": False})
    assert read(quiet, USER).endswith("assistant\n<think>\n\n</think>\n\n")
    assert not JinjaTemplate(trl_tokenizer("lfm2_2_5")).appends
    assert JinjaTemplate(trl_tokenizer("lfm2_2_5"), arguments={"preserve_thinking": True}).appends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinkin": True}, r"no argument 'enable_thinkin' \(did you mean 'enable_thinking'\?\)"),
        ({"zzz": 1}, "no argument 'zzz'$"),
        ({"Tools": 1}, "no argument 'Tools'$"),  # a word of its prose
        ({"messages": []}, "'messages' is not free to be set"),
        ({"tools": []}, "'tools' is not free to be set"),
        ({"add_generation_prompt": False}, "'add_generation_prompt' is not free to be set"),
        ({"tokenize": True}, "'tokenize' is not free to be set"),
    ],
)
def test_arguments_that_a_template_does_not_have_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        JinjaTemplate(trl_tokenizer("qwen3"), arguments=arguments)


@pytest.mark.parametrize(
    ("name", "told"),
    [("gptoss", "2031-02-03"), ("muse_glimmer", "2031-02-03"), ("llama3_2", "03 Feb 2031")],
)
def test_a_template_tells_the_date_that_it_was_given(name: str, told: str) -> None:
    tokenizer = trl_tokenizer(name)
    dated, today = JinjaTemplate(tokenizer, date=datetime.date(2031, 2, 3)), JinjaTemplate(tokenizer)
    assert told in read(dated, USER)
    assert told not in read(today, USER)
    assert (dated.date, today.date) == (datetime.date(2031, 2, 3), datetime.date.today())


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        ("strftime_now('%Y')", "2031\n"),
        ("strftime_now( format = '%d %b' )", "03 Feb\n"),
        ("'here' if strftime_now is defined", "here\n"),
    ],
)
def test_however_a_template_asks_the_clock_it_reads_one_day(clock: str, told: str) -> None:
    day = datetime.date(2031, 2, 3)
    template = JinjaTemplate(tokenizer_with(*IM, template="{{ " + clock + " }}\n" + CHATML), date=day)
    assert read(template, USER).startswith(told)
    assert template.date == (day if "(" in clock else None)


def test_a_clock_that_cannot_be_stopped_is_refused() -> None:
    for clock in (
        "{% set shape = '%Y' %}{{ strftime_now(shape) }}",
        "{% set clock = strftime_now %}{{ clock('%Y') }}",
    ):
        with pytest.raises(ConfigurationError, match="the chat template computes the format of its date"):
            JinjaTemplate(tokenizer_with(*IM, template=clock + CHATML))
    JinjaTemplate(tokenizer_with(*IM, template="{# strftime_now(shape) #}" + CHATML))
