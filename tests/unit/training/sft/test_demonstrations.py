"""Demonstrations become the rows that a rollout with the same replies would have, in every template."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from chat_templates import ALL_NAMES, IN_SUITE, chosen, trl_template
from template_talks import play, ragged_talk, sane_talk, thoughtless_talk, tools_of
from tiny_training import make_agent

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.training.sft.demonstrations import Demonstrations, load_demonstrations
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import configure_logging

CANNOT_SHOW = ("gemma4", "gemma4_v3", "gemma4_v4")
"""They show no thought beside words, so such a reply cannot be demonstrated; an empty one is left out."""


def as_chat(message: Message) -> dict[str, Any]:
    thought = {} if message.reasoning is None else {"reasoning": message.reasoning}
    return {**message.to_openai(), **thought}


async def shown(name: str, chat: dict[str, Any], history: str) -> Demonstrations:
    template = trl_template(name)
    backend = ScriptedBackend([], tokenizer=template.tokenizer)
    agent = MultiTurnAgent(AgentConfig(history=history), backend=backend)
    agent._template = template  # loading one takes 40 ms
    async with agent:
        return load_demonstrations(agent, [chat])


@pytest.mark.first(4)
@pytest.mark.parametrize("name", chosen(IN_SUITE, ALL_NAMES))
async def test_a_demonstration_has_the_rows_of_a_rollout_that_said_the_same(name: str) -> None:
    for talk in (sane_talk, ragged_talk, thoughtless_talk):
        exchanges = [replace(exchange, is_cut=False) for exchange in talk(name)]
        for history in ("template", "keep"):
            played = await play(name, exchanges, history)
            chat = {"messages": [*map(as_chat, played.messages)], "tools": tools_of(name)}
            if name in CANNOT_SHOW:
                if talk is not thoughtless_talk:
                    with pytest.raises(ConfigurationError, match=r"1: the reply .* cannot be shown"):
                        await shown(name, chat, history)
                continue
            (sample,) = (await shown(name, chat, history)).train
            mine = sample.trajectory
            for index, (turn, other) in enumerate(zip(mine.turns, played.turns, strict=True)):
                assert turn.completion.token_ids == other.completion.token_ids
                assert turn.prompt_ids == other.prompt_ids
                assert mine.follows(index) == played.follows(index)
            assert [row.token_ids for row in sample.rows] == [row.token_ids for row in played.rows]
            assert [row.action_mask for row in sample.rows] == [row.action_mask for row in played.rows]


def chat(*replies: str, **more: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, reply in enumerate(replies):
        messages += [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": reply}]
    return {"messages": messages, **more}


async def loaded(chats: Any, **options: Any) -> Demonstrations:
    settings = {
        name: options.pop(name) for name in ("max_context_tokens", "system_prompt") if name in options
    }
    async with make_agent(max_new_tokens=40, **settings) as agent:
        return load_demonstrations(agent, chats, **options)


async def test_replies_of_weight_0_stand_in_the_row_and_do_not_count() -> None:
    told = chat("no!", "yes!")
    told["messages"][1]["weight"] = 0
    (sample,) = (await loaded([told])).train
    first, second = (len(turn.completion.token_ids) for turn in sample.trajectory.turns)
    assert sample.advantages == (0.0,) * first + (1.0,) * second


async def test_the_agents_own_system_prompt_stands_before_every_conversation() -> None:
    (plain,) = (await loaded([chat("hi")])).train
    (led,) = (await loaded([chat("hi")], system_prompt="Be kind.")).train
    length = [len(sample.trajectory.turns[0].prompt_ids) for sample in (plain, led)]
    assert length[1] > length[0]


async def test_tools_of_the_conversation_go_before_those_of_the_call() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}
    (without,) = (await loaded([chat("hi")])).train
    (with_own,) = (await loaded([chat("hi", tools=[tool])])).train
    (with_given,) = (await loaded([chat("hi")], tools=[tool])).train
    assert with_own.rows[0].token_ids == with_given.rows[0].token_ids != without.rows[0].token_ids


async def test_a_conversation_ends_before_the_reply_that_outgrows_the_context(capsys: Any) -> None:
    configure_logging()
    whole = (await loaded([chat("short", "x" * 30, "end")])).train[0]
    first = whole.trajectory.turns[0].completion
    limit = len(first.prompt_ids) + len(first.token_ids) + 10
    (cut,) = (await loaded([chat("short", "x" * 30, "end")], max_context_tokens=limit)).train
    assert [turn.completion for turn in cut.trajectory.turns] == [first]
    assert "1 of 1 conversations are longer than the context" in capsys.readouterr().err


async def test_splits_and_shares_say_what_is_held_out() -> None:
    named = [chat("a", split="train"), chat("b", split="validation"), chat("c", split="test")]
    shown = await loaded(named, validation_share=0.5)
    assert [len(shown.train), len(shown.validation)] == [1, 1]
    many = [chat(f"answer {number}") for number in range(40)]
    shown = await loaded(many, validation_share=0.25)
    assert len(shown.train) + len(shown.validation) == 40
    assert 4 <= len(shown.validation) <= 18


TWO_REPLIES = {"messages": [*chat("a")["messages"], {"role": "assistant", "content": "b"}]}
WEIGHTLESS = {
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]
}


@pytest.mark.parametrize(
    ("chats", "problem"),
    [
        ([], "there is no conversation"),
        ([chat("a"), {"messages": [{"role": "user", "content": "q"}]}], "conversation 2: it shows no reply"),
        ([WEIGHTLESS], "conversation 1 trains nothing: it has no reply with a weight"),
        ([TWO_REPLIES], "conversation 1: two replies stand behind one another"),
        ([chat("a", split="test")], "all 1 conversations are held out"),
        ([{"messages": [{"role": "robot", "content": "q"}]}], "conversation 1: message role must be one of"),
        (
            [{"messages": [*chat("a")["messages"][:1], {"role": "assistant", "content": "a", "weight": -1}]}],
            "weight must be a number of at least 0, got -1",
        ),
    ],
)
async def test_conversations_that_cannot_train_are_named(chats: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        await loaded(chats)


async def test_equal_conversations_are_held_out_together() -> None:
    twice = [chat(f"answer {number // 2}") for number in range(40)]
    shown = await loaded(twice, validation_share=0.3)
    held_out = {sample.trajectory.scenario.id for sample in shown.validation}
    assert len(shown.validation) == 2 * len(held_out) > 0
    assert held_out.isdisjoint(sample.trajectory.scenario.id for sample in shown.train)


async def test_a_file_is_read_line_by_line(tmp_path: Any) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps(chat("a")) + "\n\n" + json.dumps(chat("b")) + "\n")
    assert len((await loaded(file)).train) == 2
    file.write_text("{broken")
    with pytest.raises(ConfigurationError, match="line 1: not JSON"):
        await loaded(file)


@pytest.mark.parametrize("weight", [{}, {"weight": 1}, {"weight": 0}], ids=str)
@pytest.mark.parametrize("history", ["template", "keep"])
async def test_what_the_agent_says_first_stands_untrained_in_the_next_prompt(
    weight: dict[str, int], history: str
) -> None:
    hello = {"role": "assistant", "content": "Hello, this is Mia.", **weight}
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes?"}]
    asked += [{"role": "user", "content": "bye"}, {"role": "assistant", "content": "Bye."}]
    for name in ("chatml", "qwen2_5"):
        (sample,) = (await shown(name, {"messages": [hello, *asked]}, history)).train
        template = trl_template(name)
        opening = [
            Message(role="assistant", content="Hello, this is Mia."),
            Message(role="user", content="hi"),
        ]
        assert list(sample.trajectory.turns[0].prompt_ids) == template.prompt(opening)
        (row,) = sample.rows
        trained = [id for id, mask in zip(row.token_ids, row.action_mask, strict=True) if mask]
        yes, bye = (template.reply(Message(role="assistant", content=text)) for text in ("Yes?", "Bye."))
        assert trained == yes + bye
    why = r"conversation 1: the chat template lets no agent begin: leave its first"
    with pytest.raises(ConfigurationError, match=why):
        await shown("gemma3", {"messages": [hello, *asked]}, history)


async def test_system_messages_that_begin_a_demonstration_are_all_shown() -> None:
    systems = [{"role": "system", "content": text} for text in ("Be brief.", "Be kind.")]
    chat = {
        "messages": [*systems, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes?"}]
    }
    (sample,) = (await shown("qwen3_8", chat, "template")).train
    text = trl_template("qwen3_8").tokenizer.decode(sample.trajectory.turns[0].prompt_ids)
    assert "Be brief.\n\nBe kind." in text
