"""A person talks, the agent calls tools and answers; whatever breaks off, the history can go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.chat.plain_template import with_calls_as_text
from stateset_agents.core.chat.replies.parsing import HERMES, parse_reply
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.serving.chat_session import ChatSession, ConversationTools
from stateset_agents.serving.saved_conversations import load_conversations, save_conversation
from stateset_agents.types.errors import BackendError, ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import ToolCall

CALL = 'Let me look. <tool_call>{"name": "look_up", "arguments": {"order": "K27"}}</tool_call>'


def look_up(order: str) -> str:
    """Where an order is.

    Args:
        order: The order, e.g. K27.
    """
    return f"{order} is in Oslo"


def broken(order: str) -> str:
    raise ConnectionError("the shop is away")


async def opened(
    script: Any, tools: list[Callable[..., Any]] | None = None, **options: Any
) -> tuple[ChatSession, ScriptedBackend]:
    backend = ScriptedBackend(script, context_length=options.pop("context_length", 10_000))
    agent = MultiTurnAgent(AgentConfig(**options.pop("agent", {})), backend=backend)
    await agent.initialize()
    return ChatSession(agent, tools=tools or [], **options), backend


def roles(chat: ChatSession) -> list[str]:
    return [message.role for message in chat.messages]


async def test_the_agent_calls_tools_until_it_answers_in_words() -> None:
    chat, backend = await opened([CALL, "In Oslo.", "Bye."], [look_up])
    assert await chat.send("where is K27?") == "In Oslo."
    assert await chat.send("thanks") == "Bye."
    assert roles(chat) == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    call_message, result_message = chat.messages[1:3]
    assert call_message.content == "Let me look."
    assert call_message.tool_calls[0].arguments == {"order": "K27"}
    assert (result_message.content, result_message.tool_call_id) == (
        "K27 is in Oslo",
        call_message.tool_calls[0].id,
    )
    assert "look_up" in backend.requests[0].text  # the tools are offered
    assert "tool: K27 is in Oslo" in backend.requests[1].text
    assert len({request.session for request in backend.requests}) == 1


async def test_events_come_in_order_and_show_no_markup() -> None:
    chat, _ = await opened([CALL, "In Oslo."], [look_up])
    events = [event async for event in chat.stream("where is K27?")]
    kinds = [type(event) for event in events]
    first = kinds.index(ToolCall)
    assert kinds[first : first + 2] == [ToolCall, Message]
    assert "".join(event for event in events[:first] if isinstance(event, str)) == "Let me look."
    assert "".join(event for event in events[first:] if isinstance(event, str)) == "In Oslo."


async def test_rounds_of_tools_are_bounded() -> None:
    chat, backend = await opened(lambda request: CALL, [look_up], max_rounds=3)
    assert await chat.send("where is K27?") == ""
    assert len(backend.requests) == 3
    assert roles(chat) == ["user", *["assistant", "tool"] * 3, "assistant"]
    ids = [call.id for message in chat.messages for call in message.tool_calls]
    assert len(set(ids)) == 3


async def test_the_system_message_is_made_once() -> None:
    chat, backend = await opened(
        ["a", "b"], agent={"persona": "Mia", "system_prompt": "Be kind."}, context={"order": "K27"}
    )
    await chat.send("hi")
    await chat.send("you")
    assert chat.messages[0].content == "You are Mia.\nBe kind.\norder: K27"
    assert backend.requests[1].text.count("You are Mia.") == 1
    again, backend = await opened(["c"], agent={"persona": "Bob"}, messages=chat.messages)
    await again.send("go on")
    assert "Bob" not in backend.requests[0].text
    assert backend.requests[0].text.startswith("system: You are Mia.\n")


async def test_an_answer_that_is_left_stays_as_far_as_it_came() -> None:
    chat, _ = await opened(["Hello there.", "b"])
    async for event in chat.stream("hi"):
        if event == "o":
            break
    assert await chat.send("you") == "b"
    assert [message.content for message in chat.messages] == ["hi", "Hello", "you", "b"]


async def test_finished_rounds_stay_when_the_answer_is_left() -> None:
    chat, _ = await opened([CALL, "In Oslo.", "b"], [look_up])
    stream = chat.stream("where is K27?")
    async for event in stream:
        if isinstance(event, Message):
            break
    await stream.aclose()
    assert roles(chat) == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[-1].content == ""


async def test_nothing_said_takes_the_question_back() -> None:
    chat, _ = await opened([BackendError("the model is away"), "Hi."])
    with pytest.raises(BackendError, match="the model is away"):
        await chat.send("hello")
    assert chat.messages == ()
    with pytest.raises(ConfigurationError, match="the conversation has"):
        await chat.send("x" * 20_000)
    assert chat.messages == ()
    assert await chat.send("hello") == "Hi."


async def test_a_tool_that_breaks_is_the_caller_s_to_know() -> None:
    chat, _ = await opened([CALL.replace("look_up", "broken"), "ok"], [broken])
    with pytest.raises(EnvironmentFailure, match="tool broken failed: ConnectionError: the shop is away"):
        await chat.send("hi")
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi"), ("assistant", "Let me look.")]
    assert await chat.send("and now?") == "ok"


async def test_what_the_agent_gets_wrong_is_told_to_it() -> None:
    chat, _ = await opened(['<tool_call>{"name": "lok_up"}</tool_call>', "<tool_call>{", "Sorry."], [look_up])
    assert await chat.send("hi") == "Sorry."
    tool_messages = [message.content for message in chat.messages if message.role == "tool"]
    assert tool_messages[0] == "error: unknown tool 'lok_up'; did you mean look_up?"
    assert tool_messages[1].startswith("error: the tool call is not closed")


async def test_a_long_chat_remembers_few_of_its_prompts() -> None:
    """Each is as long as the talk so far, and only the last is gone on from."""
    chat, backend = await opened(lambda _: "ok", agent={"history": "keep"}, context_length=500)
    for _ in range(14):
        await chat.send("and then?")
    shown = sum(len(request.prompt_ids) for request in backend.requests)
    assert chat._history is not None
    assert len(backend.requests[-1].prompt_ids) < chat._history.num_tokens <= 4 * 500 < shown


async def test_one_answer_at_a_time() -> None:
    chat, _ = await opened(["Hello.", "b"])
    stream = chat.stream("hi")
    await anext(stream)
    with pytest.raises(ConfigurationError, match="still under way"):
        await chat.send("you")
    await stream.aclose()
    assert await chat.send("you") == "b"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rounds": 0}, "max_rounds must be at least 1, got 0"),
        ({"messages": "hi", "context": "x"}, "context is for new conversations"),
        ({"messages": [{"role": "bot"}]}, "message role must be one of"),
    ],
)
async def test_options_that_cannot_work_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await opened(["a"], **options)
    assert message in str(caught.value)


async def test_a_person_may_play_the_user_of_a_scenario() -> None:
    desk = RetailDesk(max_turns=2)
    scenario = desk.scenarios("test")[0]
    conversation = await desk.start(scenario, 0)
    call = '<tool_call>{"name": "get_order", "arguments": {"order_id": "%s"}}</tool_call>'
    call %= scenario.context["order_id"]
    agent = MultiTurnAgent(backend=ScriptedBackend([call, "It is on its way.", call, "Still.", call]))
    async with agent:
        chat = ChatSession(agent, messages=conversation.opening[:1], tools=ConversationTools(conversation))
        assert await chat.send("where is it?") == "It is on its way."
        assert "shipped" in chat.messages[3].content
        assert await chat.send("and now?") == "Still."  # the simulated user said nothing in between
        with pytest.raises(ConfigurationError, match="the environment has ended this conversation"):
            await chat.send("and now?")
    await conversation.close()


@pytest.mark.parametrize(
    "text",
    [
        "ok <tool_call>{}</tool_call> then <b>",
        CALL,
        "  a < b  \n",
        "a <tool_cal",
        "<tool_call>{",
        "x<tool_call></tool_call><tool_call>1</tool_call>y ",
        "",
    ],
)
def test_certain_words_only_grow_into_the_reply(text: str) -> None:
    content = parse_reply(text).content
    said = HERMES.stream()
    grown = [said.content]
    for character in text:
        said.add(character)
        grown.append(said.content)
    assert all(content.startswith(words) for words in grown)
    assert grown == sorted(grown, key=len)


async def test_a_saved_conversation_is_openai_s_format_and_goes_on(tmp_path: Path) -> None:
    chat, _ = await opened([CALL, "In Oslo 👍🏽 é שלום."], [look_up], context="Late.")
    await chat.send("where is\nK27?\ud800")
    file = tmp_path / "talks.jsonl"
    save_conversation(file, chat.messages[:2])
    save_conversation(file, chat.messages)
    first, second = file.read_text(encoding="utf-8").splitlines()
    assert list(json.loads(first)) == ["messages"]
    messages = json.loads(second)["messages"]
    assert messages[1] == {"role": "user", "content": "where is\nK27?\ufffd"}  # as the model was shown it
    assert messages[2]["tool_calls"] == [
        {
            "id": "call_0_0",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"order": "K27"}'},
        }
    ]
    assert messages[3]["tool_call_id"] == "call_0_0"
    loaded = load_conversations(file)
    assert len(loaded) == 2
    assert loaded[1][2:] == list(chat.messages[2:])


def test_a_saved_conversation_keeps_thoughts_apart_from_words(tmp_path: Path) -> None:
    messages = [
        Message(role="user", content="hi"),
        Message(role="assistant", content="hello", reasoning="a greeting"),
    ]
    save_conversation(tmp_path / "talks.jsonl", messages)
    (line,) = (tmp_path / "talks.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "reasoning": "a greeting"},
    ]
    assert load_conversations(tmp_path / "talks.jsonl") == [messages]


def test_a_saved_conversation_keeps_what_was_written_of_a_call_that_cannot_be_read(tmp_path: Path) -> None:
    reply = parse_reply('hm <tool_call>{"name": "look", </tool_call><tool_call>{"name": "look"}</tool_call>')
    broken, read = reply.tool_calls
    save_conversation(tmp_path / "talks.jsonl", [Message(role="user", content="hi"), reply])
    (messages,) = load_conversations(tmp_path / "talks.jsonl")
    assert messages[1] == reply
    assert messages[1].tool_calls[0].written == broken.written == '<tool_call>{"name": "look", </tool_call>'
    assert messages[1].tool_calls[1] == read
    assert with_calls_as_text(messages[1]) == with_calls_as_text(reply)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no conversation in"),
        ('{"messages": [{"role": "user", "content": "", "tool_calls": [3]}]}', "a tool call must be"),
        ("\nhi\n", "line 2: not JSON"),
        ("[]", 'line 1: a conversation is {"messages": [...]} with at least one message'),
        ('{"messages": []}', "with at least one message"),
        ('{"messages": [{"role": "bot"}]}', "line 1: message role must be one of"),
        (b"\xff", "it is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError) as caught:
        load_conversations(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"No such file or directory.*in a folder that exists"):
        save_conversation(tmp_path / "no" / "talks.jsonl", [Message(role="user", content="hi")])
