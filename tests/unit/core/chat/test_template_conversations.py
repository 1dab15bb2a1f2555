"""Whole conversations with each of TRL's templates and ours: what the agent reads each turn, in both modes.

In mode `template` the tokens of every prompt, decoded with control tokens, are the template's own text of
the conversation so far, to the character. Differences are tolerated only where a model writes what its
template would not: in white space at the ends of a reply, and in how a call is written (spaces, and the order
of keys in its JSON). Both stand as they were sampled: `test_what_was_sampled_stands_as_it_was`. What the
message of a damaged reply does not hold (a control token amid words, the open end of a thought) does not. A
control token that stands in a message's words is plain text in prompts, and templates do not see it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from chat_templates import (
    ALL_NAMES,
    OURS,
    TRL_APPENDING,
    TRL_NAMES,
    TRL_WITH_HIDDEN_TOOLS,
    TRL_WITH_TOOLS,
    trl_template,
)
from template_talks import (
    LOOK,
    ROWS,
    Exchange,
    end_of,
    fitting,
    full_render,
    opening_of,
    play,
    ragged_talk,
    rows_of_talks,
    sane_talk,
    squeezed,
    thoughtless_talk,
    tools_of,
    written,
)

from stateset_agents import Message
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import ToolCall
from stateset_agents.types.trajectory import Status, Trajectory

CLOSED_BY_THE_END = ("gptoss", "gptoss_training", "llama3_1", "llama3_2")
"""A call is not complete without the token that ends it."""
TALKS = (sane_talk, ragged_talk, thoughtless_talk)


def test_the_talks_are_what_they_are_meant_to_be() -> None:
    assert len(ROWS) == 28
    with_tools = [name for name in TRL_NAMES if tools_of(name)]
    assert len(with_tools) == len(TRL_WITH_TOOLS) + len(TRL_WITH_HIDDEN_TOOLS) == 54
    for name in ALL_NAMES:
        sane, ragged, thoughtless = ([one.reply for one in talk(name)] for talk in TALKS)
        assert bool(sane[0].tool_calls) == (name in (*with_tools, *OURS))
        assert len(ragged) == (6 if name in (*with_tools, *OURS) else 4)
        for talk in (sane, ragged, thoughtless):
            thinks = any(reply.reasoning is not None for reply in talk)
            assert thinks != name.startswith("qwen3_5_nothink")


@pytest.mark.first(12)
@pytest.mark.parametrize("name", ALL_NAMES)
async def test_prompts_are_the_template_s_own_text_or_sampled_tokens_and_deltas(name: str) -> None:
    for talk, rows in zip(TALKS, rows_of_talks(name), strict=True):
        exchanges = talk(name)
        shown, kept = await play(name, exchanges, "template"), await play(name, exchanges, "keep")
        assert [len(shown.rows), len(kept.rows)] == [rows, 1]
        for trajectory in (shown, kept):
            expect_read_back(trajectory, exchanges)
        expect_full_renders(name, shown)
        expect_deltas(name, kept, exchanges)
        if rows == 1:
            assert [turn.completion for turn in shown.turns] == [turn.completion for turn in kept.turns]
            assert [turn.prompt_ids for turn in shown.turns] == [turn.prompt_ids for turn in kept.turns]
        else:
            assert name not in TRL_APPENDING


def expect_read_back(trajectory: Trajectory, talk: Sequence[Exchange]) -> None:
    """Thoughts, words and calls are those that were written; no thought and an empty one are the same."""
    assert trajectory.status is Status.TERMINATED
    for exchange, turn in zip(talk, trajectory.turns, strict=True):
        said, read = exchange.reply, turn.completion.message
        assert (read.content, read.reasoning or None) == (said.content, said.reasoning or None)
        assert [(call.name, call.arguments, call.error) for call in read.tool_calls] == [
            (call.name, call.arguments, None) for call in said.tool_calls
        ]


def prompts(name: str, trajectory: Trajectory) -> list[str]:
    """[turns] with control tokens as they are written."""
    hf = trl_template(name).tokenizer.hf
    return [hf.decode(turn.completion.prompt_ids) for turn in trajectory.turns]


def conversations(trajectory: Trajectory) -> list[list[Message]]:
    """[turns] what had been said before each."""
    before, messages = [], list(trajectory.opening)
    for turn in trajectory.turns:
        before.append(messages)
        messages = [*messages, turn.completion.message, *turn.feedback]
    return before


def expect_full_renders(name: str, trajectory: Trajectory) -> None:
    for prompt, messages in zip(prompts(name, trajectory), conversations(trajectory), strict=True):
        assert prompt == full_render(name, messages, tools_of(name))


def expect_deltas(name: str, trajectory: Trajectory, talk: Sequence[Exchange]) -> None:
    """The row is the template's opening, then sampled tokens and what the template writes after such a reply:
    the end of its text of the whole conversation, behind the reply's last words."""
    template = trl_template(name)
    (row,) = trajectory.rows
    opening = template.tokenizer.encode_markup(full_render(name, trajectory.opening, tools_of(name)))
    expected = list(opening)
    for at, (exchange, messages) in enumerate(zip(talk, conversations(trajectory), strict=True)):
        if at:
            before = talk[at - 1]
            delta = list(trajectory.turns[at].prompt_ids)
            expected += delta
            text = squeezed(full_render(name, messages, tools_of(name)))
            after = squeezed(template.tokenizer.hf.decode(delta))
            assert after
            assert text.endswith(after)
            said = text.removesuffix(after)
            for end in (template.tokenizer.piece(template.end_id), end_of(name, before.reply)):
                said = said.removesuffix(end)
            assert said.endswith(squeezed(written(name, before.reply))[-5:])
        ids = template.tokenizer.encode_markup(written(name, exchange.reply))
        expected += ids
        if not exchange.is_cut:
            expected += template.tokenizer.encode_markup(end_of(name, exchange.reply))
    assert row.token_ids == expected
    sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
    assert sum(row.action_mask) == trajectory.num_agent_tokens == sampled


@pytest.mark.parametrize("name", [one for one in ALL_NAMES if tools_of(one) and one not in CLOSED_BY_THE_END])
async def test_behind_a_call_that_a_limit_cuts_right_there_stands_the_call_s_own_end(name: str) -> None:
    call = ToolCall(name="look", arguments={"at": "K27"})
    reply = Message(role="assistant", content="", tool_calls=(call,))
    bye = Exchange(Message(role="assistant", content="Bye."))
    whole, cut = ([Exchange(reply, ("found",), is_cut=is_cut), bye] for is_cut in (False, True))
    expected, kept = await play(name, whole, "keep"), await play(name, cut, "keep")
    assert kept.token_ids == expected.token_ids
    expect_full_renders(name, await play(name, cut, "template"))


OTHER_WAY = {  # a call as the template would not write it
    "chatml": '<tool_call>{"arguments": {"at": "K27", "times": 2}, "name": "look"}</tool_call>',
    "qwen2_5": '<tool_call> {"arguments":{"times":2,"at":"K27"},"name":"look"}</tool_call>\n\n',
    "qwen3_training": "<think>\nHm.\n</think>\n\n"
    '<tool_call>{"name":"look","arguments":{"at":"K27","times":2}}</tool_call> ',
    "llama3_1": '{"name":"look","parameters":{"times":2,"at":"K27"}}\n',
    "gptoss": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>"
    'commentary json<|message|>{"at":"K27","times":2}',
    "glm4moe": "\n<think>Hm.</think><tool_call>look <arg_key>at</arg_key><arg_value>K27</arg_value>\n\n"
    "<arg_key>times</arg_key> <arg_value>2</arg_value></tool_call>",
}


@pytest.mark.parametrize("name", OTHER_WAY)
async def test_what_was_sampled_stands_as_it_was(name: str) -> None:
    """The row goes on, though the template would write white space and the call in another way."""
    arguments = {"at": "K27", "times": 2}
    thought = "Hm." if "Hm." in OTHER_WAY[name] else None
    call = Message(
        role="assistant",
        content="",
        reasoning=thought,
        tool_calls=(ToolCall(name="look", arguments=arguments),),
    )
    bye = Message(role="assistant", content="It left.", reasoning=thought)
    talk = [Exchange(call, ("It left.",), text=OTHER_WAY[name]), Exchange(bye)]
    trajectory = await play(name, talk, "template")
    assert len(trajectory.rows) == 1
    messages = conversations(trajectory)[1]
    prompt, own = prompts(name, trajectory)[1], full_render(name, messages, [LOOK])
    assert OTHER_WAY[name] in prompt
    assert prompt != own
    begin, end = full_render(name, opening_of(name), [LOOK]), prompt.rpartition(OTHER_WAY[name])[2]
    assert prompt == begin + OTHER_WAY[name] + end
    assert own.startswith(begin)
    assert squeezed(own).endswith(squeezed(end))


DAMAGED = {
    "qwen2_5": ("<think>\nHm<|end|> that", "", "Hm that"),
    "lfm2_2_5_v2": ("It<|startoftext|> left.", "It left.", None),
    "qwen2_5_training": ("<think>\nHm that", "", "Hm that"),
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_what_a_damaged_reply_lost_is_not_read_again(name: str) -> None:
    """Its message does not hold all of it, so the template's text is another: it opens a row."""
    text, content, thought = DAMAGED[name]
    reply = Message(role="assistant", content=content, reasoning=thought)
    bye = Message(role="assistant", content="Bye.")
    talk = [Exchange(reply, ("what?",), text=text), Exchange(bye)]
    trajectory, kept = await play(name, talk, "template"), await play(name, talk, "keep")
    assert [len(trajectory.rows), len(kept.rows)] == [2, 1]
    read = trajectory.turns[0].completion.message
    assert (read.content, read.reasoning) == (content, thought)
    expect_full_renders(name, trajectory)
    assert text in prompts(name, kept)[1]


def odd_replies(name: str) -> dict[str, tuple[str, int]]:
    """Texts that the template would write otherwise, or end otherwise, and how many calls are in each."""
    template = trl_template(name)

    def text_of(content: str, thought: str | None = None, *calls: ToolCall) -> str:
        reply = Message(role="assistant", content=content, reasoning=thought, tool_calls=calls)
        return written(name, fitting(name, Exchange(reply))[0].reply)

    texts = {
        f"ends by {template.tokenizer.piece(id)}": (text_of("Hello.") + template.tokenizer.piece(id), 0)
        for id in template.stop_ids
    }
    if "</think>" not in template.tokenizer.hf.get_added_vocab():  # else it stands in words as plain text
        texts["two thoughts"] = text_of("Hello.", "Hm.") + text_of("Again.", "Oh."), 0
        texts["a stray end of a thought"] = "Hello.</think>Again.", 0
    if tools_of(name) and name not in CLOSED_BY_THE_END:
        calls = text_of("", None, ToolCall(name="look", arguments={"at": "K27"}))
        texts["words behind a call"] = calls + " That is it.", 1
    return texts


@pytest.mark.parametrize("name", ALL_NAMES)
async def test_an_odd_reply_is_read_again_as_the_template_writes_it(name: str) -> None:
    """It opens a row, or stands as it was sampled where the template writes that, white space aside."""
    for kind, (text, num_calls) in odd_replies(name).items():
        reply = Message(role="assistant", content="")
        talk = [
            Exchange(reply, ("go on",) * max(1, num_calls), text=text, is_cut=True),
            Exchange(reply, text="Bye."),
        ]
        trajectory = await play(name, talk, "template")
        assert trajectory.error is None, kind
        (_, prompt), (_, messages) = prompts(name, trajectory), conversations(trajectory)
        assert squeezed(prompt) == squeezed(full_render(name, messages, tools_of(name))), kind


async def test_whether_a_frame_was_sampled_decides_whether_the_row_goes_on() -> None:
    """A message of words alone does not tell; muse_glimmer writes a frame around them."""
    words = Message(role="assistant", content="It left.")
    framed = written("muse_glimmer", words)
    assert framed != words.content
    for text, rows in ((framed, 1), (words.content, 2)):
        talk = [Exchange(words, ("what?",), text=text), Exchange(words)]
        trajectory = await play("muse_glimmer", talk, "template")
        assert len(trajectory.rows) == rows
        expect_full_renders("muse_glimmer", trajectory)


def test_a_template_whose_results_depend_on_earlier_ones_is_refused_with_both_renderings() -> None:
    template = trl_template("deepseekv3_training")
    with pytest.raises(ConfigurationError) as refused:
        template.prompt(opening_of("deepseekv3_training"), [LOOK])
    told = str(refused.value)
    first, second = told.partition("stood before: ")[2].partition("); set ")[0].split(" or ")
    assert "outputs▁begin" in first
    assert "outputs▁begin" not in second
    assert "output▁begin" in second
