"""An OpenAI-compatible endpoint over real sockets: what is tried again, what is told, what it costs."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from chat_server import ChatServer, Fault, answer, body, cut, hang, status

from stateset_agents.backends.openai.client import ChatClient, NoAnswer
from stateset_agents.backends.openai.responses import ChatAnswer, _seconds, read_answer
from stateset_agents.types.errors import BackendError, BudgetExceeded, ConfigurationError
from stateset_agents.types.messages import Message


def client(server: ChatServer, **settings: Any) -> ChatClient:
    return ChatClient(server.url, "m", **{"backoff": 0.001, "timeout": 5.0, **settings})


async def test_a_conversation_is_asked_as_the_api_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with ChatServer(speak=lambda prompt: f"you said {prompt}") as server:
        chat = client(server, api_key_env="JUDGE_KEY", temperature=0.5, max_new_tokens=9)
        result = await chat.complete(
            [Message(role="system", content="be brief"), Message(role="user", content="hi ✓")]
        )
        assert await chat("again") == "you said again"
        await client(server, api_key_env=None)("no key")
    assert result.text == "you said hi ✓"
    assert (result.prompt_tokens, result.completion_tokens, result.finish_reason) == (10, 5, "stop")
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi ✓"}],
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in server.headers[2]
    assert (chat.num_calls, chat.num_tokens) == (2, 30)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def calling(*arguments: str) -> dict[str, Any]:
    """What a model says that calls `look` once with each of the arguments."""
    calls = [
        {"id": f"c{place}", "type": "function", "function": {"name": "look", "arguments": text}}
        for place, text in enumerate(arguments)
    ]
    return {"content": None, "tool_calls": calls}


async def test_tools_are_offered_and_their_calls_come_back() -> None:
    async with ChatServer(speak=lambda prompt: calling('{"at": "it"}', '{"at": ', "[1]")) as server:
        chat = client(server, stream=True)  # an answer with tools comes whole all the same
        result = await chat.complete([Message(role="user", content="look!")], tools=[TOOL])
        with pytest.raises(BackendError, match="holds no text"):  # none was offered: it should not call
            await client(server)("look!")
        with pytest.raises(ConfigurationError, match="give tools or on_text, not both"):
            await chat.complete([Message(role="user", content="x")], tools=[TOOL], on_text=print)
    assert server.bodies[0]["tools"] == [TOOL]
    assert "stream" not in server.bodies[0]
    assert "tools" not in server.bodies[1]
    good, torn, no_object = result.tool_calls
    assert (result.text, good.name, good.arguments, good.id, good.error) == (
        "",
        "look",
        {"at": "it"},
        "c0",
        None,
    )
    for call in (torn, no_object):
        assert (call.arguments, call.error) == ({}, "the arguments of look are not a JSON object")


@pytest.mark.parametrize(
    "fault",
    [
        *[status(429), status(500), status(503), status(408), body('{"choices": [{"mess'), cut],
        body('{"error": {"code": 502, "message": "Provider returned error"}, "user_id": "u"}'),
        body('{"error": {"code": "429", "message": "slow down"}, "choices": []}'),
        body('{"choices": [{"error": {"code": 502, "message": "down"}, "message": {"content": "half"}}]}'),
        body('{"error": "the model is loading"}'),
        body(json.dumps(answer("x", choices=[]))),
        body('{"choices": null}'),
        body('{"object": "list"}'),
        body('{"choices": [{"finish_reason": "stop", "message": null}]}'),
        body('{"choices": [{"finish_reason": null, "message": {"content": null}}]}'),
        body('{"choices": [{"finish_reason": "error", "message": {"content": null}}]}'),
        body('{"choices": [{"finish_reason": "error", "message": {"content": "Score: 1"}}]}'),
    ],
)
async def test_what_may_pass_is_tried_again(fault: Fault) -> None:
    async with ChatServer(fault, fault) as server:
        assert await client(server)("hi") == "Score: 7"
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


async def test_content_may_be_a_list_of_parts() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Six sevens."}]}
    parts = [thought, {"type": "text", "text": "It is "}, {"type": "text", "text": "42."}]
    async with ChatServer(speak=lambda prompt: {"content": parts}) as server:
        result = await client(server).complete([Message(role="user", content="6 * 7?")])
    assert (result.text, result.reasoning) == ("It is 42.", "Six sevens.")


async def test_an_error_within_an_answer_says_that_the_conversation_is_too_long() -> None:
    for error in (
        {"code": 400, "message": "This model's maximum context length is 4096 tokens"},
        {"code": "context_length_exceeded", "message": "too long", "type": "server_error"},
    ):
        async with ChatServer(body(json.dumps({"error": error}))) as server:
            with pytest.raises(NoAnswer) as caught:
                await client(server)("hi")
        assert caught.value.failure.exceeds_context
        assert len(server.bodies) == 1


async def test_a_slow_answer_is_given_up_and_tried_again() -> None:
    async with ChatServer(hang) as server:
        assert await client(server, timeout=0.2)("hi") == "Score: 7"
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(401, "bad key"), "status 401: 'bad key'"),
        (status(404, '{"error":\n "no model m"}'), 'status 404: \'{"error": "no model m"}\''),
        (body("[]"), "its answer holds no text"),
        (body('{"error": {"code": 401, "message": "no credits"}}'), "it says 'no credits'"),
        (body('{"error": {"message": "no m", "type": "invalid_request_error"}}'), "it says 'no m'"),
        (
            body('{"error": {"code": 400, "message": "maximum context length is 9"}}'),
            "it says 'maximum context",
        ),
        (body(json.dumps(answer({"content": None, "tool_calls": []}))), "its answer holds no text"),
        (body(json.dumps(answer({"content": [{"type": "audio"}]}))), "its answer holds no text"),
        (body(json.dumps(answer({"content": [{"type": "thinking", "thinking": 5}]}))), "holds no text"),
    ],
)
async def test_what_will_not_pass_is_told_at_once(fault: Fault, message: str) -> None:
    async with ChatServer(fault) as server:
        with pytest.raises(BackendError) as caught:
            await client(server)("hi")
        assert f"{server.url} gave no answer: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(server.bodies) == 1


async def test_an_address_that_cannot_work_is_not_tried_again() -> None:
    async with ChatServer() as server:
        for url in (server.url.replace("http:", "https:"), "http://127.0.0.1:99999/v1"):
            chat = ChatClient(url, "m", backoff=0.001)
            with pytest.raises(BackendError, match=r"gave no answer: (ClientConnectorSSL|Invalid)\w*Error: "):
                await chat("hi")
            assert chat.num_calls == 1


async def test_after_the_last_attempt_the_last_cause_is_told() -> None:
    async with ChatServer(*[status(500, "first")] * 2, status(503, "last")) as server:
        with pytest.raises(BackendError, match=r"no answer \(3 attempts\): status 503: 'last'"):
            await client(server, max_attempts=3)("hi")
    url = server.url
    with pytest.raises(BackendError, match=r"\(2 attempts\): Client\w*Error"):  # nobody listens any more
        await ChatClient(url, "m", max_attempts=2, backoff=0.001)("hi")


async def test_retry_after_is_honoured_by_all_calls() -> None:
    async with ChatServer(status(429, Retry_After="0.4")) as server:
        chat = client(server)
        first = asyncio.create_task(chat("a"))
        while not chat._not_before:  # noqa: ASYNC110  # until its refusal has come back
            await asyncio.sleep(0.005)
        await asyncio.gather(first, chat("b"))
    refused = server.times[0]
    assert all(time - refused >= 0.39 for time in server.times[1:])
    assert len(server.times) == 3


async def test_a_server_that_asks_for_too_long_a_wait_is_given_up() -> None:
    async with ChatServer(status(429, "quota", Retry_After="3600")) as server:
        with pytest.raises(BackendError, match=r"status 429: 'quota'; it asks to wait 3600 s"):
            await client(server)("hi")
    assert len(server.bodies) == 1


def test_retry_after_may_be_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert _seconds(soon) == pytest.approx(30, abs=2)
    assert _seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert (_seconds("7"), _seconds("-3"), _seconds("soon"), _seconds(None)) == (
        7,
        0,
        None,
        None,
    )
    assert _seconds("nan") is None


async def test_waits_double_and_are_drawn_at_random() -> None:
    async with ChatServer(*[status(500)] * 4) as server:
        await client(server, backoff=0.04)("hi")
    waits = [later - sooner for sooner, later in zip(server.times, server.times[1:], strict=False)]
    for doubled, wait in enumerate(waits):
        assert wait >= 0.5 * 0.04 * 2**doubled
    assert sum(waits) >= 0.5 * 0.04 * 15


REFUSED = json.dumps(
    {
        "error": {
            "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "unsupported_parameter",
        }
    }
)
"""What OpenAI's newest models say."""


async def test_the_limit_of_tokens_is_sent_under_the_name_that_the_endpoint_takes() -> None:
    async with ChatServer(status(400, REFUSED)) as server:
        chat = client(server, max_new_tokens=9, temperature=None, max_calls=3)
        assert await chat("a") == await chat("b") == "Score: 7"
        assert chat.num_calls == 3  # the refused request is one
        await client(server, token_limit="max_completion_tokens")("c")
    names = [sorted(name for name in body if name not in ("model", "messages")) for body in server.bodies]
    assert names[:3] == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]
    assert names[3] == ["max_completion_tokens", "temperature"]
    assert server.bodies[1]["max_completion_tokens"] == 9


async def test_a_name_that_was_asked_for_is_kept() -> None:
    async with ChatServer(status(400, REFUSED)) as server:
        with pytest.raises(BackendError, match="status 400"):
            await client(server, token_limit="max_tokens")("a")
    assert len(server.bodies) == 1


async def test_calls_wait_together_while_an_endpoint_is_down() -> None:
    async with ChatServer(None, *[status(503, "starting")] * 5) as server:
        chat = client(server, max_attempts=20, breaker_failures=4, breaker_pause=0.05)
        await chat("first")
        await asyncio.gather(*(chat(str(number)) for number in range(4)))
    # the four fail together; then one at a time asks, a second time in vain, and the others follow it
    assert len(server.bodies) == 1 + 4 + 1 + 4


async def test_an_endpoint_that_stays_down_fails_all_calls_after_a_while() -> None:
    async with ChatServer(None, *[status(503, "starting")] * 500) as server:
        settings = {"max_attempts": 99, "breaker_failures": 2, "breaker_pause": 0.02, "max_wait": 0.3}
        chat = client(server, **settings)
        await chat("first")
        results = await asyncio.gather(*(chat(str(number)) for number in range(5)), return_exceptions=True)
    assert len(server.bodies) < 20
    assert all(isinstance(result, BackendError) for result in results)
    assert "was waited for 0.3 s" in str(results[0])


async def test_requests_under_way_are_bounded() -> None:
    async with ChatServer() as server:
        server.delay = 0.02
        chat = client(server, max_concurrent=3)
        await asyncio.gather(*(chat(str(number)) for number in range(12)))
    assert server.most_together == 3


async def test_a_budget_ends_with_one_clear_error() -> None:
    async with ChatServer(status(500)) as server:
        chat = client(server, max_calls=3)
        assert await chat("a") == await chat("b") == "Score: 7"  # three requests, for one was tried again
        with pytest.raises(
            BudgetExceeded, match=r"^the budget of 3 calls for m at http.* is used up: raise max_calls"
        ):
            await chat("c")
        tokens = client(server, max_tokens=20)
        await tokens("a")
        await tokens("b")
        with pytest.raises(BudgetExceeded, match="the budget of 20 tokens"):
            await tokens("c")
    assert len(server.bodies) == 5
    assert issubclass(
        BudgetExceeded, ConfigurationError
    )  # it travels: nobody takes it for a failed conversation


async def test_tokens_are_estimated_where_the_endpoint_does_not_count() -> None:
    silent = json.dumps({"choices": [{"message": {"content": "x" * 40}}]})
    async with ChatServer(body(silent)) as server:
        chat = client(server)
        await chat("y" * 80)
    assert chat.num_tokens == 20 + 10


async def test_nothing_is_left_open() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with ChatServer(status(401), hang) as server:
            chat = client(server)
            with pytest.raises(BackendError):
                await chat("hi")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(chat("hi"), timeout=0.1)
            await chat("hi")
            assert all(shared.session is None for shared in chat._by_loop.values())
        gc.collect()


def test_a_client_outlives_an_event_loop() -> None:
    chats: list[ChatClient] = []

    async def ask() -> str:
        async with ChatServer() as server:
            if not chats:
                chats.append(client(server))
            chats[0].url = server.url
            return await chats[0]("hi")

    assert asyncio.run(ask()) == asyncio.run(ask()) == "Score: 7"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "localhost:8000"}, "url must be http:// or https://, got 'localhost:8000'"),
        ({"model": " "}, "model must be named"),
        ({"max_attempts": 0}, "max_attempts: input should be greater than or equal to 1, got 0"),
        ({"max_attempts": True}, "max_attempts: input should be a valid integer, got True"),
        ({"max_calls": -1}, "max_calls: input should be greater than or equal to 0, got -1"),
        ({"temperature": -0.1}, r"temperature: input should be greater than or equal to 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature: input should be a finite number, got nan"),
        ({"timeout": 0}, "timeout: input should be greater than 0, got 0"),
        ({"timout": 5}, r"ChatSettings has no field 'timout' \(did you mean 'timeout'\?\)"),
        ({"token_limit": "max"}, "token_limit: input should be 'auto', 'max_tokens' or 'max_comp"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChatClient(**{"url": "http://x/v1", "model": "m", **settings})


@pytest.mark.parametrize(
    ("function", "arguments", "error"),
    [
        ({"parameters": {"at": "K27"}}, {"at": "K27"}, None),
        ({"args": '{"at": "K27"}'}, {"at": "K27"}, None),
        ({"at": "K27"}, {}, "the call of look has no arguments, and 'at' beside its name"),
        ({"arguments": "{}", "args": "{}"}, {}, "the arguments of look are not a JSON object"),
        ({}, {}, None),
    ],
)
def test_an_endpoint_s_call_never_loses_its_arguments(
    function: dict[str, Any], arguments: dict[str, Any], error: str | None
) -> None:
    message = {"content": None, "tool_calls": [{"id": "a", "function": {"name": "look", **function}}]}
    answer = read_answer(
        json.dumps({"choices": [{"message": message}]}), {"tools": [{}], "messages": []}, may_be_empty=True
    )
    assert isinstance(answer, ChatAnswer)
    (call,) = answer.tool_calls
    assert (call.arguments, call.error) == (arguments, error)
