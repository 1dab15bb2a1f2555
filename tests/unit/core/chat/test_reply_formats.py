"""Replies in the formats of well-known models: what TRL's templates and ours write is read back."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_templates import OURS, TRL_FOLDER, TRL_NAMES, tokenizer_with, trl_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.chat_template_utils import add_response_schema

from stateset_agents.backends.dialects.request import as_sent
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.chat.replies.parsing import ReplyParser, choose_parser, response_templates
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message, ToolCall

NAMES = (
    tuple(
        name
        for name in TRL_NAMES
        if not name.endswith("_training")
        and not name.startswith("deepseek_r1")  # leaves calls out
        and "tool_calls" in (TRL_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    )
    + OURS
)
WITHOUT_THOUGHTS = (
    *OURS,
    "deepseekv3",
    "gemma4",
    "lfm2_v2",
    "llama3",
    "qwen2_5",
    "qwen3_instruct",
    "qwen3_vl",
)
"""Templates that show no thought of a reply in words, by how their names begin; Gemma's last one does."""
PLAIN = {"city": "Oslo", "days": 3}
HARD = {
    "words": 'it\'s "a" [b] {c}, (d)\n <e> & é ✓ 😀',
    "days": -3,
    "share": 0.25,
    "now": True,
    "items": ["it's", '"b"', 1, [2.5, False, {"k": "v, w"}]],
    "options": {"key": {"deep": ["x", None]}, "a b": "", "s": "a=1, b='2')"},
    "none": "",
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
USER = "where is it"


def call(**arguments: Any) -> ToolCall:
    return ToolCall(name="look_up", arguments=arguments)


def said(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def tools_for(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    properties = {name: {"type": TYPES[type(value)]} for name, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    function = {"name": "look_up", "description": "Looks.", "parameters": parameters}
    return [{"type": "function", "function": function}]


def rendering(tokenizer: HuggingFaceTokenizer, tools: Any = ()) -> tuple[str, Callable[[Message], str]]:
    """The end of the prompt, and how the template writes a reply, without its end token."""

    def text(*messages: dict[str, Any], generate: bool = False) -> str:
        talk = [{"role": "user", "content": USER}, *messages]
        try:
            rendered = tokenizer.hf.apply_chat_template(
                talk, tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:
            raise ConfigurationError(str(error)) from error
        return str(rendered).rpartition(USER)[2]

    def render(message: Message) -> str:
        data: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.reasoning is not None:
            data |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), message.reasoning)
        if message.tool_calls:
            data["tool_calls"] = [
                {
                    "id": "call_0_0",
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for each in message.tool_calls
            ]
        try:
            return text(data)
        except ConfigurationError:  # some want arguments as a JSON text
            for each in data.get("tool_calls", ()):
                each["function"]["arguments"] = json.dumps(each["function"]["arguments"], ensure_ascii=False)
            return text(data)

    return text(generate=True), render


@functools.cache
def opened(name: str) -> tuple[ReplyParser, str, Callable[[Message], str]]:
    """Parser, end of the prompt and rendering of a TRL template."""
    tokenizer = trl_tokenizer(name)
    end, render = rendering(tokenizer, tools_for(PLAIN))
    ends = [tokenizer.piece(id) for id in tokenizer.eos_ids]

    def reply(message: Message) -> str:
        return functools.reduce(str.removesuffix, ends, render(message).rstrip())

    return choose_parser(tokenizer, end, render), end, reply


def sampled(name: str, message: Message) -> str:
    """A reply as the model would write it after the prompt, in the text that the parser gets."""
    parser, end, reply = opened(name)
    text = reply(message)
    while not text.startswith(end):  # the template shows another end in the past: without the open thought
        end = end[: end.rstrip().rfind("<")]
    text = text[len(end) :]
    if parser.begins_in is not None:
        text = text.removeprefix("<think>") if "</think>" in text else f"</think>{text}"
    if parser.skip_special_tokens:
        text = functools.reduce(lambda text, token: text.replace(token, ""), specials(name), text)
    return text


@functools.cache
def specials(name: str) -> tuple[str, ...]:
    added = trl_tokenizer(name).hf.added_tokens_decoder.values()
    return tuple(token.content for token in added if token.special)


def bare(message: Message) -> tuple[str, str | None, list[tuple[str, Any]]]:
    calls = [(each.name, each.error or each.arguments) for each in message.tool_calls]
    return message.content, message.reasoning or None, calls


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    parser, _, _ = opened(name)
    assert parser.reads_calls
    for arguments in (PLAIN, HARD):
        message = parser.read(sampled(name, said("", call(**arguments))), tools=tools_for(arguments))
        assert bare(message) == ("", None, [("look_up", arguments)])
        assert message.tool_calls[0].id == "call_0_0"
    shows = name.endswith("v5") or not name.startswith(WITHOUT_THOUGHTS)
    thought = parser.read(sampled(name, said("It is here.\n\nSee?", reasoning="Where is it?\nHm.")))
    assert bare(thought) == ("It is here.\n\nSee?", "Where is it?\nHm." if shows else None, [])


def test_the_calls_of_every_original_template_that_writes_them_are_read() -> None:
    read = {"plain": 0, "hard": 0}
    originals = [name for name in NAMES if name not in OURS]
    for name in originals:
        parser, _, _ = opened(name)
        for kind, arguments in zip(read, (PLAIN, HARD), strict=True):
            message = parser.read(sampled(name, said("", call(**arguments))), tools=tools_for(arguments))
            read[kind] += bare(message) == ("", None, [("look_up", arguments)])
    assert read == {"plain": len(originals), "hard": len(originals)} == {"plain": 28, "hard": 28}


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_after_a_thought_are_read_back(name: str) -> None:
    parser, _, _ = opened(name)
    reply = said("", call(city="it's"), call(city="[b]"), reasoning="Two, then.")
    if name.startswith(("gptoss", "llama3")):
        return  # these take one call
    message = parser.read(sampled(name, reply))
    assert [each.arguments for each in message.tool_calls] == [{"city": "it's"}, {"city": "[b]"}]
    assert [each.id for each in message.tool_calls] == ["call_0_0", "call_0_1"]
    assert message.content == ""
    assert message.reasoning in ("Two, then.", None, "")


TALK = said("", call(city="it's", items=["a"]), reasoning="Oh <well>.")


def texts_of(name: str) -> list[str]:
    replies = [TALK, said("So: <b> it.", reasoning="Hm [x]")]
    texts = []
    for reply in replies:
        try:
            texts.append(sampled(name, reply))
        except ConfigurationError:
            texts.append(sampled(name, said(reply.content, *reply.tool_calls)))
    return texts


def stream_and_read(parser: ReplyParser, text: str, sizes: list[int]) -> Message:
    """Stream it in pieces of these sizes: what is certain only grows, into what is read."""
    message = parser.read(text, tools=tools_for(PLAIN))
    stream = parser.stream()
    told = {"content": "", "reasoning": ""}
    at, step = 0, 0
    while at < len(text):
        size = sizes[step % len(sizes)]
        stream.add(text[at : at + size])
        at, step = at + size, step + 1
        for name, text_added in stream.delta().items():
            told[name] += text_added
        assert told == {"content": stream.content, "reasoning": stream.reasoning or ""}
        assert message.content.startswith(stream.content)
        assert (message.reasoning or "").startswith(stream.reasoning or "")
    stream.finish()
    assert (stream.content, stream.reasoning) == (message.content, message.reasoning)
    for each in message.tool_calls:
        assert bool(each.name) == (each.error is None)
        if each.error is None:
            json.dumps(dict(each.arguments), allow_nan=False, ensure_ascii=False).encode()
        else:
            assert "\n" not in each.error
            characters = iter(text)  # thoughts and control tokens are missing in what is shown to others
            assert all(character in characters for character in each.written)
    return message


@pytest.mark.parametrize("name", NAMES)
def test_every_beginning_of_a_reply_is_read_and_what_is_certain_only_grows(name: str) -> None:
    parser, _, _ = opened(name)
    for text in texts_of(name):
        stream_and_read(parser, text, [1])
        for end in range(0, len(text), 3):
            message = parser.read(text[:end])
            assert all(each.error for each in message.tool_calls[:-1])


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.3), st.floats(0, 1), st.text(max_size=2)), max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_no_damage_to_a_reply_raises(
    name: str, calls: bool, damages: list[tuple[float, float, float, str]], sizes: list[int]
) -> None:
    parser, _, _ = opened(name)
    text = texts_of(name)[0 if calls else 1]
    for where, length, target, put in damages:  # a part moves elsewhere, and something else takes its place
        start = int(where * len(text))
        end = start + int(length * len(text))
        part, text = text[start:end], text[:start] + put + text[end:]
        at = int(target * len(text))
        text = text[:at] + part + text[at:]
    stream_and_read(parser, text, sizes)
    parser.read(text, calls=False)


@pytest.mark.parametrize("name", ["gptoss", "qwen3_8", "gemma4_v5", "lfm2_v2", "muse_glimmer", "qwen3"])
def test_a_reply_of_500_tokens_is_read_within_a_millisecond(name: str) -> None:
    parser, _, _ = opened(name)
    words = "The parcel left <Oslo> at 7, and it's [due] on Monday. " * 10
    reply = said("", call(words=words, days=3), reasoning=words * 2)
    text = sampled(name, reply if name != "lfm2_v2" else said("", call(words=words * 3)))
    assert len(text) > 1500
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        parser.read(text)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3


MISTRAL = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{% else %}{% if message.reasoning %}{{ '[THINK]' + message.reasoning + '[/THINK]' }}{% endif %}"
    "{{ message.content }}CALLS{{ eos_token }}{% endif %}{% endfor %}"
)
ONE_LIST = (
    "{% if message.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in message.tool_calls %}"
    "{{ ', ' if not loop.first else '' }}"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments, 'id': '123456789'} | tojson }}"
    "{% endfor %}{{ ']' }}{% endif %}"
)
EACH = (
    "{% for call in message.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{% endfor %}"
)
WITH_ID = EACH.replace("name + '[ARGS]'", "name + '[CALL_ID]123456789[ARGS]'")


def mistral(calls: str) -> tuple[ReplyParser, Callable[[Message], str]]:
    marks = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    tokenizer = tokenizer_with(*marks, template=MISTRAL.replace("CALLS", calls))
    end, render = rendering(tokenizer)
    assert end == "[/INST]"
    parser = choose_parser(tokenizer, end, render)
    return parser, lambda message: render(message).removeprefix(end).removesuffix("<|end|>")


@pytest.mark.parametrize("calls", [ONE_LIST, EACH, WITH_ID], ids=["one list", "each", "with id"])
def test_mistral_s_calls_and_thoughts_are_read_back(calls: str) -> None:
    parser, render = mistral(calls)
    assert parser.reads_calls
    assert not parser.skip_special_tokens
    reply = said("", call(**HARD), call(city="Bergen"), reasoning="Two.")
    assert bare(parser.read(render(reply))) == (
        "",
        "Two.",
        [("look_up", HARD), ("look_up", {"city": "Bergen"})],
    )
    for damaged in (
        render(reply)[:-9],
        "[TOOL_CALLS]",
        "[TOOL_CALLS][{",
        "[TOOL_CALLS]look_up",
        "[TOOL_CALLS][]x",
    ):
        *_, last = parser.read(damaged).tool_calls
        assert last.error
        stream_and_read(parser, damaged, [1])


def test_what_gpt_oss_writes_besides_its_template_is_read() -> None:
    parser, _, _ = opened("gptoss")
    text = (
        "<|channel|>analysis<|message|>Look.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>"
        '{"city": "Oslo"}'
    )
    assert bare(parser.read(text)) == ("I will look.", "Look.", [("look_up", {"city": "Oslo"})])
    assert bare(parser.read("It is here.")) == ("It is here.", None, [])
    assert bare(parser.read("<|channel|>final<|message|>It is here.")) == ("It is here.", None, [])
    cut = parser.read("<|channel|>analysis<|message|>Hm<|start|>assistant<|channel|>final<|message|>Yes")
    assert bare(cut) == ("Yes", "Hm", [])


def test_deepseek_v3_1_writes_its_calls_without_a_type() -> None:
    parser, _, _ = opened("deepseekv3")
    text = (
        "Hm.</think>Wait.<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>look_up<\uff5ctool▁sep\uff5c>"
        '{"city": "Oslo"}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>'
    )
    assert bare(parser.read(text)) == ("Wait.", "Hm.", [("look_up", {"city": "Oslo"})])


BROKEN = [
    (
        "qwen3_8",
        "</think><tool_call>\n<function=look_up>\n<parameter=city>\nOslo\n",
        "is not closed by </tool_call>",
    ),
    ("qwen3_8", "</think><tool_call>{}</tool_call>", "names no tool"),
    (
        "qwen3_8",
        "</think><tool_call><function=f><parameter=x>1</function></tool_call>",
        "'1' stands in no argument",
    ),
    ("glm4moe", "<tool_call>f<arg_key>x</arg_key>y</tool_call>", "stands in no argument"),
    ("glm4moe", "<tool_call>f<arg_key>x<arg_key>y</arg_key><arg_value>1</arg_value></tool_call>", "no name"),
    (
        "qwen3_8",
        "</think><tool_call><function=f><parameter=x></function></tool_call>",
        "'<parameter=' stands",
    ),
    ("qwen3_8", "</think><tool_call><function=f>1</function></tool_call>", "'1' stands in no argument"),
    ("llama3_1", '{"name": "f", "parameters": {"x": 1}', "is not JSON"),
    ("llama3_1", '{"name": "f", "parameters": [1]}', "arguments must be an object"),
    ("gptoss", " to=functions.f<|channel|>commentary json<|message|>{", "is not JSON"),
    ("gptoss", " to=functions.f<|channel|>commentary json<|message|>3", "arguments must be an object"),
    ("muse_glimmer", " to=f<|message|><atem:function_calls>\n<atem:invoke></atem:invoke>", "names no tool"),
    ("gemma4_v5", '<|tool_call>call:f{x:<|"|>a}<tool_call|>', "cannot be read: expected a text that"),
    ("gemma4_v5", "<|tool_call>call:f{x:[1,2}<tool_call|>", "cannot be read: expected ',' at '}'"),
    ("gemma4_v5", "<|tool_call>{x:1}<tool_call|>", "call:NAME"),
    ("lfm2_v2", "<|tool_call_start|>[f(x='a)]<|tool_call_end|>", "a text that ' ends"),
    ("lfm2_v2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "an argument, name=value"),
    ("lfm2_v2", "<|tool_call_start|>f(x=1)<|tool_call_end|>", "expected '['"),
    ("lfm2_v2", "<|tool_call_start|>[f(x=Oslo)]<|tool_call_end|>", "a text in quotes"),
    ("lfm2_v2", "<|tool_call_start|>[f(x=1e999)]<|tool_call_end|>", "not finite"),
    ("lfm2_v2", f"<|tool_call_start|>[f(x={'[' * 9000})]<|tool_call_end|>", "more than 32 levels"),
    ("lfm2_v2", "<|tool_call_start|>[f(x='a\\ud800')]<|tool_call_end|>", "half a character"),
    ("deepseekv3", "</think><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>", "is not closed"),
    ("deepseekv3", "</think><\uff5ctool▁call▁begin\uff5c>{}<\uff5ctool▁call▁end\uff5c>", "names no tool"),
]


@pytest.mark.parametrize(("name", "text", "why"), BROKEN, ids=[f"{name} {why}" for name, _, why in BROKEN])
def test_a_call_that_cannot_be_read_keeps_its_reason_and_text(name: str, text: str, why: str) -> None:
    parser, _, _ = opened(name)
    (broken,) = parser.read(text).tool_calls
    assert why in str(broken.error)
    assert "\n" not in str(broken.error)
    assert len(str(broken.error)) < 300
    assert broken.name == ""
    assert broken.written
    stream_and_read(parser, text, [2])


@pytest.mark.parametrize("name", ["qwen3_8", "gptoss", "llama3_1", "lfm2_v2", "gemma4_v5"])
def test_a_call_that_the_limit_cut_says_so(name: str) -> None:
    parser, _, _ = opened(name)
    text = sampled(name, said("", call(city="Oslo", days=3)))
    for length, is_cut in ((len(text) - 2, True), (len(text), False)):  # gpt-oss's ends without <|call|>
        raw = Message(role="assistant", content=text[:length])
        completion = Completion(
            message=raw, prompt_ids=(1,), token_ids=(1, 2), logprobs=(0.0, 0.0), finish_reason="length"
        )
        (last,) = parser.read_completion(completion).message.tool_calls
        assert ("the reply was cut at 2 tokens" in str(last.error)) == is_cut
        assert (last.name == "", bool(last.written)) == (is_cut, is_cut)


THOUGHTS_IN_CALLS = [
    ("qwen3", '<tool_call>{"name": "look"\n<think>SECRET</think>\nhello'),
    ("qwen3", "<tool_call>oops <think>SECRET</think></tool_call>hello"),
    ("qwen3", "<tool_call>oops <think>SECRET"),
    ("qwen3_8", "</think><tool_call><function=f>oops<think>SECRET</think></function></tool_call>"),
    ("glm4moe", "<tool_call>f<think>SECRET</think></tool_call>"),
    ("llama3_1", '{"name": "f", "parameters": {}} <think>SECRET</think> hello'),
    ("gemma4_v5", "<|tool_call>call:f{<|channel>thought\nSECRET<channel|>}<tool_call|>"),
    (
        "gptoss",
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|start|>assistant'
        "<|channel|>analysis<|message|>SECRET<|start|>assistant<|channel|>final<|message|>hello",
    ),
    ("muse_glimmer", ' to=f<|message|><atem:invoke name="f">x to=self<|message|>SECRET<|eom|></atem:invoke>'),
]


@pytest.mark.parametrize(("name", "text"), THOUGHTS_IN_CALLS)
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_thought_in_a_call_that_cannot_be_read_reaches_nobody(
    name: str, text: str, finish_reason: Any
) -> None:
    parser, _, _ = opened(name)
    raw = Completion(
        message=Message(role="assistant", content=text),
        prompt_ids=(1,),
        token_ids=(1,),
        logprobs=(0.0,),
        finish_reason=finish_reason,
    )
    message = parser.read_completion(raw).message
    assert any(each.error for each in message.tool_calls)
    sent = as_sent(message)
    assert sent.content
    assert "SECRET" not in f"{sent.content}{[each.error for each in message.tool_calls]}"
    assert ("hello" in sent.content) == ("hello" in text)


def test_types_of_arguments_that_are_written_as_text_come_from_the_tool_s_schema() -> None:
    parser, _, _ = opened("qwen3_8")
    values = {
        "text": ("3", {"type": "string"}, "3"),
        "maybe": ("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        "none": ("None", {"type": ["integer", "null"]}, None),
        "share": ("1e2", {"type": "number"}, 100.0),
        "whole": ("3.0", {"type": "integer"}, 3),
        "flag": ("True", {"type": "boolean"}, True),
        "one": ("1", {"type": "boolean"}, "1"),
        "wrong": ("three", {"type": "integer"}, "three"),
        "true": ("true", {"type": "integer"}, "true"),
        "items": ("[1]", {"type": "array"}, [1]),
        "deep": ("[" * 3000, {"type": "array"}, "[" * 3000),
        "unknown": ("[1]", {}, "[1]"),
        "odd": ("[1]", {"type": 3}, "[1]"),
        "several lines": ("\n a\n", {"type": "string"}, "\n a\n"),
    }
    written = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, (text, _, _) in values.items())
    text = f"</think><tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    properties = {name: schema for name, (_, schema, _) in values.items()}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    (typed,) = parser.read(text, tools=[tool]).tool_calls
    assert typed.arguments == {name: value for name, (_, _, value) in values.items()}
    for tools in ([], [{"name": "f"}], [{"name": "f", "parameters": {"properties": 3}}]):
        (untyped,) = parser.read(text, tools=tools).tool_calls
        assert untyped.arguments == {name: text for name, (text, _, _) in values.items()}


def test_control_tokens_are_dropped_wherever_they_are_left() -> None:
    parser, _, _ = opened("lfm2_v2")
    text = (
        "<think>a<|im_start|>b</think>c<|startoftext|> d<|tool_call_start|>"
        "[look<|im_end|>_up(x='e<|im_end|>f', y=['<|im_start|>g'])]<|tool_call_end|>"
    )
    message = parser.read(text)
    assert bare(message) == ("c d", "ab", [("look_up", {"x": "ef", "y": ["g"]})])
    assert parser.read(text, calls=False).content.startswith("c d[look_up(")


def test_a_tokenizer_s_own_response_template_comes_first() -> None:
    template = (
        "{% for message in messages %}{{ message.role + ':' + message.content }}"
        "{% for call in message.tool_calls or [] %}{{ '(call ' + call.function.name + ' ' }}"
        "{{ call.function.arguments | tojson + ')' }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    tokenizer = tokenizer_with(template=template)
    end, render = rendering(tokenizer)
    assert not choose_parser(tokenizer, end, render).reads_calls
    function = {"name": "{name}", "arguments": "{content}"}
    calls = {
        "open_pattern": r"\(call (?P<name>\w+) ",
        "close": ")",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": function},
    }
    fields = {"tool_calls": calls, "content": {"close_pattern": r"<\|end\|>\s*|$"}}
    tokenizer.hf.response_template = {"start_anchor": "assistant:", "fields": fields}
    parser = choose_parser(tokenizer, end, render)
    assert parser.reads_calls
    text = '<think>(call f {})</think>ok (call look_up {"city": "Oslo"}) (call g {)'
    content, reasoning, (good, bad) = bare(parser.read(text))
    assert (content, reasoning, good) == ("ok", "(call f {})", ("look_up", {"city": "Oslo"}))
    assert "is not JSON" in bad[1]
    tokenizer.hf.response_template = {"fields": {"content": {"open_pattern": "("}}}
    assert not choose_parser(tokenizer, end, render).reads_calls


@pytest.mark.parametrize(
    "name", ["glm4moe", "gemma4_v5", "lfm2_2_5", "qwen3_5_think", "nemotron_3_nano", "qwen3"]
)
def test_trl_s_own_tables_as_a_tokenizer_s_response_template(name: str) -> None:
    """Foreign templates are read by the same code: nothing raises, and what is certain only grows."""
    tokenizer = trl_tokenizer(name)
    add_response_schema(tokenizer.hf)
    end, render = rendering(tokenizer, tools_for(PLAIN))
    parser = choose_parser(tokenizer, end, render)
    assert parser.reads_calls
    for text in texts_of(name):
        stream_and_read(parser, text, [1])


FORMATS = {
    "hermes": "qwen3",
    "qwen3_5": "qwen3_8",
    "glm": "glm4moe",
    "llama3": "llama3_1",
    "harmony": "gptoss",
    "atem": "muse_glimmer",
    "gemma4": "gemma4_v5",
    "lfm2": "lfm2_v2",
    "lfm2_raw": "lfm2_2_5",
    "deepseek": "deepseekv3",
    "mistral": WITH_ID,
    "mistral_list": ONE_LIST,
}
"""A template that writes each format: one of TRL's, or how Mistral's writes calls."""
MARK = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|`+\w*|\w+=")
"""What formats are made of; the rest of a reply is words, quotes and brackets."""


def format_of(name: str) -> tuple[ReplyParser, str, list[str]]:
    """Its parser, a call as its template writes it, and all of its marks, control tokens among them."""
    reply = said("", call(city="Oslo", items=["a"]), reasoning="Oh <well>.")
    if name.startswith("mistral"):
        parser, render = mistral(FORMATS[name])
        text, tokens = render(reply), ("[/INST]",)
    else:
        parser, _, _ = opened(FORMATS[name])
        text, tokens = sampled(FORMATS[name], reply), specials(FORMATS[name])
    assert [each.name for each in parser.read(text).tool_calls] == ["look_up"]
    known = {
        *MARK.findall(text),
        *tokens[-8:],
        *(token for token in tokens if token in text),
        "to=",
        "</think>",
    }
    return parser, text, sorted({*known, *"a {[(\"',\n\\"})


def seconds_of(parser: ReplyParser, text: str) -> float:
    """Of this process, for what an agent does with a reply."""
    raw = Completion(
        message=Message(role="assistant", content=text),
        prompt_ids=(1,),
        token_ids=(1,),
        logprobs=(0.0,),
        finish_reason="length",
    )
    start = time.process_time()
    parser.read_completion(raw)
    return time.process_time() - start


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Of garbage: they take time that is not the reader's."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("num_marks", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.first(1)
def test_replies_that_repeat_themselves_take_time_in_proportion(
    name: str, num_marks: int, no_collections: None
) -> None:
    parser, text, marks = format_of(name)
    at = text.index("Oslo") + 2
    named = text.index("look_up") + 4

    def replies(part: str, size: int) -> list[str]:
        many = part * (size // len(part) + 1)
        begun = "" if parser.begins_in is None else "</think>"
        return [text[:at] + many + text[at:] + many, text[:named] + many + text[named:], begun + many + text]

    for part in map("".join, itertools.permutations(marks, num_marks)):
        for number, reply in enumerate(replies(part, 6000)):
            if seconds_of(parser, reply) < 0.02:
                continue
            short = seconds_of(parser, replies(part, 25_000)[number])
            assert short < 1, f"{part!r} in 25,000 characters takes {short:.1f} s"
            long = min(seconds_of(parser, replies(part, 100_000)[number]) for _ in range(3))
            is_quick = long < 0.3
            assert is_quick or long < 8 * short, (  # in proportion to the square it would be 16
                f"{part!r}: {short:.2f} s become {long:.2f} s in four times as many"
            )


def test_every_format_is_tried_with_replies_that_repeat_themselves() -> None:
    assert {*FORMATS} == {"hermes", *response_templates()}


@pytest.mark.parametrize(
    ("name", "before", "part", "behind"),
    [
        ("glm", "<tool_call>f", "<arg_key></arg_key><arg_value>", "</tool_call>"),
        ("glm", "<tool_call>f", "<arg_key>", "</tool_call>"),
        ("qwen3_5", "</think><tool_call><function=f>", "<parameter=a>", "</tool_call>"),
        ("qwen3_5", "</think><tool_call><function=f>", "<parameter=a></parameter>x", "</tool_call>"),
        ("atem", "", "to=", ""),
        ("atem", '<atem:invoke name="f">', '<atem:parameter name="a">', "</atem:invoke>"),
        ("harmony", "", "to=", " to=functions.f<|channel|>commentary json<|message|>{}"),
        ("harmony", "<|channel|>commentary to=", "a", "<|end|><|message|>"),
        ("deepseek", "</think><\uff5ctool▁call▁begin\uff5c>", " ", "``<\uff5ctool▁call▁end\uff5c>"),
    ],
)
def test_the_longest_replies_are_read_at_once(
    name: str, before: str, part: str, behind: str, no_collections: None
) -> None:
    parser, _, _ = format_of(name)
    for size in (25_000, 100_000):
        assert seconds_of(parser, before + part * (size // len(part)) + behind) < 0.3


@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("hermes", ""),
        pytest.param("hermes", "<think>", marks=pytest.mark.long),
        pytest.param("hermes", "<think>x</think>", marks=pytest.mark.long),
        ("harmony", ""),
        pytest.param("harmony", "<|channel|>", marks=pytest.mark.long),
        ("harmony", "<|channel|>analysis<|message|>"),
        pytest.param("harmony", " to=", marks=pytest.mark.long),
        pytest.param("atem", " to=", marks=pytest.mark.long),
        ("llama3", '{"name": "'),
        pytest.param("deepseek", "</think><\uff5ctool▁call▁begin\uff5c>", marks=pytest.mark.long),
    ],
)
@pytest.mark.first(1)
def test_what_32_000_tokens_say_is_told_as_they_come(name: str, begun: str, no_collections: None) -> None:
    parser, _, _ = format_of(name)
    for piece in ("word ", "word", "\n", "to=", "<"):
        stream = parser.stream()
        told: dict[str, list[str]] = {"content": [], "reasoning": []}
        start = time.process_time()
        for new in [begun, *[piece] * 32_000]:
            stream.add(new)
            for each, text in stream.delta().items():
                told[each].append(text)
        assert time.process_time() - start < 2
        stream.finish()
        for each, text in stream.delta().items():
            told[each].append(text)
        whole = parser.read(begun + piece * 32_000)
        assert "".join(told["content"]) == whole.content
        assert "".join(told["reasoning"]) == (whole.reasoning or "")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("llama3", '{"name": "f", "parameters": {"a": 1}, "status": "x"}', "'status' beside its name"),
        ("llama3", '{"name": "f", "arguments": {"a": 1}}', {"a": 1}),
        ("llama3", '{"name": "f", "args": {"a": 1}}', {"a": 1}),
        ("mistral_list", '[TOOL_CALLS][{"name": "f", "parameters": {"a": 1}, "id": "123456789"}]', {"a": 1}),
        ("mistral_list", '[TOOL_CALLS][{"name": "f", "a": 1, "id": "123456789"}]', "'a' beside its name"),
    ],
)
def test_formats_with_the_name_in_the_json_lose_no_argument(name: str, text: str, wanted: object) -> None:
    parser, _, _ = format_of(name)
    (read,) = parser.read(text).tool_calls
    assert read.arguments == wanted if isinstance(wanted, dict) else str(wanted) in str(read.error)


def test_a_foreign_response_template_loses_no_argument_either() -> None:
    tokenizer = trl_tokenizer("qwen3")
    add_response_schema(tokenizer.hf)
    end, render = rendering(tokenizer, tools_for(PLAIN))
    parser = choose_parser(tokenizer, end, render)
    text = '<tool_call>{"name": "f", "KEY": {"a": 1}}</tool_call>'
    (read,) = parser.read(text.replace("KEY", "parameters")).tool_calls
    assert read.arguments == {"a": 1}
    (lost,) = parser.read(text.replace("KEY", "status")).tool_calls
    assert "'status' beside its name" in str(lost.error)
