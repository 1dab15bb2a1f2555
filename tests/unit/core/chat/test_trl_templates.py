"""Every template that TRL ships, and ours: what is taken and refused, and ragged talks laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import (
    ALL_NAMES,
    IN_SUITE,
    OURS,
    TRL_APPENDING,
    TRL_NAMES,
    TRL_WITH_HIDDEN_TOOLS,
    TRL_WITH_TOOLS,
    TRL_WITH_UNSTABLE_TOOLS,
    TRL_WITHOUT_TOOLS,
    chosen,
    trl_template,
)

from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.errors import ConfigurationError, ConversationRefused
from stateset_agents.types.messages import Message, ToolCall

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}},
    },
}
USER = Message(role="user", content="where is K27?")


def said(content: str = "", thought: str | None = None, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=content, reasoning=thought, tool_calls=calls)


def heard(*contents: str) -> list[Message]:
    """Results of the calls of a reply, in order."""
    return [
        Message(role="tool", content=content, name="look", tool_call_id=f"call_0_{number}")
        for number, content in enumerate(contents)
    ]


def user(content: str) -> list[Message]:
    return [Message(role="user", content=content)]


CALL = ToolCall(name="look", arguments={"at": "K27", "times": 2}, id="call_0_0")
SECOND = ToolCall(name="look", arguments={"at": ["K28"]}, id="call_0_1")
BROKEN = ToolCall(name="", id="call_0_0", error="the tool call is not JSON", written="<tool_call>look!")
ODD = ToolCall(name="look <|im_end|>", arguments={"<|im_start|>": None}, id="call_0_0")
TALKS: dict[str, list[tuple[Message, list[Message]]]] = {
    "words": [(said("yes?"), user("hello")), (said("yes"), user("bye"))],
    "thoughts": [
        (said("yes?", "so"), user("hello")),
        (said("well", ""), user("hm")),
        (said("yes", "so"), user("bye")),
    ],
    "tool rounds": [
        (said("", None, CALL), heard("found")),
        (said("", "again", CALL), heard("found again")),
        (said("It is there.", "two times"), user("thanks")),
        (said("Welcome."), user("bye")),
    ],
    "words beside a call": [(said("I look.", "so", CALL), heard("found")), (said("There."), user("bye"))],
    "two calls": [(said("", None, CALL, SECOND), heard("found", "lost")), (said("One."), user("bye"))],
    "calls that cannot be read": [
        (said("wait", "so", BROKEN), heard("error: no JSON")),
        (said("", None, CALL, BROKEN), heard("found", "error: no JSON")),
        (said("", None, ODD), heard("error: unknown tool")),
        (said("I can't."), user("bye")),
    ],
    "a call that a user answers": [
        (said("", None, CALL), user("stop")),
        (said("", None, BROKEN), user("bye")),
    ],
    "cut replies": [
        (said("", "I thi"), user("go on")),
        (said(), user("go on")),
        (said("<think>I"), user("bye")),
    ],
    "control tokens": [
        (said("<|im_end|> </think> x", "<|end|></think>"), user("<|im_start|>system <turn|>"))
    ],
}


def squeezed(ids: Sequence[int], template: JinjaTemplate) -> str:
    return "".join(str(template.tokenizer.hf.decode(ids)).split())


def offered(name: str) -> list[dict[str, Any]]:
    return [] if name in {*TRL_WITHOUT_TOOLS, *TRL_WITH_UNSTABLE_TOOLS} else [LOOK]


def test_every_template_is_listed_once() -> None:
    listed = [*TRL_WITHOUT_TOOLS, *TRL_WITH_UNSTABLE_TOOLS, *TRL_WITH_HIDDEN_TOOLS, *TRL_WITH_TOOLS]
    assert sorted(listed) == sorted(TRL_NAMES)
    assert len(TRL_NAMES) == 72
    assert len(TRL_WITH_TOOLS) + len(TRL_WITH_HIDDEN_TOOLS) == 54


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_is_taken_or_refused_as_listed(name: str) -> None:
    template = trl_template(name)
    assert template.appends == (name in (*TRL_APPENDING, *OURS))
    assert template.prompt([USER])
    if offered(name):
        assert (
            "Looks." in squeezed(template.prompt([USER], [LOOK]), template) or name in TRL_WITH_HIDDEN_TOOLS
        )
        return
    why = "no place for tool results"
    if name in TRL_WITH_UNSTABLE_TOOLS:
        why = (
            r"rewrites history \(its frame of tool depends on what stood before: .*out"
            r".*, or leave tools out$"
        )
    with pytest.raises(ConfigurationError, match=why):
        template.prompt([USER], [LOOK])


@pytest.mark.parametrize("name", chosen(IN_SUITE, ALL_NAMES))
def test_ragged_talks_are_prompt_reply_and_delta_wherever_the_template_goes_on(name: str) -> None:
    template, tools = trl_template(name), offered(name)
    for talk in TALKS.values():
        shown: list[Message] = [Message(role="system", content="Be brief."), USER]
        for reply, following in talk:
            row = squeezed(template.prompt(shown, tools), template)
            delta = template.delta(following, [call for call in reply.tool_calls if call.error is None])
            longer = [*shown, reply, *following]
            told, after = squeezed(template.prompt(longer, tools), template), squeezed(delta, template)
            for text, messages in ((told, longer), (after, following)):
                places = [text.find("".join(m.content.split())) for m in messages if not m.tool_calls]
                assert -1 not in places
            if template.goes_on(shown, reply, following, tools):
                assert told.startswith(row)
                assert told.endswith(after)
                between = told[len(row) : len(told) - len(after)]
                parts = [
                    reply.reasoning or "",
                    reply.content,
                    *(call.name or call.written for call in reply.tool_calls),
                ]
                assert all("".join(part.split()) in between for part in parts)
                if reply.reasoning is None:
                    assert between.startswith("".join(reply.content.split()))
                    assert not between.startswith("<think></think>")
            shown = longer


ROWS = {  # of: thought and call, thought and words, words, thought and words, thought and words
    "chatml": 1,
    "qwen2_5": 1,
    "qwen3_instruct_2507": 1,
    "llama3_1": 2,  # it shows no words and no thoughts beside a call
    "muse_glimmer": 2,  # frames words, too; whether the model did, its message cannot tell
    "qwen3_8": 2,  # an empty thought before words
    "qwen3_training": 2,
    "qwen3": 3,
    "gemma4_v5": 3,
    "lfm2_2_5": 3,
    "qwen3_5_think": 4,
    "qwen3_6": 4,
    "nemotron_3_nano": 4,
    "glm4moe": 4,
    "gptoss": 4,  # what ends a reply is not what stands between two
}


@pytest.mark.parametrize("name", ROWS)
def test_a_talk_goes_on_until_a_thought_is_dropped(name: str) -> None:
    template = trl_template(name)
    shown, rows = [USER], 1
    for reply, following in [
        (said("", "I look.", CALL), heard("found")),
        (said("There.", "found"), user("thanks")),
        (said("Welcome."), user("and K28?")),
        (said("Unknown.", "never seen"), user("bye")),
    ]:
        rows += not template.goes_on(shown, reply, following, [LOOK])
        shown += [reply, *following]
    assert rows == ROWS[name]


def token(template: JinjaTemplate, text: str) -> int:
    return int(template.tokenizer.hf.convert_tokens_to_ids(text))


def text_of(template: JinjaTemplate, ids: Sequence[int]) -> str:
    return str(template.tokenizer.hf.decode(ids))


def test_an_empty_thought_that_was_said_is_not_inserted() -> None:
    template = trl_template("glm4moe")
    for thought, goes_on in ((None, False), ("", True)):
        assert template.goes_on([USER], said("yes", thought), user("bye")) is goes_on


@pytest.mark.parametrize("name", ["gptoss", "gptoss_training", "qwen2_5"])
def test_a_tool_needs_no_description(name: str) -> None:
    function: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    template = trl_template(name)
    text = text_of(template, template.prompt([USER], [{"type": "function", "function": function}]))
    if name == "qwen2_5":
        assert '"name": "look", "parameters"' in text  # it stays as it is where the template can do without
    else:
        assert "// \ntype look = () => any;" in text


def test_gpt_oss_ends_turns_by_other_tokens_than_stand_between_them() -> None:
    template = trl_template("gptoss")
    assert template.stop_ids[:2] == (token(template, "<|return|>"), token(template, "<|call|>"))
    assert template.end_id == token(template, "<|end|>")
    assert template.end_id not in template.stop_ids  # it closes a thought, too
    after = text_of(template, template.delta(user("hi")))
    assert after.startswith("<|end|><|start|>user<|message|>hi<|end|>")
    after = text_of(template, template.delta(heard("found"), [CALL]))
    assert after.startswith("<|call|><|start|>functions.look to=assistant<|channel|>commentary<|message|>")
    talk = [USER], said("", None, CALL), heard("found")
    sampled = template.tokenizer.encode_markup(template.render_reply(said("", None, CALL)))
    assert template.goes_on(*talk, [LOOK], sampled=[*sampled, token(template, "<|call|>")])
    assert not template.goes_on(*talk, [LOOK], sampled=[*sampled, template.end_id])


def test_glm_ends_a_turn_by_the_next_role_s_opener() -> None:
    template = trl_template("glm4moe")
    opener, observation = token(template, "<|user|>"), token(template, "<|observation|>")
    assert template.end_id == opener
    assert set(template.stop_ids) == {opener, observation, template.tokenizer.hf.eos_token_id}
    plain = template.delta(user("hi"), end=opener)
    assert text_of(template, plain) == "\nhi<|assistant|>"
    assert template.delta(user("hi")) == [opener, *plain]
    assert template.delta(user("hi"), end=template.tokenizer.hf.eos_token_id) == [opener, *plain]
    found = template.delta(heard("found"), [CALL], end=observation)
    assert text_of(template, found) == "\n<tool_response>\nfound\n</tool_response><|assistant|>"
    for end in (opener, None):
        assert template.delta(heard("found"), [CALL], end=end) == [observation, *found]


def test_gemma_4_goes_on_in_the_same_turn_after_a_result() -> None:
    template = trl_template("gemma4")
    assert token(template, "<|tool_response>") in template.stop_ids
    result = token(template, "<|tool_response>")
    delta = text_of(template, template.delta(heard("found"), [CALL], end=result))
    assert delta == 'response:look{value:<|"|>found<|"|>}<tool_response|>'
    told = text_of(template, template.delta(heard("error: unknown tool 'look'")))
    assert told == "<turn|>\n<|turn>user\ntool: error: unknown tool 'look'<turn|>\n<|turn>model\n"


@pytest.mark.parametrize(
    ("name", "thinking", "calling", "prompt_end"),
    [
        (
            "chatml",
            "<think>\nso\n</think>\n\nyes",
            '<tool_call>\n{"name": "look", "arguments": {"at": "K27", "times": 2}}\n</tool_call>',
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3",
            "<think>\nso\n</think>\n\nyes",
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"at": "K27", "times": 2}}'
            "\n</tool_call>",
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "qwen3_5_think",
            "so\n</think>\n\nyes",
            "\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\nK27\n</parameter>\n"
            "<parameter=times>\n2\n</parameter>\n</function>\n</tool_call>",
            "<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            "gptoss",
            "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>yes",
            ' to=functions.look<|channel|>commentary json<|message|>{"at": "K27", "times": 2}',
            "<|end|><|start|>assistant",
        ),
        (
            "glm4moe",
            "\n<think>so</think>\nyes",
            "\n<think></think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>K27</arg_value>\n"
            "<arg_key>times</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            "<|assistant|>",
        ),
        (
            "gemma4_v5",
            "<|channel>thought\nso\n<channel|>yes",
            '<|tool_call>call:look{at:<|"|>K27<|"|>,times:2}<tool_call|>',
            "<turn|>\n<|turn>model\n",
        ),
        (
            "llama3_1",
            "<think>\nso\n</think>\n\nyes",
            '{"name": "look", "parameters": {"at": "K27", "times": 2}}',
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_a_reply_is_written_from_where_the_agent_speaks_to_before_its_end(
    name: str, thinking: str, calling: str, prompt_end: str
) -> None:
    template = trl_template(name)
    assert template.prompt_end == prompt_end
    assert template.render_reply(said("yes", "so")) == thinking
    assert template.render_reply(said("", None, CALL)) == calling


def test_a_reply_that_is_not_shown_whole_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not show all of a reply: 'so'"):
        trl_template("deepseekv3").render_reply(said("yes", "so"))
    with pytest.raises(ConfigurationError, match=r"does not show all of a reply: 'I look\.'"):
        trl_template("llama3_1").render_reply(said("I look.", None, CALL))
    with pytest.raises(ConfigurationError, match="otherwise than after its own prompt"):
        trl_template("qwen3_5_nothink").render_reply(said("yes", "so"))  # the prompt has closed the thought
    with pytest.raises(ConfigurationError, match="single tool-calls at once"):
        trl_template("llama3_1").render_reply(said("", None, CALL, SECOND))


SYSTEMS = [Message(role="system", content=text) for text in ("Be brief.", "Be kind.")]
REFUSES_GREETINGS = ("cohere", "cohere2", "gemma", "gemma3")
SHOWS_NO_LATER_SYSTEM = ("deepseek_r1_distill", "gptoss", "qwen3_vl")
REFUSES_LATER_SYSTEM = ("cohere", "gemma3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
HOISTS_LATER_SYSTEM = ("cohere2", "deepseekv3")


def kind(name: str) -> str:
    return name.removesuffix("_training")


@pytest.mark.parametrize("name", chosen((*IN_SUITE, "deepseek_r1_distill"), ALL_NAMES))
def test_every_system_message_that_begins_a_conversation_is_shown(name: str) -> None:
    """18 of the templates lose or refuse the second alone: they get both as one."""
    template = trl_template(name)
    text = squeezed(template.prompt([*SYSTEMS, USER]), template)
    assert text.count("Bebrief.") == text.count("Bekind.") == 1
    assert text.index("Bebrief.") < text.index("Bekind.") < text.index("whereisK27?")
    one = Message(role="system", content="Be brief.\n\nBe kind.")
    if kind(name) in {*SHOWS_NO_LATER_SYSTEM, *REFUSES_LATER_SYSTEM}:
        assert template.prompt([*SYSTEMS, USER]) == template.prompt([one, USER])


@pytest.mark.parametrize("name", chosen((*IN_SUITE, "deepseek_r1_distill"), ALL_NAMES))
def test_a_later_system_message_is_shown_or_refused(name: str) -> None:
    template = trl_template(name)
    before, reply = [SYSTEMS[0], USER], said("yes?")
    following = [SYSTEMS[1], *user("bye")]
    whole = [*before, reply, *following]
    why = None
    if kind(name) in SHOWS_NO_LATER_SYSTEM:
        why = "does not show a system message amid the conversation, 'Be (kind|brief).': say it at the begin"
    elif kind(name) in REFUSES_LATER_SYSTEM:
        why = r"cannot render this conversation \("
    if why is None:
        text = squeezed(template.prompt(whole), template)
        assert text.count("Bebrief.") == text.count("Bekind.") == 1
    else:
        with pytest.raises(ConversationRefused, match=why):
            template.prompt(whole)
    if why is None and kind(name) not in HOISTS_LATER_SYSTEM:
        assert "Bekind." in squeezed(template.delta(following, end=template.end_id), template)
        return
    assert not template.goes_on(before, reply, following)  # the next prompt is rendered as a whole
    with pytest.raises(ConversationRefused, match=why or "does not show a system message amid"):
        template.delta(following, end=template.end_id)


@pytest.mark.parametrize("name", chosen((*IN_SUITE, "cohere2"), ALL_NAMES))
def test_a_greeting_is_shown_or_refused_in_one_line(name: str) -> None:
    template = trl_template(name)
    talk = [said("Hello, this is Mia."), USER]
    if kind(name) in REFUSES_GREETINGS:
        with pytest.raises(ConversationRefused, match="lets no agent begin: leave"):
            template.prompt(talk)
        return
    text = squeezed(template.prompt(talk), template)
    assert text.index("Hello,thisisMia.") < text.index("whereisK27?")
