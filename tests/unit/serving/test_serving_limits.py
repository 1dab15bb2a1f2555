"""What a server takes on at once: its queue, each limit from both sides, requests that never end."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import openai
import pytest

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli import serve
from stateset_agents.cli.main import command_parser
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.limits import AnswerQueue, BodyMemory, Limits
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import ConfigurationError

HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(script, *, keys=(), delay=0.0, max_new_tokens=256, **limits):
    """A server with these limits, and a function that makes a client for one of its keys."""
    backend = ScriptedBackend(script, context_length=5000, delay=delay)
    config = AgentConfig(model_name="mine", max_new_tokens=max_new_tokens)
    clients = []

    def client(key="none", **settings):
        clients.append(openai.AsyncOpenAI(base_url=server.url, api_key=key, max_retries=0, **settings))
        return clients[-1].chat.completions

    async with (
        MultiTurnAgent(config, backend=backend) as agent,
        AgentServer(agent, api_keys=keys, limits=Limits(**limits)) as server,
    ):
        try:
            yield client, server
        finally:
            for item in clients:
                await item.close()


async def run_order(queue, clients):
    """In which order these clients' answers run, one after the other."""
    ran = []

    async def answer(client):
        with queue.entries(client) as (entry,):
            await entry.wait()
            ran.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*map(answer, clients))
    return "".join(ran)


async def test_clients_that_wait_are_served_in_turn():
    queue = AnswerQueue(Limits(max_running=1))
    assert await run_order(queue, "aaaaabbc") == "aabcabaa"
    assert (queue.num_running, queue.num_waiting) == (0, 0)


async def test_a_client_may_run_so_many_answers_and_leaves_room_for_others():
    queue = AnswerQueue(Limits(max_running=3, max_running_per_client=2))
    with queue.entries("a", 4) as entries:
        assert (queue.num_running, queue.num_waiting) == (2, 2)
        with queue.entries("b") as (of_other,):
            await asyncio.wait_for(of_other.wait(), 1)
            assert queue.num_running == 3
        entries[0].release()
        entries[0].release()
        assert (queue.num_running, queue.num_waiting) == (2, 1)
    assert (queue.num_running, queue.num_waiting) == (0, 0)


async def test_a_cancelled_answer_leaves_the_queue():
    queue = AnswerQueue(Limits(max_running=1))

    async def waits():
        with queue.entries("b") as (entry,):
            await entry.wait()

    with queue.entries("a"):
        waiting = asyncio.create_task(waits())
        await asyncio.sleep(0)
        assert queue.num_waiting == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert queue.num_waiting == 0
    assert queue.num_running == 0


@pytest.mark.parametrize(
    ("limits", "clients", "words"),
    [
        ({"max_waiting": 2}, "bcd", "2 answers wait here, and more than 2 may"),
        ({"max_waiting_per_client": 2}, "bbb", "2 answers of yours wait, and more than 2 may"),
        ({"max_waiting": 0}, "b", "0 answers wait here"),
    ],
)
async def test_more_than_may_wait_are_refused_with_retry_after(limits, clients, words):
    queue = AnswerQueue(Limits(max_running=1, **limits))
    with queue.entries("a"):
        *allowed, last = clients
        waiting = [queue.entries(client) for client in allowed]
        for item in waiting:
            item.__enter__()
        with pytest.raises(ApiError, match=words) as caught, queue.entries(last):
            pass
        assert caught.value.status == 429
        assert 1 <= int(caught.value.headers["Retry-After"]) <= 60
        for item in waiting:
            item.__exit__(None, None, None)


async def test_a_client_is_told_to_wait_for_its_own_answers_not_for_all_that_may_run():
    queue = AnswerQueue(Limits(max_running=64, max_running_per_client=2, max_waiting_per_client=20))
    queue.on_released("before", 2.0)  # seconds that an answer takes
    with queue.entries("a", 22), pytest.raises(ApiError) as caught, queue.entries("a"):
        pass
    assert caught.value.headers["Retry-After"] == "22"  # 20 wait, two at a time, and those that run


async def test_more_answers_than_could_ever_run_are_refused_for_good():
    async with served(lambda request: "ok", max_running=2, max_waiting=1) as (client, _):
        assert len((await client().create(model="mine", messages=HI, n=3)).choices) == 3
        with pytest.raises(openai.BadRequestError, match="n must be less than or equal to 3"):
            await client().create(model="mine", messages=HI, n=4)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux ends such connections")
async def test_a_client_that_reads_none_of_its_answers_is_disconnected():
    async with served(lambda request: "ok", read_timeout=1.0) as (client, server):
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.setblocking(False)
        loop = asyncio.get_running_loop()
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        await loop.sock_connect(deaf, ("127.0.0.1", port))
        clients = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000

        async def until_it_ends():
            while True:
                await loop.sock_sendall(deaf, clients)
                await asyncio.sleep(0.05)

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(until_it_ends(), 15)
        deaf.close()
        assert (await client().create(model="mine", messages=HI)).choices


async def test_bodies_that_wait_may_have_so_many_bytes_together():
    long = [{"role": "user", "content": "x" * 2_000}]
    async with served(lambda request: "ok", delay=0.3, max_running=1, max_held=20_000) as (client, _):
        chat = client()
        work = [chat.create(model="mine", messages=long) for _ in range(4)]
        results = await asyncio.gather(*work, return_exceptions=True)
        refused = [item for item in results if isinstance(item, openai.RateLimitError)]
        assert len(refused) == 2
        assert "of them yours, and more do not fit: ask again later" in refused[0].message
        assert refused[0].response.headers["Retry-After"] == "1"
        for _ in range(3):  # what was held is let go
            assert (await chat.create(model="mine", messages=long)).choices


def test_several_bodies_of_a_client_have_a_quarter_of_the_room_and_all_together_the_whole():
    memory = BodyMemory(1000)

    def fits(*bodies):
        with ExitStack() as stack:
            try:
                for client, size in bodies:
                    stack.enter_context(memory.body(client))(size)
            except ApiError:
                return False
        return True

    assert fits(("a", 1000))
    assert not fits(("a", 1001))
    assert fits(("a", 125), ("a", 125), ("b", 750))
    assert not fits(("a", 125), ("a", 126))
    assert not fits(("a", 125), ("a", 125), ("b", 751))
    assert fits(("a", 1000))  # nothing stays held


async def test_a_full_server_answers_429_with_retry_after():
    async with served(lambda request: "ok", delay=0.2, max_running=1, max_waiting=1) as (client, _):
        chat = client()
        work = [chat.create(model="mine", messages=HI) for _ in range(5)]
        results = await asyncio.gather(*work, return_exceptions=True)
        refused = [item for item in results if isinstance(item, openai.RateLimitError)]
        assert len(refused) == 3
        assert {item.code for item in refused} == {"too_many_requests"}
        assert all(int(item.response.headers["Retry-After"]) >= 1 for item in refused)
        assert (await chat.create(model="mine", messages=HI)).choices[0].message.content == "ok"


async def test_openai_s_client_comes_back_by_itself():
    async with served(lambda request: "ok", delay=0.1, max_running=1, max_waiting=0) as (_, server):
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=8) as patient:
            work = [patient.chat.completions.create(model="mine", messages=HI) for _ in range(3)]
            answers = await asyncio.gather(*work)
        assert [answer.choices[0].message.content for answer in answers] == ["ok"] * 3


async def test_one_client_s_flood_leaves_room_for_another_s_answer():
    gate = asyncio.Event()

    async def script(request):
        if "long" in request.text:
            await gate.wait()
        return "ok"

    long = [{"role": "user", "content": "a long one"}]
    async with served(script, keys=("alice", "bob"), max_running=6, max_running_per_client=4) as (
        client,
        server,
    ):
        alice, bob = client("alice", timeout=60), client("bob", timeout=60)
        work = [asyncio.ensure_future(alice.create(model="mine", messages=long)) for _ in range(60)]
        for _ in range(1000):
            if server._queue.num_waiting == 56:
                break
            await asyncio.sleep(0.02)
        answer = await asyncio.wait_for(bob.create(model="mine", messages=HI), 30)
        assert answer.choices[0].message.content == "ok"
        assert (server._queue.num_running, server._queue.num_waiting) == (4, 56)
        gate.set()
        answers = await asyncio.wait_for(asyncio.gather(*work), 60)
        assert [answer.choices[0].message.content for answer in answers] == ["ok"] * 60


async def test_without_keys_of_their_own_clients_are_told_apart_by_address():
    async with served(lambda request: "ok", delay=0.3, max_running=2, max_running_per_client=1) as (
        _,
        server,
    ):

        async def ask(address):
            connector = aiohttp.TCPConnector(local_addr=(address, 0))
            since = time.monotonic()
            async with (
                aiohttp.ClientSession(connector=connector) as http,
                http.post(f"{server.url}/chat/completions", json={"messages": HI}) as answer,
            ):
                assert answer.status == 200
            return time.monotonic() - since

        *same, of_other = await asyncio.gather(*map(ask, ["127.0.0.1"] * 4 + ["127.0.0.2"]))
        assert max(same) > 1.1
        assert of_other < 0.9


async def test_an_answer_has_at_most_so_many_tokens():
    async with served(lambda request: "x" * 100, max_output_tokens=10) as (client, _):
        chat = client()
        for fields in ({}, {"max_tokens": 10}, {"max_completion_tokens": 10}):
            answer = await chat.create(model="mine", messages=HI, **fields)
            assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")
        for field in ("max_tokens", "max_completion_tokens"):
            with pytest.raises(openai.BadRequestError, match="less than or equal to 10, got 11") as caught:
                await chat.create(model="mine", messages=HI, **{field: 11})
            assert caught.value.param == field


async def test_without_that_limit_the_context_is_it():
    async with served(lambda request: "x" * 9000) as (client, _):
        await client().create(model="mine", messages=HI, max_tokens=5000)
        with pytest.raises(openai.BadRequestError, match="less than or equal to 5000"):
            await client().create(model="mine", messages=HI, max_tokens=5001)


async def test_a_client_that_disconnects_leaves_the_queue():
    gate = asyncio.Event()

    async def script(request):
        await gate.wait()
        return "ok"

    async with served(script, max_running=1) as (client, server):
        work = [asyncio.ensure_future(client().create(model="mine", messages=HI)) for _ in range(3)]
        for _ in range(500):
            if server._queue.num_waiting == 2:
                break
            await asyncio.sleep(0.01)
        assert (server._queue.num_running, server._queue.num_waiting) == (1, 2)
        for item in work:
            item.cancel()
        for _ in range(500):
            if server._queue.num_running + server._queue.num_waiting == 0:
                break
            await asyncio.sleep(0.01)
        gate.set()
        assert (await client().create(model="mine", messages=HI)).choices[0].message.content == "ok"


async def test_a_request_has_at_most_so_many_answers():
    async with served(lambda request: "ok", max_choices=3) as (client, _):
        assert len((await client().create(model="mine", messages=HI, n=3)).choices) == 3
        with pytest.raises(openai.BadRequestError, match="n must be less than or equal to 3, got 4"):
            await client().create(model="mine", messages=HI, n=4)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def test_six_hundred_half_sent_requests_end_and_others_are_answered_meanwhile():
    async with served(lambda request: "ok", read_timeout=1.5) as (client, server):
        port = int(server.url.split(":")[2].split("/")[0])
        halves = [HEAD + b"Content-Length: 100\r\n\r\n{", HEAD, b"P", b""]

        async def half(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(halves[number % 4])
            try:
                received = await reader.read()  # to its end
            except ConnectionResetError:  # an end, too: of one whose bytes nobody has looked at yet
                received = b""
            writer.close()
            return received

        since = time.monotonic()
        work = asyncio.gather(*map(half, range(600)))
        await asyncio.sleep(0.2)
        assert (await client().create(model="mine", messages=HI)).choices[0].message.content == "ok"
        async with asyncio.timeout(20):
            received = await work
        assert time.monotonic() - since > 1.4
        answered = [text for text in received if text]
        assert 100 < len(answered) <= 150
        assert all(text.startswith(b"HTTP/1.1 408") and b"request_timeout" in text for text in answered)


async def test_a_body_that_comes_slowly_but_in_time_is_read():
    async with served(lambda request: "ok", read_timeout=5) as (_, server):
        port = int(server.url.split(":")[2].split("/")[0])
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for entry in range(0, len(body), 10):
            await asyncio.sleep(0.05)
            writer.write(body[entry : entry + 10])
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


def test_every_limit_is_a_flag_of_serve_and_reaches_the_server():
    parser = command_parser()
    wanted = {name: 3 + entry for entry, name in enumerate(Limits.model_fields)}
    flags = [word for name, value in wanted.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    args = parser.parse_args(["serve", "embedded:desk", *flags])
    assert serve.limits_of(args) == Limits(**wanted)
    assert serve.limits_of(parser.parse_args(["serve", "embedded:desk"])) == Limits()


@pytest.mark.parametrize("name", Limits.model_fields)
def test_a_limit_that_cannot_be_is_one_line(name):
    least = 1 if name != "max_waiting" and name != "max_waiting_per_client" else 0
    Limits(**{name: least})
    with pytest.raises(ConfigurationError, match=f"{name}: input should be greater than"):
        Limits(**{name: least - 1})


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--rest-after=-1", "--rest-after must be seconds from 0 on, got -1"),
        ("--rest-after=nan", "--rest-after must be seconds from 0 on, got nan"),
        ("--max-body=0", "--max-body must be bytes from 1 on, got 0"),
        ("--port=65536", "--port must be from 0 to 65535, got 65536"),
        ("--drain=inf", "--drain must be seconds from 0 on, got inf"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_before_the_model_is_loaded(flag, words):
    parser = command_parser()
    with pytest.raises(ConfigurationError, match=words):
        serve.run(parser.parse_args(["serve", "no-such-model", flag]))
