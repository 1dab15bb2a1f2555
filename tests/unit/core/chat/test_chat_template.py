"""Templates append: prompt, replies and deltas laid end to end are what the template renders as a whole."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import (
    ALL_NAMES,
    CHATML,
    FAMILIES,
    NOT_APPENDING,
    OURS,
    QWEN,
    REWRITING,
    TRL_WITH_HIDDEN_TOOLS,
    TRL_WITH_TOOLS,
    TRL_WITHOUT_TOOLS,
    family_tokenizer,
    tokenizer_with,
    trl_template,
    trl_tokenizer,
)
from tiny_models import tiny_tokenizer
from tokenizers import AddedToken

from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.chat import template as chat_template
from stateset_agents.core.chat.replies.parsing import parse_reply
from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}


def said(role: Any, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


def whole(tokenizer: HuggingFaceTokenizer, *messages: Message, tools: Any = None) -> list[int]:
    """What the template alone makes of a conversation."""
    ids = tokenizer.hf.apply_chat_template(
        [message.to_openai() for message in messages],
        tools=tools,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return [int(id) for id in ids]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama2"])
def test_deltas_laid_end_to_end_are_the_whole_rendering(name: str) -> None:
    tokenizer = family_tokenizer(name)
    template = JinjaTemplate(tokenizer)
    talk = [said("user", "hello\nthere"), said("assistant", "yes?"), said("user", "refund  K27, please")]
    if name != "gemma":
        talk.insert(0, said("system", "Be brief."))
    row = template.prompt(talk[:-2])
    row += [*tokenizer.encode("yes?"), *template.delta(talk[-1:])]
    assert row == whole(tokenizer, *talk)
    row += [*tokenizer.encode("done"), *template.delta([said("user", "bye")])]
    assert row == whole(tokenizer, *talk, said("assistant", "done"), said("user", "bye"))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
def test_tool_results_are_deltas_too(name: str) -> None:
    tokenizer = family_tokenizer(name)
    template = JinjaTemplate(tokenizer, allow_hidden_tools=True)
    opening = said("user", "look it up")
    results = [said("tool", '{"found": 1}', tool_call_id="a"), said("tool", "nothing", tool_call_id="b")]
    row = template.prompt([opening], [TOOL])
    row += [*tokenizer.encode("looking"), *template.delta(results)]
    assert row == whole(tokenizer, opening, said("assistant", "looking"), *results, tools=[TOOL])


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    calls: list[str] = []
    method = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls.append(name)
        return method(*args)

    monkeypatch.setattr(owner, name, counted)
    return calls


def test_remembered_deltas_are_those_of_their_own_template_and_messages() -> None:
    """The same words as user's and as tool's, of two tools, in one message and in two, after a call."""
    call = ToolCall(name="look", arguments={"at": "K27"})
    heard = [
        [said("user", "red")],
        [said("tool", "red", name="look")],
        [said("tool", "red", name="find")],
        [said("tool", "red", name="look", tool_call_id="call00001")],
        [said("user", "red"), said("user", "red")],
        [said("system", "red"), said("user", "red")],
        [said("user", "<|im_end|>")],
        [said("assistant", "", tool_calls=(call,)), said("tool", "red", name="look")],
    ]
    for name in ("chatml", "qwen", "ours"):
        tokenizer = family_tokenizer(name)
        template = JinjaTemplate(tokenizer, allow_hidden_tools=True)
        first = [template.delta(messages) for messages in heard]
        template.prompt([said("user", "look it up")], [TOOL])
        again = [template.delta(tuple(messages)) for messages in heard]
        assert again == first == [JinjaTemplate(tokenizer).delta(messages) for messages in heard]
        first[0].append(0)  # whoever goes on with a delta does not write in what is remembered
        assert template.delta(heard[0]) == again[0]


def test_a_template_remembers_a_bounded_number_of_short_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_NUM_DELTAS", 4)
    template = JinjaTemplate(family_tokenizer("chatml"))
    rendered = count_calls(monkeypatch, template._encoder, "encode")
    for number in (1, 2, 3, 4, 4, 3, 2, 1):
        template.delta([said("user", f"order {number}")])
    assert len(rendered) == 4
    template.delta([said("user", "order 5")])  # the one that was asked for longest ago makes room
    template.delta([said("user", "order 1")])
    assert len(rendered) == 5
    template.delta([said("user", "order 4")])
    assert len(rendered) == 6
    for _ in range(2):  # a long one is not kept
        template.delta([said("user", "x" * 2001)])
    assert len(rendered) == 8


def test_a_template_that_sets_replies_apart_by_spaces_is_fine() -> None:
    tokenizer = family_tokenizer("llama2")
    template = JinjaTemplate(tokenizer)
    talk = [said("system", "Brief."), said("user", "hi"), said("assistant", "yes"), said("user", "bye")]
    row = template.prompt(talk[:2])  # the space before a reply is the agent's to sample
    row += [*tokenizer.encode(" yes "), *template.delta(talk[3:])]
    assert row == whole(tokenizer, *talk)


def test_an_end_token_that_swallows_the_line_end_after_it_does_so_in_deltas_too() -> None:
    hf = tiny_tokenizer(bos=False).hf
    hf.add_tokens([AddedToken(text, special=True, rstrip=True) for text in ("<|im_start|>", "<|im_end|>")])
    hf.chat_template = CHATML
    tokenizer = HuggingFaceTokenizer(hf)
    template = JinjaTemplate(tokenizer)
    talk = [said("user", "hi"), said("assistant", "yes"), said("user", "bye")]
    row = [*template.prompt(talk[:1]), *tokenizer.encode("yes"), *template.delta(talk[2:])]
    assert row == whole(tokenizer, *talk)
    assert template.delta(talk[2:], end=template.end_id)[0] == hf.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_end_token_is_found_and_what_follows_it_is_environment_text(name: str) -> None:
    tokenizer, family = family_tokenizer(name), FAMILIES[name]
    template = JinjaTemplate(tokenizer)
    assert tokenizer.hf.convert_ids_to_tokens(template.end_id) == family.end
    after = tokenizer.encode(family.after_end)
    assert template.delta([said("user", "x")])[: 1 + len(after)] == [template.end_id, *after]
    eos = tokenizer.hf.eos_token_id
    assert template.stop_ids == ((template.end_id,) if template.end_id == eos else (template.end_id, eos))


def test_all_end_of_turn_ids_of_a_model_stop_a_turn() -> None:
    hf = tokenizer_with("<|im_start|>", "<|im_end|>", template=CHATML).hf
    im_end, user = hf.convert_tokens_to_ids(["<|im_end|>", "<|user|>"])
    template = JinjaTemplate(HuggingFaceTokenizer(hf, extra_eos_ids=[im_end, user]))
    assert template.stop_ids == (im_end, hf.eos_token_id, user)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_has_one_bos_or_none(name: str) -> None:
    template = JinjaTemplate(family_tokenizer(name))
    bos = 256
    assert template.prompt([said("user", "hi")]).count(bos) == int(FAMILIES[name].bos)
    assert template.delta([said("user", "hi")]).count(bos) == int(name == "llama2")  # one a turn, by design


def test_a_tokenizer_that_adds_a_bos_adds_none_to_what_the_template_wrote() -> None:
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", bos=True, template=CHATML)
    assert tokenizer.hf("hi").input_ids[0] == 256
    assert 256 not in JinjaTemplate(tokenizer).prompt([said("user", "hi")])


@pytest.mark.parametrize("how", REWRITING)
def test_a_template_that_rewrites_history_is_refused_with_its_cure(how: str) -> None:
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", "<think>", "</think>", template=REWRITING[how])
    with pytest.raises(ConfigurationError) as caught:
        JinjaTemplate(tokenizer)
    message = str(caught.value)
    assert "rewrites history" in message
    assert 'AgentConfig(chat_template="plain")' in message
    assert "\n" not in message


@pytest.mark.parametrize("how", NOT_APPENDING)
def test_a_template_that_shows_earlier_replies_otherwise_is_used(how: str) -> None:
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", template=NOT_APPENDING[how])
    template = JinjaTemplate(tokenizer)
    assert not template.appends
    row = template.prompt([said("user", "hi")])
    row += [*tokenizer.encode("yes"), *template.delta([said("user", "bye")])]
    assert template.goes_on([said("user", "hi")], said("assistant", "yes"), [said("user", "bye")]) == (
        whole(tokenizer, said("user", "hi"), said("assistant", "yes"), said("user", "bye")) == row
    )


def test_tools_that_move_to_the_last_user_message_rewrite_history_only_when_there_are_tools() -> None:
    moving = CHATML.replace(
        "{{ '<|im_start|>'", "{% if tools and loop.last %}{{ tools | tojson }}{% endif %}{{ '<|im_start|>'"
    )
    template = JinjaTemplate(tokenizer_with("<|im_start|>", "<|im_end|>", template=moving))
    assert template.prompt([said("user", "hi")])
    with pytest.raises(ConfigurationError, match="rewrites history"):
        template.prompt([said("user", "hi")], [TOOL])


def test_without_a_system_role_the_system_message_heads_the_first_user_message() -> None:
    tokenizer = family_tokenizer("gemma")
    template = JinjaTemplate(tokenizer)
    together = whole(tokenizer, said("user", "Be brief.\n\nhi"))
    assert template.prompt([said("system", "Be brief."), said("user", "hi")]) == together
    assert template.prompt([said("system", "Be brief.")]) == whole(tokenizer, said("user", "Be brief."))


def test_a_template_that_leaves_the_system_message_out_gets_it_with_the_user_s() -> None:
    silent = CHATML.replace("in messages %}", "in messages if message.role != 'system' %}")
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", template=silent)
    ids = JinjaTemplate(tokenizer).prompt([said("system", "Be brief."), said("user", "hi")])
    assert "Be brief." in tokenizer.decode(ids)


def test_a_default_system_message_stands_in_the_prompt_and_in_no_delta() -> None:
    tokenizer = family_tokenizer("qwen")
    template = JinjaTemplate(tokenizer)
    assert "You are helpful." in tokenizer.decode(template.prompt([said("user", "hi")]))
    assert "You are helpful." not in tokenizer.decode(template.delta([said("user", "hi")]))


def test_an_agent_s_own_text_is_the_template_s_where_given() -> None:
    tokenizer = family_tokenizer("qwen")
    template = JinjaTemplate(tokenizer, CHATML)
    assert "You are helpful." not in tokenizer.decode(template.prompt([said("user", "hi")]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "does not end an assistant"),
        (CHATML.replace("<|im_end|>", "###"), "does not end an assistant.*it ends with '###', in which the"),
        (CHATML + "{% if %}", "cannot be read"),
        ("{{ messages[0].content.nothing.at_all }}", "cannot render this conversation"),
        ("{{ messages[0].content + 1 }}", "cannot render this conversation"),
        ("{{ raise_exception('line one\nline two') }}", r"conversation \(line one line two\)"),
    ],
)
def test_a_template_that_cannot_work_is_refused_in_one_line(text: str, message: str) -> None:
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>")
    with pytest.raises(ConfigurationError, match=message) as caught:
        JinjaTemplate(tokenizer, text)
    assert "\n" not in str(caught.value)
    assert "AgentConfig" in str(caught.value)


def test_a_tokenizer_without_a_template_needs_one() -> None:
    with pytest.raises(ConfigurationError, match="no chat template to use"):
        JinjaTemplate(tiny_tokenizer())


@pytest.mark.parametrize("name", ["gemma", "llama2"])  # one raises on tool results, one leaves them out
def test_tools_need_a_template_that_shows_their_results(name: str) -> None:
    template = JinjaTemplate(family_tokenizer(name))
    with pytest.raises(ConfigurationError, match="no place for tool results; set AgentConfig"):
        template.prompt([said("user", "hi")], [TOOL])


def test_tools_need_a_template_whose_calls_can_be_read() -> None:
    odd = CHATML.replace("<tool_call>", "@call ").replace("</tool_call>", "@")
    template = JinjaTemplate(tokenizer_with("<|im_start|>", "<|im_end|>", template=odd))
    assert template.prompt([said("user", "hi")])
    with pytest.raises(ConfigurationError, match="a tool call as the chat template writes it cannot be read"):
        template.prompt([said("user", "hi")], [TOOL])


def test_a_template_that_names_no_tools_is_refused_unless_it_is_allowed() -> None:
    template = JinjaTemplate(family_tokenizer("chatml"))
    assert template.prompt([said("user", "hi")])
    for _ in range(2):
        with pytest.raises(ConfigurationError) as caught:
            template.prompt([said("user", "hi")], [TOOL])
        assert str(caught.value) == (
            "the chat template does not tell the model which tools there are; set "
            'AgentConfig(chat_template="chatml") or give a template that does, or, where the system prompt '
            "names them or the model knows them by heart, AgentConfig(allow_hidden_tools=True)"
        )
    allowed = JinjaTemplate(family_tokenizer("chatml"), allow_hidden_tools=True)
    assert allowed.prompt([said("user", "hi")], [TOOL]) == template.prompt([said("user", "hi")])


def test_the_cure_is_chatml_for_models_that_speak_it_and_plain_for_others() -> None:
    for name, cure in (("gemma", "plain"), ("llama2", "plain"), ("chatml", "chatml")):
        with pytest.raises(ConfigurationError, match=f'AgentConfig\\(chat_template="{cure}"\\)'):
            JinjaTemplate(family_tokenizer(name)).prompt([said("user", "hi")], [TOOL])


def test_roles_that_must_alternate_are_an_error_where_they_do_not() -> None:
    template = JinjaTemplate(family_tokenizer("gemma"))
    with pytest.raises(ConfigurationError, match="roles must alternate"):
        template.delta([said("user", "one"), said("user", "two")])


def test_calls_in_a_given_history_are_written_as_the_template_writes_them() -> None:
    tokenizer = family_tokenizer("qwen")
    call = ToolCall(name="look", arguments={"x": {"y": [1, None, "z"]}}, id="call_0_0")
    talk = [said("user", "hi"), said("assistant", "", tool_calls=(call,)), said("tool", "ok")]
    text = tokenizer.decode(JinjaTemplate(tokenizer).prompt(talk))
    assert '{"name": "look", "arguments": {"x": {"y": [1, null, "z"]}}}' in text


def test_the_same_opening_gives_the_same_ids_whoever_asked_in_between_and_changed_theirs() -> None:
    template = JinjaTemplate(family_tokenizer("qwen"))
    first, other = template.prompt([said("user", "a")], [TOOL]), template.prompt([said("user", "b")], [TOOL])
    again = template.prompt([said("user", "a")], [TOOL])
    assert again == first != other
    again.append(1)
    assert template.prompt([said("user", "a")], [TOOL]) == first != template.prompt([said("user", "a")])


def test_a_named_template_is_chosen_once_for_prompts_and_deltas() -> None:
    tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", "<tool_response>", "</tool_response>")
    tokenizer.hf.chat_template = {"default": CHATML, "tool_use": QWEN}  # type: ignore[assignment]  # several
    assert JinjaTemplate(tokenizer).text == CHATML
    assert JinjaTemplate(tokenizer, "tool_use").text == QWEN


# -------------------------------------------------------------- calls that nobody offered a tool for


STRAY = ToolCall(name="look", arguments={"at": "K27"}, id="call_0_0")
ERROR = "error: unknown tool 'look'; there are no tools here"
ANSWERS = {
    "one call": [said("tool", ERROR, tool_call_id="call_0_0", name="look")],
    "two calls": [
        said("tool", ERROR, tool_call_id="call_0_0", name="look"),
        said("tool", "error: the tool call is not JSON", tool_call_id="call_0_1", name=""),
    ],
    "a result and words": [said("tool", ERROR, tool_call_id="call_0_0", name="look"), said("user", "Hello?")],
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_real_template_tells_the_agent_what_a_stray_call_is_answered_with(
    name: str, answer: str
) -> None:
    template = trl_template(name)
    heard = template.tokenizer.decode(template.delta(ANSWERS[answer]))
    places = [heard.find(message.content) for message in ANSWERS[answer]]
    assert -1 < places[0] <= places[-1]
    assert -1 not in places


@pytest.mark.parametrize("name", TRL_WITHOUT_TOOLS)
def test_a_chat_with_a_stray_call_is_read_again_as_it_was_written(name: str) -> None:
    template = trl_template(name)
    talk = [
        said("user", "where is it"),
        said("assistant", "wait", tool_calls=(STRAY, parse_reply("<tool_call>look!").tool_calls[0])),
        *ANSWERS["two calls"],
        said("assistant", "I can't look."),
        said("user", "bye"),
    ]
    read = template.tokenizer.decode(template.prompt(talk))
    written = [
        "where is it",
        'wait<tool_call>{"name": "look", "arguments": {"at": "K27"}}</tool_call><tool_call>look!',
        f"tool: {ERROR}\n\ntool: error: the tool call is not JSON",
        "I can't look.",
        "bye",
    ]
    places = [read.find(text) for text in written]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("name", TRL_WITHOUT_TOOLS)
def test_tools_are_refused_where_a_template_has_no_place_for_their_results(name: str) -> None:
    template = trl_template(name)
    with pytest.raises(ConfigurationError, match=r"no place for tool results; .* leave tools out"):
        template.prompt([said("user", "x")], [TOOL])


@pytest.mark.parametrize("name", [*TRL_WITH_TOOLS, *TRL_WITH_HIDDEN_TOOLS, *OURS])
def test_a_template_shows_the_tools_or_is_refused(name: str) -> None:
    shown = trl_template(name).tokenizer.decode(trl_template(name).prompt([said("user", "x")], [TOOL]))
    assert ("Looks." in shown) == (name not in TRL_WITH_HIDDEN_TOOLS)
    if name in TRL_WITH_HIDDEN_TOOLS:
        with pytest.raises(ConfigurationError, match="does not tell the model which tools there are"):
            JinjaTemplate(trl_tokenizer(name)).prompt([said("user", "x")], [TOOL])
