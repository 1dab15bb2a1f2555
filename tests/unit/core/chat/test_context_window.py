"""A conversation that outgrows the context is refused, or by a setting loses its oldest exchanges."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
from tiny_training import make_agent

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.chat.history import slide_window
from stateset_agents.runtime.event_loop import measure_loop_lag
from stateset_agents.serving.chat_session import ChatSession
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import ToolCall


def said(*spoken: str) -> list[Message]:
    """ "s: hi" is a system message, "u:" a user's, "a:" the agent's, "c:" its call, "t:" a tool's."""
    names: dict[str, Any] = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
    return [
        Message(
            role=names[one[0]],
            content=one[2:],
            tool_calls=(ToolCall(name="f"),) if one[0] == "c" else (),
        )
        for one in spoken
    ]


TALK = said("s: s", "u: 1", "c:", "t: r", "a: 1", "u: 2", "a: 2", "u: 3", "c:", "t: r")


def shown_of(talk: list[Message], most: int) -> list[Message]:
    messages = tuple(talk)
    return list(slide_window(messages, lambda view: len(view.of(messages)) <= most).of(messages))


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (10, TALK),
        (9, [TALK[0], *TALK[5:]]),
        (6, [TALK[0], *TALK[5:]]),
        (5, [TALK[0], *TALK[7:]]),
        (1, [TALK[0], *TALK[7:]]),
    ],
)
def test_whole_exchanges_are_left_out_from_the_oldest(most: int, kept: list[Message]) -> None:
    assert shown_of(TALK, most) == kept


def test_what_stands_before_the_first_user_message_is_the_system_s() -> None:
    talk = said("s: s", "a: welcome", "u: 1", "a: 1", "u: 2")
    assert shown_of(talk, 2) == said("s: s", "u: 2")
    assert shown_of(talk[2:], 1) == said("u: 2")
    assert shown_of(said("s: s", "u: 1"), 0) == said("s: s", "u: 1")


def agent_of(**settings: Any) -> tuple[MultiTurnAgent, ScriptedBackend]:
    backend = ScriptedBackend(lambda request: "ok", context_length=130)
    return MultiTurnAgent(AgentConfig(max_new_tokens=20, **settings), backend=backend), backend


LONG = [
    {"role": role, "content": f"{number} {role[0] * 20}"}
    for number in range(4)
    for role in ("user", "assistant")
] + [{"role": "user", "content": "last"}]


async def test_a_conversation_that_is_too_long_is_refused_with_the_cure() -> None:
    agent, _ = agent_of()
    async with agent:
        with pytest.raises(ConfigurationError, match=r"let the agent's history slide .* or compact"):
            await agent.generate_response(LONG)


async def test_a_sliding_window_leaves_out_the_oldest_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent, backend = agent_of(history="slide", system_prompt="Be brief.")
    with caplog.at_level(logging.WARNING, "stateset_agents"):
        async with agent:
            assert await agent.generate_response(LONG) == "ok"
            assert await agent.generate_response(LONG) == "ok"
    shown = backend.requests[0].text
    assert shown.startswith("system: Be brief.\nuser: 3 u")
    assert shown.endswith("user: last\nassistant:")
    assert len(backend.requests[0].prompt_ids) + 20 <= 130
    assert [record.getMessage() for record in caplog.records] == [
        "the conversation outgrew the context of 130 tokens: the oldest 6 of its 10 messages are left out "
        "(said once)"
    ]


async def test_one_exchange_that_is_too_long_is_refused_even_so() -> None:
    agent, backend = agent_of(history="slide")
    async with agent:
        with pytest.raises(ConfigurationError, match=r"has 217 tokens .* 130: shorten the messages or raise"):
            await agent.generate_response([*LONG[:-1], {"role": "user", "content": "x" * 200}])
        assert await agent.generate_response("x" * 100) == "ok"  # less room for the answer, but some
    assert backend.requests[0].params.max_new_tokens == 13


async def test_a_chat_goes_on_and_on_in_a_sliding_window() -> None:
    agent, backend = agent_of(history="slide", persona="Mia")
    async with agent, ChatSession(agent) as chat:
        for number in range(30):
            assert await chat.send(f"question {number}") == "ok"
    assert len(chat.messages) == 61  # the history is whole
    assert all(request.text.startswith("system: You are Mia.\nuser:") for request in backend.requests)
    assert max(len(request.prompt_ids) for request in backend.requests) <= 110


def test_context_window_is_an_older_name_of_it() -> None:
    assert AgentConfig(context_window="sliding").history == "slide"
    assert AgentConfig(context_window="refuse").history == "template"
    with pytest.raises(ConfigurationError, match="differ: leave out context_window"):
        AgentConfig(context_window="sliding", history="keep")


async def test_long_messages_are_tokenised_in_a_thread_and_short_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with make_agent() as agent:
        threads: list[threading.Thread] = []
        prompt = agent.template.prompt

        def noted(*arguments: Any) -> list[int]:
            threads.append(threading.current_thread())
            return prompt(*arguments)

        monkeypatch.setattr(agent.template, "prompt", noted)
        monkeypatch.setattr(agent.template, "least_tokens", lambda _: 0)  # as of a tokenizer without a bound
        await agent.generate_response("where is my order?")
        with pytest.raises(ConfigurationError, match="shorten the messages"):
            await agent.generate_response("where is my order? " * 5000)
    here, apart = threads
    assert here is threading.current_thread()
    assert apart is not here


async def test_long_prompts_of_a_group_wait_for_each_other_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread for each would take those of users, tools and rewards while it waits."""
    async with make_agent() as agent:
        threads: list[int] = []

        def noted(*_: Any) -> list[int]:
            threads.append(threading.get_ident())
            time.sleep(0.002)  # it runs in a thread
            return [1]

        monkeypatch.setattr(agent.template, "prompt", noted)
        monkeypatch.setattr(agent.template, "least_tokens", lambda _: 0)
        long = [Message(role="user", content="where is my order? " * 1000)]
        await asyncio.gather(*(agent.next_prompt(agent.history(), long) for _ in range(20)))
    assert len(threads) == 20
    assert {*threads} == {threads[0]} != {threading.get_ident()}


async def test_short_prompts_of_many_conversations_leave_the_loop_time_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Branches begin all at once, each by a prompt that may be rendered whole."""
    async with make_agent() as agent:

        def slow(*_: Any) -> list[int]:
            time.sleep(0.005)
            return [1]

        monkeypatch.setattr(agent.template, "prompt", slow)
        hi = [Message(role="user", content="hi")]
        async with measure_loop_lag(interval=0.005) as lag:
            await asyncio.gather(*(agent.next_prompt(agent.history(), hi) for _ in range(60)))
    assert lag.longest < 0.15
