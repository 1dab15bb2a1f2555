"""Grammars of replies: what they let through is what the template writes and the parser reads back."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import OUR_CHATML, TRL_WITH_TOOLS, chosen, trl_template, trl_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stateset_agents.backends.grammars import grammars_of, library_version
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.chat.plain_template import PlainTemplate
from stateset_agents.core.chat.reply_grammar import AnswerFormat, ReplyGrammar
from stateset_agents.core.chat.template import ChatTemplate, JinjaTemplate
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall


def tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ORDER = {"type": "string", "pattern": "^[A-Z][0-9]{2}$"}
TOOLS = [
    tool("get_order", ["order_id"], order_id=ORDER),
    tool(
        "find",
        ["n"],
        n={"type": "integer", "minimum": 0, "maximum": 99},
        kind={"enum": ["a", "b"]},
        exact={"type": "boolean"},
        tags={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        note={"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
    ),
]
IN_SUITE = ("qwen3", "gptoss", "gemma4", "lfm2_2_5")


def written(
    template: ChatTemplate, constraint: Constraint, dice: random.Random, most: int = 700
) -> str | None:
    """A reply that the grammar lets through, drawn token by token; None where it has no end in `most`."""
    matcher, ids = grammars_of(template.tokenizer).matcher(constraint), []
    while len(ids) < most:
        mask = matcher.allowed()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        ends = [id for id in allowed if id in template.stop_ids or template.tokenizer.piece(id) in "<\n"]
        id = dice.choice(ends) if ends and dice.random() < 0.3 else dice.choice(allowed)
        if id in template.stop_ids:
            skips = template.parser.skip_special_tokens
            return template.tokenizer.decode(ids) if skips else template.tokenizer.decode_markup(ids)
        matcher.advance(id)
        ids.append(id)
    return None


def admits(template: JinjaTemplate, constraint: Constraint, text: str) -> bool:
    """True if the grammar lets a reply's text through and then an end."""
    matcher = grammars_of(template.tokenizer).matcher(constraint)
    for id in [*template.tokenizer.encode_markup(text), template.stop_ids[0]]:
        if not int(matcher.allowed()[id // 32]) >> id % 32 & 1:
            return False
        matcher.advance(id)
    return True


def fits(arguments: Any, name: str) -> bool:
    if name == "get_order":
        return set(arguments) == {"order_id"} and len(arguments["order_id"]) == 3
    checks = {
        "n": lambda value: type(value) is int and 0 <= value <= 99,
        "kind": lambda value: value in ("a", "b"),
        "exact": lambda value: isinstance(value, bool),
        "tags": lambda value: isinstance(value, list) and len(value) <= 2,
        "note": lambda value: isinstance(value, str | int),
    }
    return "n" in arguments and all(checks[key](value) for key, value in arguments.items())


@pytest.mark.parametrize("name", chosen(IN_SUITE, TRL_WITH_TOOLS))
def test_a_required_call_is_one_that_the_parser_reads(name: str) -> None:
    template = trl_template(name)
    constraint = ReplyGrammar.of(template).of_calls(TOOLS, "required")
    assert constraint.kind == "call"
    dice, read = random.Random(name), 0
    for _ in range(6):
        text = written(template, constraint, dice)
        if text is None:
            continue
        calls = template.parser.read(text, tools=TOOLS).tool_calls
        assert calls, text
        assert all(call.error is None and fits(call.arguments, call.name) for call in calls), text
        read += 1
    assert read >= 2


NOTE = [tool("note", ["text"], text={"type": "string"}, other={"type": "string"}, n={"type": "integer"})]
SPELLED = ("qwen3_5_think", "glm4moe", "gemma4", "lfm2_2_5", "muse_glimmer")
FREE_TEXTS = st.text(st.sampled_from("ab5 é<>/\\n'\"\\\\&") | st.characters(codec="utf-8"), max_size=12)


@pytest.mark.parametrize("name", chosen(SPELLED, TRL_WITH_TOOLS))
@given(text=FREE_TEXTS, other=st.none() | FREE_TEXTS, n=st.none() | st.integers(0, 99))
@example(text="one\ntwo </param\n</parameter", other="", n=None)
def test_free_text_ends_where_the_parser_ends_it(
    name: str, text: str, other: str | None, n: int | None
) -> None:
    """Whatever of the template's own calls the grammar lets through is read back as it was."""
    template = trl_template(name)
    arguments = {
        key: value for key, value in {"text": text, "other": other, "n": n}.items() if value is not None
    }
    call = ToolCall(name="note", arguments=arguments)
    constraint = ReplyGrammar.of(template).of_calls(NOTE, "note", parallel=False)
    rendered = template.render_reply(Message(role="assistant", content="", tool_calls=(call,)))
    if admits(template, constraint, rendered):
        (read,) = template.parser.read(rendered, tools=NOTE).tool_calls
        assert (read.error, read.arguments) == (None, arguments)
    else:
        said = f"{text}{other or ''}"
        assert not (said.isascii() and said.isalnum())  # only JSON's and Python's own escapes are left out


@pytest.mark.parametrize("name", chosen(IN_SUITE[:1], TRL_WITH_TOOLS))
def test_a_named_tool_is_the_one_that_is_called(name: str) -> None:
    template = trl_template(name)
    constraint = ReplyGrammar.of(template).of_calls(TOOLS, "get_order", parallel=False)
    text = written(template, constraint, random.Random(1))
    assert text is not None
    (call,) = template.parser.read(text, tools=TOOLS).tool_calls
    assert (call.name, call.error) == ("get_order", None)


WITH_OPENER = [name for name in TRL_WITH_TOOLS if not name.startswith(("gptoss", "llama3", "muse_glimmer"))]
"""Templates in whose replies a fixed text begins a call."""
ORDINARY = "chatml without control tokens"
"""The name, in a test's id, of a tokenizer to which `<tool_call>` is text like any other, as to SmolLM2's."""


def template_named(name: str) -> JinjaTemplate:
    if name != ORDINARY:
        return trl_template(name)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    ends = [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    raw.add_special_tokens(ends)
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=OUR_CHATML)
    return JinjaTemplate(HuggingFaceTokenizer(hf), allow_hidden_tools=True)


@pytest.mark.parametrize("name", [ORDINARY, *chosen(("qwen3",), WITH_OPENER)])
def test_a_call_that_fits_its_limit_is_let_through(name: str) -> None:
    """With words allowed as well, whatever room is left behind it."""
    template = template_named(name)
    grammar = ReplyGrammar.of(template)
    constraint = grammar.of_calls(TOOLS, "auto")
    call = ToolCall(name="get_order", arguments={"order_id": "W12"})
    text = template.render_reply(Message(role="assistant", content="", tool_calls=(call,)))
    length = len(template.tokenizer.encode_markup(text)) + 1
    assert admits(template, constraint, text)
    for room in (4, 8, 16, 32, 64, 100):
        assert admits(template, replace(constraint, limit=length + room), text), room


@pytest.mark.parametrize("name", [ORDINARY, *chosen(("qwen3",), WITH_OPENER)])
def test_words_stand_before_a_call_and_hold_none(name: str) -> None:
    template = template_named(name)
    constraint = ReplyGrammar.of(template).of_calls(TOOLS, "auto")
    call = ToolCall(name="get_order", arguments={"order_id": "W12"})
    text = template.render_reply(Message(role="assistant", content="Let me look.", tool_calls=(call,)))
    if "Let me look." not in text.partition(constraint.opener)[0]:
        return  # some templates write words behind the call
    assert admits(template, constraint, text)
    assert not admits(template, constraint, text.replace("Let me look.", f"see {constraint.opener} and"))


def test_words_may_hold_the_marker_s_beginning_and_no_call_that_is_not_one() -> None:
    template = trl_template("qwen3")
    grammar = ReplyGrammar.of(template)
    matcher = grammars_of(template.tokenizer).matcher(grammar.of_calls(TOOLS, "auto"))
    for id in template.tokenizer.encode("see <tool_cal"):
        matcher.advance(id)
    marker = template.tokenizer.encode_markup("<tool_call>")
    assert len(marker) == 1  # a control token, which no words can write
    none = grammars_of(template.tokenizer).matcher(grammar.of_calls(TOOLS, "none")).allowed()
    assert not int(none[marker[0] // 32]) >> marker[0] % 32 & 1


def test_the_forced_text_of_a_call_is_the_template_s_own() -> None:
    """Tokens of a marker as well: a model never sees another spelling than it was shown."""
    template = trl_template("qwen3")
    fixed = [tool("ping", ["to"], to={"enum": ["me"]})]
    text = written(
        template, ReplyGrammar.of(template).of_calls(fixed, "ping", parallel=False), random.Random(0)
    )
    call = ToolCall(name="ping", arguments={"to": "me"})
    assert text is not None
    assert (
        text.rpartition("</think>")[2].strip()
        == template.render_reply(Message(role="assistant", content="", tool_calls=(call,)))
        .rpartition("</think>")[2]
        .strip()
    )


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    grammar = ReplyGrammar.of(trl_template("qwen3"))
    with pytest.raises(
        ConfigurationError, match="tool_choice names 'nope', and the tools are: find, get_order"
    ):
        grammar.of_calls(TOOLS, "nope")
    with pytest.raises(ConfigurationError, match="tool_choice 'required' without tools"):
        grammar.of_calls([], "required")
    with pytest.raises(ConfigurationError, match="not"):
        grammar.of_calls([tool("f", ["x"], x={"not": {"type": "string"}})], "required")
    odd = tool("f", ["x"], x={"type": "string"})
    for parameters in ({"type": None}, {"type": 5}, {"properties": [1]}, {"properties": {"x": 5}}):
        function = {**odd["function"], "parameters": {"type": "object", **parameters}}
        with pytest.raises(ConfigurationError, match=r"tool 'f' (takes|has properties)"):
            grammar.of_calls([{**odd, "function": function}], "required")
    spelled = ReplyGrammar.of(trl_template("gemma4"))
    with pytest.raises(ConfigurationError, match="'x' has an object in its schema"):
        spelled.of_calls([tool("f", ["x"], x={"type": "object"})], "required")
    with pytest.raises(ConfigurationError, match="no fixed text begins a call"):
        ReplyGrammar.of(trl_template("llama3_1")).of_calls(TOOLS, "auto")


NOT_READ = [
    ("qwen3", 'a"b', "x"),
    ("qwen3", "a\nb", "x"),
    ("qwen3", "<|im_end|>", "x"),
    ("gptoss", "a b", "x"),
    ("gemma4", "a b", "x"),
    ("gemma4", "f", "a:b"),
    ("lfm2_2_5", "f", "a b"),
    ("qwen3_5_think", "f", "a>b"),
    ("muse_glimmer", "f", 'a"b'),
]


@pytest.mark.parametrize(("name", "called", "argument"), NOT_READ)
def test_names_that_the_parser_would_not_read_back_are_refused(name: str, called: str, argument: str) -> None:
    grammar = ReplyGrammar.of(trl_template(name))
    with pytest.raises(ConfigurationError, match="cannot be read back in this chat template: rename"):
        grammar.of_calls([tool(called, [argument], **{argument: {"type": "string"}})], "required")


def test_names_need_not_be_ascii_where_a_template_escapes_them() -> None:
    template = PlainTemplate(tiny_tokenizer())
    called = [tool("größe", ["maß"], maß={"enum": ["ä"]})]
    text = written(template, ReplyGrammar.of(template).of_calls(called, "größe"), random.Random(0))
    (call, *_) = template.parser.read(str(text), tools=called).tool_calls
    assert (call.name, call.arguments, call.error) == ("größe", {"maß": "ä"}, None)


@pytest.mark.parametrize("value", ["</tool_call>", "<|im_end|>"])
def test_a_schema_may_name_a_marker_and_no_control_token_is_written(value: str) -> None:
    template = trl_template("qwen3")
    marked = [tool("f", ["x"], x={"enum": [value]})]
    constraint = ReplyGrammar.of(template).of_calls(marked, "f", parallel=False)
    text = written(template, constraint, random.Random(0))
    assert text is not None
    (call,) = template.parser.read(text, tools=marked).tool_calls
    assert (call.error, call.arguments) == (None, {"x": value})


N = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}


@pytest.mark.parametrize(
    "parameters", [{"$ref": "#/$defs/n", "$defs": {"n": N}}, {"anyOf": [N, N]}, {"allOf": [N]}]
)
def test_arguments_may_be_described_elsewhere(parameters: dict[str, Any]) -> None:
    template = trl_template("qwen3")
    described = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    constraint = ReplyGrammar.of(template).of_calls(described, "f", parallel=False)
    call = ToolCall(name="f", arguments={"n": 1})
    assert admits(
        template, constraint, template.render_reply(Message(role="assistant", content="", tool_calls=(call,)))
    )


def test_arguments_described_elsewhere_are_refused_where_they_are_no_json() -> None:
    described = {"type": "function", "function": {"name": "f", "parameters": {"anyOf": [N, N]}}}
    with pytest.raises(ConfigurationError, match="'parameters' has anyOf in its schema"):
        ReplyGrammar.of(trl_template("gemma4")).of_calls([described], "required")


def test_what_no_reply_fits_is_refused_before_one_is_sampled() -> None:
    grammar = ReplyGrammar.of(trl_template("qwen3"))
    with pytest.raises(ConfigurationError, match="llguidance cannot follow"):
        grammar.of_words(AnswerFormat(schema={"$ref": "#"}))
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(ConfigurationError, match="llguidance cannot follow"):
        grammar.of_words(AnswerFormat(schema=endless))
    text = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    with pytest.raises(ConfigurationError, match="tool 'f' takes 'string': give it the type object"):
        grammar.of_calls(text, "required")


def test_what_is_kept_of_grammars_is_bounded_by_their_text() -> None:
    """Else a server's clients, each with large schemas of its own, would fill its memory."""
    tokenizer = trl_tokenizer("qwen3")
    grammars = grammars_of(tokenizer)
    for number in range(12):
        listed = {"enum": [f"{number} {'x' * 1000} {value}" for value in range(600)]}
        constraint = Constraint(
            grammar=f"start: %json {json.dumps(listed)}",
            kind="json",
            stop_ids=(0,),
            version=library_version(),
        )
        grammars.matcher(replace(constraint, limit=9)).allowed()
    kept = grammars._compile.cache_info().currsize, grammars._closer.cache_info().currsize
    assert max(kept) <= 7
    assert grammars._texts.cache_info().misses == 1  # of the vocabulary, not of each grammar


def test_json_answers_are_laid_out_as_json_dumps_does() -> None:
    """A model may else write line breaks until it is cut."""
    template = trl_template("qwen3")
    answer = AnswerFormat(schema={**N, "additionalProperties": False})
    assert accepts(template, answer, '{"n": 1}')
    for text in ('{\n"n": 1}', '{"n":\n1}', '{"n": 1\n}', '{"n":  1}'):
        assert not accepts(template, answer, text), text


def test_json_answers_are_of_the_schema() -> None:
    template = trl_template("llama3_1")
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    texts = {
        written(template, ReplyGrammar.of(template).of_words(AnswerFormat(schema=schema)), random.Random(k))
        for k in range(6)
    }
    assert texts == {'{"n": 1}', '{"n": 2}'}  # no white space of the model's own


FORMATS = [
    (
        AnswerFormat(thinks=True, between=("<answer>", "</answer>")),
        "<think> {} </think> <answer> {} </answer>",
    ),
    (AnswerFormat(thinks=True), "<think>{}</think>{}"),
    (AnswerFormat(between=("```python\n", "\n```")), "```python\n{}{}\n```"),
    (AnswerFormat(thinks=True, schema={"type": "integer"}), "<think>{}</think>\n\n{}"),
]


def accepts(template: JinjaTemplate, answer: AnswerFormat, text: str) -> bool:
    """True if the grammar lets the text through and then an end."""
    matcher = grammars_of(template.tokenizer).matcher(ReplyGrammar.of(template).of_words(answer))
    thought, mark, words = text.rpartition("</think>")  # words are ordinary text
    ids = [*template.tokenizer.encode_markup(thought + mark), *template.tokenizer.encode(words)]
    for id in [*ids, template.stop_ids[0]]:
        if not int(matcher.allowed()[id // 32]) >> id % 32 & 1:
            return False
        matcher.advance(id)
    return True


def embedded_template(name: str) -> JinjaTemplate:
    """Of a tokenizer with a joiner, which rewrites text."""
    from transformers import AutoTokenizer

    from stateset_agents import embedded
    from stateset_agents.backends.tokenizers import HuggingFaceTokenizer

    hf = AutoTokenizer.from_pretrained(Path(embedded.__file__).with_name(name))
    return JinjaTemplate(HuggingFaceTokenizer(hf), hf.chat_template)


@pytest.mark.parametrize(("answer", "text"), FORMATS)
def test_a_thought_and_an_answer_are_asked_for_by_the_grammar(answer: AnswerFormat, text: str) -> None:
    for template in (trl_template("qwen3"), trl_template("qwen2_5"), embedded_template("reasoner")):
        assert accepts(template, answer, text.format("3 + 4 < 8", "12"))
        assert not accepts(template, answer, text.format("3 + 4", "12")[:7])
        assert not accepts(template, answer, "12")
        if answer.thinks:
            assert not accepts(template, answer, text.format("a <answer> 3 </answer> b", "12"))
            # Any white space before the thought, and a model could write it until it is cut.
            assert accepts(template, answer, "\n\n" + text.format("3", "12"))
            assert not accepts(template, answer, "\n" * 5 + text.format("3", "12"))


def test_a_schema_and_a_frame_are_not_both_kept() -> None:
    with pytest.raises(ConfigurationError, match="leave answer_schema or answer_between out"):
        AnswerFormat(schema={}, between=("(", ")"))


def test_a_tokenizer_with_a_joiner_keeps_to_calls_and_to_json() -> None:
    template = embedded_template("desk")
    grammar = ReplyGrammar.of(template)
    read = 0
    for seed in range(12):
        text = written(template, grammar.of_calls(TOOLS, "required"), random.Random(seed))
        if text is not None:
            calls = template.parser.read(text, tools=TOOLS).tool_calls
            assert calls, text
            assert all(call.error is None and fits(call.arguments, call.name) for call in calls), text
            read += 1
    assert read >= 6
    bound = ReplyGrammar.of(template).of_words(AnswerFormat(schema={"enum": ["status", "cancel"]}))
    for seed in range(30):  # joiners write nothing: a reply of these alone would never end
        assert written(template, bound, random.Random(seed), most=20) in ('"status"', '"cancel"')
    for text in ('{"order_id": "W12"}', '{"order_id": ""}', '{"order_id": "$5 (x"}', '{"order_id": " zq"}'):
        schema = {"type": "object", "properties": {"order_id": {"type": "string"}}}
        assert accepts(template, AnswerFormat(schema=schema), text), text
    assert not accepts(template, AnswerFormat(schema=schema), '{"order_id": 12}')
