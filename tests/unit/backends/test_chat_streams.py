"""Answers in pieces over real sockets: what is heard, when it is asked again, what it costs."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web
from chat_server import ChatServer, Fault, answer, status

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.openai.responses import ChatAnswer, StreamedAnswer
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import BackendError, BudgetExceeded
from stateset_agents.types.messages import Message

HI = [Message(role="user", content="hi" * 10)]
REQUEST = {"messages": [{"role": "user", "content": "hi" * 10}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 3}}
End = Callable[[web.StreamResponse, web.Request], Awaitable[None]]


def client(url: str, **settings: Any) -> ChatClient:
    return ChatClient(url, "m", **{"backoff": 0.001, "timeout": 5.0, **settings})


def chunk_of(words: str | None = None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": words}, "finish_reason": finish}]}


def sse(*events: Any) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


WHOLE = (chunk_of(""), chunk_of("Score"), chunk_of(": 7"), chunk_of(finish="stop"), USAGE, "[DONE]")


def streams(*events: Any, end: End | None = None) -> Fault:
    """Sends these events, then does what `end` does."""

    async def fault(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for event in events:
            await response.write(sse(event))
        if end is not None:
            await end(response, request)
        return response

    return fault


async def breaks_off(response: web.StreamResponse, request: web.Request) -> None:
    assert request.transport is not None
    request.transport.close()


async def ends(response: web.StreamResponse, request: web.Request) -> None:
    """As if all had been said."""


async def torn(response: web.StreamResponse, request: web.Request) -> None:
    await response.write(b'data: {"choices": [{"del\n\n')


async def tells(response: web.StreamResponse, request: web.Request) -> None:
    await response.write(sse({"error": {"message": "no memory left", "type": "server_error", "code": 500}}))


async def only_pings(response: web.StreamResponse, request: web.Request) -> None:
    for _ in range(1000):
        await response.write(b": still here\n\n")
        await asyncio.sleep(0.02)


async def hangs(response: web.StreamResponse, request: web.Request) -> None:
    await asyncio.sleep(60)


BROKEN = {
    "cut": (breaks_off, "ClientPayloadError"),
    "ended": (ends, "its answer broke off"),
    "bad JSON": (torn, r"a piece of its answer is not JSON: .*del'"),
    "error event": (tells, "it says 'no memory left'"),
    "silence": (hangs, r"no \w+ within 0.5 s"),
    "pings": (only_pings, r"no \w+ within 0.5 s"),
}


async def pieces_of(chat: ChatClient, into: list[str | ChatAnswer] | None = None) -> list[str | ChatAnswer]:
    received = [] if into is None else into
    async for piece in chat.stream(HI):
        received.append(piece)  # what came before an error is wanted, too
    return received


async def test_our_own_endpoint_streams_an_agent_s_words() -> None:
    agent = MultiTurnAgent(AgentConfig(model_name="mine"), backend=ScriptedBackend(["Grüße ✓, ok"] * 2))
    async with agent, AgentServer(agent, name="m") as server:
        chat = client(server.url)
        *pieces, complete = await pieces_of(chat)
        assert len(pieces) > 5
        assert isinstance(complete, ChatAnswer)
        assert "".join(map(str, pieces)) == complete.text == "Grüße ✓, ok"
        assert complete == await client(server.url).complete(HI)  # asked for in one piece
        assert chat.num_tokens == complete.prompt_tokens + complete.completion_tokens


async def test_pieces_are_asked_for_and_heard_as_they_come() -> None:
    async with ChatServer(streams(*WHOLE)) as server:
        chat = client(server.url, max_new_tokens=9)
        assert await pieces_of(chat) == [
            "Score",
            ": 7",
            ChatAnswer(text="Score: 7", finish_reason="stop", prompt_tokens=11, completion_tokens=3),
        ]
    assert server.bodies[0]["stream"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert server.bodies[0]["max_tokens"] == 9
    assert (chat.num_calls, chat.num_tokens) == (1, 14)


@pytest.mark.parametrize("kind", BROKEN)
async def test_before_the_first_words_it_is_asked_again_and_after_them_never(kind: str) -> None:
    end, reason = BROKEN[kind]
    settings = {"timeout": 0.5 if "within" in reason else 5.0}
    async with ChatServer(streams(chunk_of(""), end=end), streams(*WHOLE)) as server:
        chat = client(server.url, **settings)
        assert [piece for piece in await pieces_of(chat) if isinstance(piece, str)] == ["Score", ": 7"]
        assert chat.num_calls == len(server.bodies) == 2
        assert chat.num_tokens == 5 + 14  # what was read in vain, and the answer
    async with ChatServer(streams(chunk_of("Sco"), end=end), streams(*WHOLE)) as server:
        chat = client(server.url, **settings)
        received: list[str | ChatAnswer] = []
        with pytest.raises(BackendError, match=rf"^{server.url} broke off after 3 characters: {reason}"):
            await pieces_of(chat, received)
        assert received == ["Sco"]
        assert chat.num_calls == len(server.bodies) == 1
        assert chat.num_tokens == 5 + 1
    async with ChatServer(streams(chunk_of("Sco"), end=end), streams(*WHOLE)) as server:
        chat = client(server.url, stream=True, **settings)
        assert (await chat.complete(HI)).text == "Score: 7"  # nobody has heard of the first
        assert len(server.bodies) == 2


async def test_after_the_last_attempt_the_cause_is_told_and_what_will_not_pass_at_once() -> None:
    async with ChatServer(streams(end=tells), streams(end=torn)) as server:
        with pytest.raises(
            BackendError, match=r"gave no answer \(2 attempts\): a piece of its answer is not"
        ):
            await pieces_of(client(server.url, max_attempts=2))
    lasting = [
        ({"error": {"message": "too long", "type": "invalid_request_error"}}, "it says 'too long'"),
        ({"error": {"message": "who are you", "code": 401}}, "it says 'who are you'"),
        ({"error": "broken"}, None),
        ([1, 2], r"its answer holds no text: \[1, 2\]"),
        ({"choices": 7}, "its answer holds no text"),
        (chunk_of(finish="tool_calls"), "its answer holds no text"),
    ]
    for event, reason in lasting:
        async with ChatServer(streams(event, "[DONE]"), streams(*WHOLE)) as server:
            if reason is None:
                await pieces_of(client(server.url))
                assert len(server.bodies) == 2
                continue
            with pytest.raises(BackendError, match=f"gave no answer: {reason}"):
                await pieces_of(client(server.url))
            assert len(server.bodies) == 1


async def test_a_status_is_as_for_a_whole_answer_and_a_whole_answer_is_one_piece() -> None:
    complete = web.json_response(answer("Score: 8"))
    async with ChatServer(status(503), lambda _: complete) as server:
        chat = client(server.url)
        first, result = await pieces_of(chat)
        assert first == "Score: 8"
        assert isinstance(result, ChatAnswer)
        assert (result.text, chat.num_tokens, len(server.bodies)) == ("Score: 8", 15, 2)


async def test_a_long_answer_may_take_longer_than_the_time_limit_when_it_comes_in_pieces() -> None:
    async def slowly(response: web.StreamResponse, request: web.Request) -> None:
        for _ in range(7):
            await asyncio.sleep(0.2)
            await response.write(sse(chunk_of("a")))
        await response.write(sse(chunk_of(finish="stop")))

    async with ChatServer(streams(end=slowly)) as server:
        result = await client(server.url, timeout=1.0, max_attempts=1, stream=True).complete(HI)
        assert result.text == "a" * 7
        assert (result.prompt_tokens, result.completion_tokens) == (5, 2)  # it does not say what it used


async def test_leaving_the_loop_ends_the_request_and_counts_what_was_heard() -> None:
    left = asyncio.Event()

    async def until_left(response: web.StreamResponse, request: web.Request) -> None:
        try:
            while True:
                await response.write(sse(chunk_of("word")))
                await asyncio.sleep(0.01)
        finally:
            left.set()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with ChatServer(streams(end=until_left)) as server:
            chat = client(server.url)
            async with aclosing(chat.stream(HI)) as pieces:
                async for piece in pieces:
                    assert piece == "word"
                    break
            await asyncio.wait_for(left.wait(), 10)
            assert all(shared.session is None for shared in chat._by_loop.values())
        gc.collect()
    assert chat.num_tokens >= 5 + 1


async def test_streams_are_paid_from_the_budget() -> None:
    async with ChatServer(streams(*WHOLE), streams(chunk_of("Sco"), end=ends)) as server:
        chat = client(server.url, max_tokens=20)
        await pieces_of(chat)
        with pytest.raises(BackendError, match="broke off after 3 characters"):
            await pieces_of(chat)
        with pytest.raises(BudgetExceeded, match="the budget of 20 tokens"):  # 14 and 6
            await pieces_of(chat)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_wherever_the_network_cuts_the_bytes_the_answer_is_the_same(newline: str) -> None:
    events = [chunk_of("Gr"), chunk_of("üße"), chunk_of(" ✓\u2028\x85"), chunk_of(finish="length"), USAGE]
    texts = [json.dumps(event, ensure_ascii=False) for event in events]
    split = texts[1].replace(': "', ':\ndata: "')  # one event may have several lines
    lines = [
        "event: x",
        f"data:{texts[0]}",
        "",
        ": ping",
        "",
        f"data: {split}",
        "",
        *(line for text in texts[2:] for line in (f"data: {text}", "")),
        "data: [DONE]",
    ]
    raw = newline.join("\n".join(lines).split("\n")).encode()
    for size in range(1, len(raw) + 1):
        received: list[str] = []
        stream = StreamedAnswer(REQUEST, received.append)
        for start in range(0, len(raw), size):
            stream.feed(raw[start : start + size])
        result = stream.end()
        assert isinstance(result, ChatAnswer), result
        assert result.text == "".join(received) == "Grüße ✓\u2028\x85"
        assert (result.finish_reason, result.prompt_tokens, result.completion_tokens) == ("length", 11, 3)
        assert received == ["Gr", "üße", " ✓\u2028\x85"]
