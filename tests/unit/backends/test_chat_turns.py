"""An agent's turns over real sockets: what is read of them, and what a hostile endpoint gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from chat_server import ChatServer, Fault, answer, body, status

from stateset_agents.backends.openai import client as client_module
from stateset_agents.backends.openai.client import ChatClient, NoAnswer
from stateset_agents.backends.openai.responses import thoughts_of
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

HI = [Message(role="user", content="hi")]


def client(server: ChatServer, **settings: Any) -> ChatClient:
    return ChatClient(server.url, "m", **{"backoff": 0.001, "timeout": 5.0, **settings})


@pytest.mark.parametrize(
    ("content", "thoughts"),
    [
        ("hello", None),
        ("<think>\nso\n</think>\n\nhello", "so"),
        ("so\n</think>\n\nhello", "so"),
        ("<think>a</think> x <think>b", "a\nb"),
        ("<think>" * 1000, "<think>" * 999),
    ],
)
def test_the_thoughts_of_a_content(content: str, thoughts: str | None) -> None:
    assert thoughts_of(content) == thoughts


@pytest.mark.parametrize(
    ("message", "text", "reasoning"),
    [
        ({"content": "yes", "reasoning": "why?"}, "yes", "why?"),
        ({"content": "yes", "reasoning_content": "why?"}, "yes", "why?"),
        ({"content": "<think>why?</think>yes"}, "yes", "why?"),
        ({"content": None}, "", None),
        ({"content": None, "refusal": "I may not."}, "I may not.", None),
        ({"content": "", "reasoning": "cut"}, "", "cut"),
    ],
)
async def test_a_turn_may_be_thoughts_or_nothing(
    message: dict[str, Any], text: str, reasoning: str | None
) -> None:
    async with ChatServer(speak=lambda prompt: message) as server:
        result = await client(server).turn(HI)
    assert (result.text, result.reasoning) == (text, reasoning)
    assert result.message == {"role": "assistant", **message}


async def test_a_turn_is_sampled_as_its_request_says() -> None:
    async with ChatServer() as server:
        chat = client(server, temperature=0.5, max_new_tokens=9, stream=True)
        sampling = {"temperature": 1.0, "max_new_tokens": 4, "seed": 3, "stop": ["\n"]}
        await chat.turn([*HI, {"role": "assistant", "content": None, "odd": 1}], sampling=sampling)
    sent = server.bodies[0]
    assert sent.pop("messages")[1] == {"role": "assistant", "content": None, "odd": 1}
    assert sent == {"model": "m", "temperature": 1.0, "max_tokens": 4, "seed": 3, "stop": ["\n"]}


async def test_an_endpoint_that_knows_no_seed_is_asked_without_from_then_on() -> None:
    refused = status(422, '{"detail": "extra_forbidden: seed"}')
    newer = status(400, "Use 'max_completion_tokens' instead")
    async with ChatServer(refused, newer) as server:
        chat = client(server)
        assert (await chat.turn(HI, sampling={"seed": 3})).text == "Score: 7"
        await chat.turn(HI, sampling={"seed": 4})
    assert ["seed" in sent for sent in server.bodies] == [True, False, False, False]
    assert ["max_tokens" in sent for sent in server.bodies] == [True, True, False, False]
    assert chat.num_calls == 4


async def test_a_refusal_that_does_not_name_the_seed_changes_no_request() -> None:
    async with ChatServer(status(400, "the conversation is about birdseed")) as server:
        chat = client(server)
        with pytest.raises(NoAnswer, match="birdseed"):
            await chat.turn(HI, sampling={"seed": 3})
        await chat.turn(HI, sampling={"seed": 4})
    assert [sent["seed"] for sent in server.bodies] == [3, 4]


async def test_tokens_that_are_not_reported_are_told_as_estimates() -> None:
    async with ChatServer(body(json.dumps(answer("four", usage=None)))) as server:
        chat = client(server)
        guessed, known = await chat.turn(HI), await chat.turn(HI)
    assert (guessed.is_counted, guessed.completion_tokens) == (False, 1)
    assert known.is_counted


def redirect(to: str) -> Fault:
    return lambda request: web.Response(status=307, headers={"Location": to})


async def test_a_redirect_is_told_and_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    async with ChatServer() as other, ChatServer(redirect(f"{other.url}/chat/completions")) as server:
        with pytest.raises(NoAnswer, match=f"it redirects to '{other.url}/chat/completions'") as caught:
            await client(server).turn(HI)
        assert caught.value.failure.status == 307
    assert (len(server.bodies), other.bodies) == (1, [])


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * 65536)


async def endless_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    piece = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 60000}}]})
    while True:
        await response.write(f"data: {piece}\n\n".encode())


@pytest.mark.parametrize("fault", [endless, endless_stream])
async def test_an_answer_without_end_is_given_up(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_ANSWER", 300_000)
    async with ChatServer(fault) as server:
        with pytest.raises(NoAnswer, match="its answer is longer than") as caught:
            await client(server, stream=fault is endless_stream).complete(HI)
    assert not caught.value.failure.transient
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "fault",
    [
        lambda request: web.Response(text="<html>log in</html>", content_type="text/html"),
        lambda request: web.Response(body=b"\xff\xfe\x00", content_type="application/octet-stream"),
        body('{"choices": [{"message": {"content": "x"'),
        body("[" * 100_000),
    ],
    ids=["a page", "bytes", "torn", "nested"],
)
async def test_what_is_no_json_is_asked_for_again(fault: Fault) -> None:
    async with ChatServer(fault) as server:
        assert (await client(server).turn(HI)).text == "Score: 7"
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    "message",
    [5, "text", [], {"tool_calls": [{"id": "c"}]}, {"tool_calls": ["look"]}, {"content": {"text": "x"}}],
)
async def test_what_is_no_message_is_the_endpoint_s_fault(message: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with ChatServer(body(json.dumps({"choices": [{"message": message}]}))) as server:
        with pytest.raises(NoAnswer, match="its answer holds no text"):
            await client(server).turn(HI, tools=tools)


async def test_arguments_of_many_levels_are_the_model_s_mistake() -> None:
    deep = '{"a":' * 70 + "1" + "}" * 70
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": deep}}
    async with ChatServer(speak=lambda prompt: {"content": None, "tool_calls": [call]}) as server:
        [made] = (await client(server).turn(HI, tools=[call])).tool_calls
    assert made.arguments == {}
    assert made.error == "the arguments of look have more than 64 levels of objects and lists"


async def test_a_key_is_sent_as_the_guard_wants_it_and_told_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = HttpGuard(api_keys=("right-key",))
    async with ChatServer(status(400, "wrong-key is odd"), guard=guard) as server:
        monkeypatch.setenv("MY_KEY", "wrong-key\n")
        with pytest.raises(NoAnswer, match="status 401") as caught:
            await client(server, api_key_env="MY_KEY").turn(HI)
        assert caught.value.failure.status == 401
        assert server.bodies == []  # the guard stands before what answers
        monkeypatch.setenv("MY_KEY", "right-key")
        server.faults = [status(400, "right-key is odd")]
        with pytest.raises(NoAnswer) as caught:
            await client(server, api_key_env="MY_KEY").turn(HI)
        assert "(the key) is odd" in str(caught.value)
        assert "right-key" not in str(caught.value)
        assert (await client(server, api_key_env="MY_KEY").turn(HI)).text == "Score: 7"
        monkeypatch.setenv("MY_KEY", "right\nkey")
        with pytest.raises(ConfigurationError, match="MY_KEY holds no key") as broken:
            await client(server, api_key_env="MY_KEY").turn(HI)
        assert "right" not in str(broken.value)


@pytest.mark.parametrize(
    "said",
    [
        '{"error": {"code": "context_length_exceeded"}}',
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
        '{"error": {"type": "exceed_context_size_error"}}',
    ],
)
async def test_a_conversation_that_does_not_fit_is_told_apart(said: str) -> None:
    async with ChatServer(status(400, said), status(400, "no")) as server:
        chat = client(server)
        for exceeds in (True, False):
            with pytest.raises(NoAnswer) as caught:
                await chat.turn(HI)
            assert caught.value.failure.exceeds_context is exceeds
