"""A chat template as it is written renders by plain transformers, without arguments, what was trained on."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import ALL_NAMES, IN_SUITE, chosen, trl_template, trl_tokenizer
from template_talks import SHOW_NO_CALLS, full_render, opening_of, sane_talk, tools_of
from tiny_models import tiny_tokenizer
from transformers import AutoTokenizer

from stateset_agents.backends.tokenizers import HuggingFaceTokenizer, save_tokenizer
from stateset_agents.core.chat.plain_template import PlainTemplate, is_plain
from stateset_agents.core.chat.rendering import _OWN, PinnedTemplate, _variables, write_template
from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

DAY = datetime.date(2024, 2, 29)
DATED = (
    "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ strftime_now('%d %b %Y') }} {{ mood }}:{% endif %}"
)
USER = [Message(role="user", content="hi")]
CLOCKS = ("gptoss", "gptoss_training", "llama3_2", "muse_glimmer", "muse_glimmer_training")
"""They tell the date."""


def written_in(folder: Path, template: Any) -> HuggingFaceTokenizer:
    """A tokenizer as plain transformers loads it from a folder that the template was written in."""
    save_tokenizer(template.tokenizer.hf, folder)
    ends = folder / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": template.tokenizer.hf.eos_token_id, "top_k": 7}))
    write_template(folder, template.written(), template.stop_ids)
    settings = json.loads(ends.read_text())
    assert settings["top_k"] == 7
    more = settings["eos_token_id"]
    return HuggingFaceTokenizer(
        AutoTokenizer.from_pretrained(folder), extra_eos_ids=more if isinstance(more, list) else [more]
    )


def plain_ids(tokenizer: HuggingFaceTokenizer, messages: list[Any], tools: Any = None, **more: Any) -> Any:
    return tokenizer.hf.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=True, return_dict=False, **more
    )


@pytest.mark.first(2)
@pytest.mark.parametrize("name", chosen(IN_SUITE, ALL_NAMES))
def test_arguments_before_a_template_do_what_arguments_given_to_it_do(name: str) -> None:
    text = trl_template(name).text
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}] if "parts" in name else "hi"}]
    hf = trl_template(name).tokenizer.hf
    for argument in sorted(_variables(text) - _OWN):
        for value in (True, False, "high", None):
            pinned = PinnedTemplate(text=text, arguments={argument: value}).written()
            results: list[str] = []
            for template, more in ((text, {argument: value}), (pinned, {})):
                try:
                    results.append(
                        hf.apply_chat_template(
                            messages,
                            chat_template=template,
                            tools=tools_of(name) or None,
                            add_generation_prompt=True,
                            tokenize=False,
                            **more,
                        )
                    )
                except Exception as error:  # a template may refuse a value: then both do
                    results.append(f"{type(error).__name__}: {error}")
            assert results[0] == results[1], (argument, value)


@pytest.mark.first(4)
@pytest.mark.parametrize("name", chosen(IN_SUITE, ALL_NAMES))
def test_plain_transformers_makes_the_prompts_of_what_was_written(name: str, tmp_path: Path) -> None:
    """Of an opening and of a talk with calls and thoughts, on a day, after a reload by this library, too."""
    day = JinjaTemplate(trl_tokenizer(name), allow_hidden_tools=True, date=DAY)
    saved = written_in(tmp_path, day)
    again = JinjaTemplate(saved, allow_hidden_tools=True)
    assert again.date == day.date == (DAY if name in CLOCKS else None)
    tools, talk = tools_of(name), [*opening_of(name)]
    for exchange in sane_talk(name)[:2]:
        ids = day.prompt(talk, tools)
        assert again.prompt(talk, tools) == ids
        text = full_render(name, talk, tools, hf=saved.hf)
        assert saved.hf(text, add_special_tokens=False).input_ids == ids
        if exchange.reply.tool_calls and name in SHOW_NO_CALLS:
            continue  # a call is in its content, where its frame is plain text to us
        role, call = ("tool", exchange.reply.tool_calls[0]) if exchange.reply.tool_calls else ("user", None)
        heard = Message(role=role, content=exchange.heard[0])
        if call is not None:
            heard = replace(heard, name=call.name, tool_call_id=call.id)
        talk += [exchange.reply, heard]
    assert {*again.stop_ids} == {*day.stop_ids}


ODD = "fine # {% raw %} #}\n\u00fc \U0001f600"


def test_arguments_and_the_day_stand_in_what_is_written(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(bos=False)
    tokenizer.hf.chat_template = DATED
    day = JinjaTemplate(tokenizer, arguments={"mood": ODD}, date=DAY)
    saved = written_in(tmp_path, day)
    ids = day.prompt(USER)
    assert tokenizer.decode(ids) == f"hi29 Feb 2024 {ODD}:"
    hi = [{"role": "user", "content": "hi"}]
    assert plain_ids(saved, hi) == ids
    assert saved.decode(plain_ids(saved, hi, mood="sad")) == "hi29 Feb 2024 sad:"  # a caller's wins
    again = JinjaTemplate(saved)
    assert again.prompt(USER) == ids
    assert again.written() == day.written()
    other = JinjaTemplate(saved, arguments={"mood": "sad"}, date=datetime.date(2025, 1, 1))
    assert saved.decode(other.prompt(USER)) == "hi01 Jan 2025 sad:"
    assert other.written().count("stateset_agents") == day.written().count("stateset_agents") == 2


def test_a_template_without_arguments_and_day_is_written_as_it_is() -> None:
    tokenizer = tiny_tokenizer(bos=False)
    tokenizer.hf.chat_template = DATED
    assert JinjaTemplate(tokenizer).written() == DATED


def test_an_argument_that_is_no_json_is_refused() -> None:
    tokenizer = tiny_tokenizer(bos=False)
    tokenizer.hf.chat_template = DATED
    with pytest.raises(ConfigurationError, match=r"argument 'mood' must be text, .* got datetime.date\(2024"):
        JinjaTemplate(tokenizer, arguments={"mood": DAY})


@pytest.mark.parametrize("bos", [True, False])
def test_the_plain_template_is_written_as_jinja(bos: bool, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(bos=bos)
    plain = PlainTemplate(tokenizer)
    saved = written_in(tmp_path, plain)
    assert is_plain(saved)
    assert not is_plain(tokenizer)
    schema = {"type": "function", "function": {"name": "look", "description": "Sieht n\u00e4her hin."}}
    call = ToolCall(name="look", arguments={"at": "Z\u00fcrich", "n": 2.5}, id="call_0_0")
    talk = [
        Message(role="system", content="Be\r\nbrief.\n"),
        Message(role="user", content="a\u2028b\x0bc\n\nuser: d\n"),
        Message(role="assistant", content="I look.", reasoning="so\nso", tool_calls=(call,)),
        Message(role="tool", content="user: found\n", name="look", tool_call_id="call_0_0"),
        Message(role="assistant", content=""),
        Message(role="user", content=""),
    ]
    for tools in ([], [schema]):
        for end in range(1, len(talk) + 1):
            given = [message.to_openai() for message in talk[:end]]
            for message, data in zip(talk, given, strict=False):
                if message.reasoning is not None:
                    data["reasoning_content"] = message.reasoning
                for item in data.get("tool_calls", ()):
                    item["function"]["arguments"] = dict(call.arguments)
            assert plain_ids(saved, given, tools) == plain.prompt(talk[:end], tools)
