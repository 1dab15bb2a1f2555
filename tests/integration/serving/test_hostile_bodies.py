"""Bodies that are far too long, packed, deep or odd: refused in one line, while others are answered."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from warm_python import program_id, warm_python

import stateset_agents
from stateset_agents.backends.dialects.bodies import default_max_body
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.messages import MAX_VALUES, Message

MIB = 2**20
Body = tuple[bytes, dict[str, str], str]
"""With its headers and its path."""
JSON = {"Content-Type": "application/json"}


class Chat:
    """Bodies of a dialect; the others say the same in their own shape."""

    path = "chat/completions"
    error = frozenset({"message", "type", "param", "code"})
    messages = "messages"

    def __call__(self, content: Any, **fields: Any) -> bytes:
        return self.talk([{"role": "user", "content": content}], **fields)

    def talk(self, messages: list[Any], **fields: Any) -> bytes:
        return json.dumps({"messages": messages, "max_tokens": 4, **fields}).encode()

    def tool(self, parameters: Any) -> Any:
        return {"type": "function", "function": {"name": "look", "parameters": parameters}}

    def calls(self, *arguments: str) -> list[Any]:
        """The assistant's messages with calls that have these arguments."""
        calls = [{"id": "a", "function": {"name": "look", "arguments": text}} for text in arguments]
        return [{"role": "assistant", "tool_calls": calls}]

    def called(self, *arguments: str) -> bytes:
        """A conversation with such calls."""
        post = {"role": "user", "content": "hi"}
        return self.talk([post, *self.calls(*arguments), post])


class Response(Chat):
    path = "responses"
    messages = "input"

    def talk(self, messages: list[Any], **fields: Any) -> bytes:
        return json.dumps({"input": messages, "max_output_tokens": 4, **fields}).encode()

    def tool(self, parameters: Any) -> Any:
        return {"type": "function", "name": "look", "parameters": parameters}

    def calls(self, *arguments: str) -> list[Any]:
        call = {"type": "function_call", "call_id": "a", "name": "look"}
        return [{**call, "arguments": text} for text in arguments]


class Messages(Chat):
    path = "messages"
    error = frozenset({"message", "type"})

    def talk(self, messages: list[Any], **fields: Any) -> bytes:
        return json.dumps({"messages": messages, "max_tokens": 4, "model": "mine", **fields}).encode()

    def tool(self, parameters: Any) -> Any:
        return {"name": "look", "input_schema": parameters}

    def calls(self, *arguments: str) -> list[Any]:
        call = {"type": "tool_use", "id": "a", "name": "look"}
        return [{"role": "assistant", "content": [{**call, "input": json.loads(text)} for text in arguments]}]


chat = Chat()
DIALECTS = (chat, Response(), Messages())


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    backend = ScriptedBackend(lambda _: "fine", context_length=20_000)
    async with (
        MultiTurnAgent(AgentConfig(model_name="mine"), backend=backend) as agent,
        AgentServer(agent, **settings) as server,
        aiohttp.ClientSession(f"{server.url}/", headers=JSON) as http,
    ):
        yield http


async def post(
    http: aiohttp.ClientSession, body: bytes, dialect: Chat = chat, **headers: str
) -> tuple[int, str]:
    """Status, and the one line that is said."""
    async with http.post(dialect.path, data=body, headers={**JSON, **headers}) as response:
        data = await response.json()
        if response.status != 200:
            assert set(data["error"]) == dialect.error
            assert "\n" not in data["error"]["message"]
        return response.status, data["error"]["message"] if data.get("error") else "ok"


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


def long_arguments(number: int, item: str = "0,") -> str:
    return '{"a": [' + item * number + "0]}"


def bodies(say: Chat) -> list[tuple[bytes, int, str]]:
    """Each with the status and the words of its answer."""
    end = say("hi")[:-1]
    name = say.messages.encode()
    many = [
        (say.called(long_arguments(9_000)), 400, "the model's context 20000"),
        (say.called(long_arguments(500)), 200, "ok"),
    ]
    texts = [  # arguments as texts, which the body's count took for one value each
        (say.called(long_arguments(MAX_VALUES)), 400, "calls hold more than 20,000 JSON values"),
        (say.called(*[long_arguments(2_000, "{},")] * 12), 400, "calls hold more than 20,000 JSON values"),
    ]
    values = [
        (say.called(long_arguments(MAX_VALUES)), 400, "body holds more than 20,000 JSON values"),
        (say.called(*[long_arguments(2_000, "{},")] * 12), 400, "body holds more than 20,000 JSON values"),
    ]
    return [
        (say("hi", tools=[say.tool(nested(900))]), 400, "more than 64 levels of lists and objects"),
        (say("hi", tools=[say.tool(nested(62))]), 400, "more than 64 levels"),
        (say("hi", tools=[say.tool(nested(59))]), 200, "ok"),
        (b'{"%s": ' % name + b"[" * 100_000, 400, "more than 20,000 JSON values"),
        (b'{"%s": ' % name + b"[" * 10_000, 400, "more than 64 levels"),
        (end + b', "temperature": ' + b"9" * 400 + b"}", 400, "is too large"),
        (end + b', "seed": ' + b"9" * 5000 + b"}", 400, "is too large"),
        (end + b', "temperature": Infinity}', 400, "Infinity is no JSON number"),
        (end + b', "temperature": -Infinity}', 400, "-Infinity is no JSON number"),
        (end + b', "temperature": NaN}', 400, "NaN is no JSON number"),
        (end + b', "temperature": 1e400}', 400, "the number '1e400' is too large"),
        (b"\xff\xfe", 400, "the body is not JSON"),
        *[(b"", 400, "the body is not JSON")] * 2,  # aiohttp has one stream for all bodies of nothing
        (say('a "quoted" {text}, [with] \\ everything, ' * 300), 200, "ok"),
        (say("hi", metadata={"list": [1] * (MAX_VALUES + 1)}), 400, "more than 20,000 JSON values"),
        (say("hi", metadata={"list": ["a"] * (MAX_VALUES + 1)}), 400, "more than 20,000 JSON values"),
        (say("x" * 30_000), 400, "the model's context 20000"),
        (b'{"%s": [' % name + b"0," * 15_000 + b"0]}", 400, f"{say.messages}[0] must be"),  # no other
        (say([0] * 15_000), 400, f"{say.messages}[0].content[0] must be"),
        (say("hi", tools=[0] * 15_000), 400, "tools[0] must be"),
        (say("hi", **{"k" * 200_000: 1}), 400, f"{'k' * 80} is not served here: leave it out"),
        (say("hi").decode().encode("utf-16"), 400, "the body is not JSON"),
        (b"\xef\xbb\xbf" + say("hi"), 200, "ok"),
        *(values if isinstance(say, Messages) else texts),
        *many,
    ]


@pytest.mark.parametrize("say", DIALECTS, ids=[dialect.path for dialect in DIALECTS])
async def test_what_a_body_says_is_read_within_bounds(say: Chat) -> None:
    async with served(max_body=4 * MIB) as http:
        for body, status, words in bodies(say):
            actual_status, text = await post(http, body, say)
            assert actual_status == status, (text, body[:200])
            assert words in text, (text, body[:200])
            assert len(text) < 400


async def test_metadata_may_hold_any_text() -> None:
    text = {"text": "[{," * MAX_VALUES, "list": [1] * 19_000}
    async with served(max_body=4 * MIB) as http:
        assert await post(http, chat("hi", metadata=text)) == (200, "ok")


async def test_the_arguments_of_a_call_in_the_history_may_not_be_deep_either() -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": json.dumps(nested(900))}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "x"}]
    async with served() as http:
        status, text = await post(http, json.dumps({"messages": messages}).encode())
        assert status == 400
        assert "'look' have more than 64 levels" in text


def packed(coding: str, body: bytes) -> bytes:
    if coding == "raw deflate":  # without zlib's header, as some clients send it
        packer = zlib.compressobj(wbits=-15)
        return packer.compress(body) + packer.flush()
    return gzip.compress(body) if coding == "gzip" else zlib.compress(body)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw deflate"])
async def test_packed_bodies_are_read_and_bounded_by_what_is_in_them(coding: str) -> None:
    header = {"Content-Encoding": coding.split()[-1]}
    async with served(max_body=300_000) as http:
        small = packed(coding, chat("hello " * 100))
        assert await post(http, small, **header) == (200, "ok")
        for length, status in ((300_000, 400), (300_001, 413)):  # the first is no JSON, but is read
            body = packed(coding, b"x" * length)
            assert len(body) < 1000
            assert (await post(http, body, **header))[0] == status
        whole = packed(coding, b"x" * (2**16 + 5))  # its last match lies across the end of a full part
        assert "the body is not JSON" in (await post(http, whole, **header))[1]
        status, text = await post(http, small[:-5], **header)
        assert status == 400
        assert f"the body is not {header['Content-Encoding']} (" in text
        assert (await post(http, b"no such thing", **header))[0] == 400
        if coding == "gzip":
            two = gzip.compress(chat("hi")[:20]) + gzip.compress(chat("hi")[20:])
            assert await post(http, two, **header) == (200, "ok")


async def test_an_encoding_that_is_not_read_is_named() -> None:
    async with served() as http:
        status, text = await post(http, b"xyz", **{"Content-Encoding": "br"})
        assert status == 415
        assert "'br' is not read here: send gzip, deflate or nothing" in text


@pytest.mark.parametrize("length", [299_999, 300_000, 300_001])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_may_be_as_long_as_the_bound(length: int, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, length, 50_000):
            yield body[start : start + 50_000]

    body = chat("hi") + b" " * (length - len(chat("hi")))
    async with served(max_body=300_000) as http:
        data: Any = pieces() if chunked else body
        status, text = await post(http, data)
        assert status == (200 if length <= 300_000 else 413), text


async def raw(http: aiohttp.ClientSession, text: bytes, *, then: bytes = b"") -> tuple[bytes, bytes]:
    """The server's answer to bytes, and what it says to others that come after it on the same connection."""
    url = http._base_url
    assert url is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(text)
    first = (
        await reader.readuntil(b"}}")
        if b"HTTP/1.1 4" in (head := await reader.readuntil(b"\r\n\r\n"))
        else head
    )
    writer.write(then)
    after = await reader.read()
    writer.close()
    return head + first, after


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def test_a_body_of_many_small_chunks_is_refused_and_one_of_large_chunks_read() -> None:
    text = chat("hello " * 100)
    chunks = [b"1\r\n%c\r\n" % byte for byte in text]
    async with served() as http:
        answer, _ = await raw(http, CHUNKED + b"".join(chunks[:500]))
        assert b"400 Bad Request" in answer
        assert b"the body comes in more than 64 chunks of a few bytes: send it whole" in answer

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(text), 100):
                yield text[start : start + 100]

        data: Any = pieces()
        assert await post(http, data) == (200, "ok")


@pytest.mark.parametrize(
    "length", [b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"]
)
async def test_after_a_refusal_nothing_more_is_read(length: bytes) -> None:
    """Another request behind the part of a body that was refused gets no answer, and the connection ends."""
    async with served(api_keys=("right",)) as http:
        more = b"1\r\n \r\n" * 100 + b"0\r\n\r\n" + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        began = time.monotonic()
        answer, after = await raw(http, HEAD + length, then=more)
        assert b"401 Unauthorized" in answer
        assert b"Connection: close" in answer
        assert after == b""
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("context", "bound"), [(128, 256 * 1024), (1024, 256 * 1024), (16_384, MIB), (131_072, 4 * MIB)]
)
def test_the_default_bound_follows_from_the_context(context: int, bound: int) -> None:
    assert default_max_body(context) == bound


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": ""}] * 1_000,
        json.loads(chat.called(json.dumps({"a": "x" * 20_000})))["messages"],
    ],
    ids=["many messages", "long arguments"],
)
async def test_a_conversation_of_any_kind_is_tokenised_beside_the_loop(messages: list[Any]) -> None:
    backend = ScriptedBackend(lambda _: "fine", context_length=100_000)
    async with MultiTurnAgent(AgentConfig(model_name="mine"), backend=backend) as agent:
        threads = []
        prompt = agent.template.prompt
        agent.template.prompt = lambda *arguments: (
            threads.append(threading.current_thread()) or prompt(*arguments)
        )
        await agent.answer([Message.from_openai(item) for item in messages])
        assert threads
        assert threading.main_thread() not in threads


# --- a server of its own, under attack -------------------------------------------------------------------


@dataclass
class Served:
    url: str
    pid: int

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024

    def now_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


@contextmanager
def serving(model: str, *arguments: str) -> Iterator[Served]:
    words = [*warm_python(), "-m", "stateset_agents.cli.main", "serve", model, "--port", "0"]
    words += ["--served-model-name", "mine", *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Served(process.stdout.readline().split()[-1], program_id(process.pid))
        finally:
            process.kill()


_POLL = """
import http.client, json, sys, threading, time
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
server = http.client.HTTPConnection(sys.argv[1], timeout=600)
waits = []
while not done.is_set() or len(waits) < 20:
    before = time.perf_counter()
    server.request("GET", "/health")
    response = server.getresponse()
    assert (response.read(), response.status)[1] == 200
    waits.append(time.perf_counter() - before)
    time.sleep(0.005)
print(json.dumps(sorted(waits)))
"""
"""In a process of its own, so that sending large bodies does not hold it up."""


async def attack(server: Served, bodies: list[Body], *, at_once: int, seconds: float = 0.0) -> dict[str, Any]:
    """Send all bodies, so many at once, and again until the time is over.

    Returns how long `/health` took meanwhile, what was answered, and the server's memory.
    """
    url = f"{server.url}/"
    statuses: set[int] = set()
    poll = [sys.executable, "-c", _POLL, server.url.split("/")[2]]
    began = time.perf_counter()
    queue = list(bodies)

    async def sender(http: aiohttp.ClientSession) -> None:
        while queue or time.perf_counter() - began < seconds:
            queue.extend([] if queue else bodies)
            body, headers, path = queue.pop()
            try:
                async with http.post(url + path, data=body, headers={**JSON, **headers}) as response:
                    statuses.add(response.status)
            except aiohttp.ClientOSError:  # refused while it was still sending
                statuses.add(413)

    # a prompt of 60,000 tokens that fits takes a slow machine minutes
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http:
        assert (await http.post(url + chat.path, data=chat("hi"), headers=JSON)).status == 200
        before = server.peak_mib()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        poller = await asyncio.create_subprocess_exec(*poll, **pipes)
        await asyncio.gather(*(sender(http) for _ in range(at_once)))
        waits = json.loads((await poller.communicate(b""))[0])
        assert (await http.post(url + chat.path, data=chat("hi"), headers=JSON)).status == 200
    return {
        "statuses": sorted(statuses),
        "p99_ms": round(1000 * waits[int(len(waits) * 0.99)], 1),
        "max_ms": round(1000 * waits[-1], 1),
        "polls": len(waits),
        "before_mib": round(before),
        "peak_mib": round(server.peak_mib()),
    }


def bomb(mib: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    zeros = b" " * MIB
    return b"".join([*(packer.compress(zeros) for _ in range(mib)), packer.flush()])


def bodies_of_all_kinds(say: Chat, *, large: int, bombs: tuple[int, ...]) -> list[Body]:
    """`large`: MiB of a body without meaning; `bombs`: MiB in packed ones."""
    packed = {"Content-Encoding": "gzip"}
    long_prompt = say("where is it " * 333_333)  # 4 MB
    empty = {"role": "user", "content": ""}
    plain = [
        long_prompt,
        say("a" + " " * 4_000_000 + "b"),
        say(" " * 4_000_000 + "b"),
        b"x" * (large * MIB),
        b"[" + b"[]," * 1_300_000 + b"[]]",
        say.talk([empty] * 130_000),
        say.talk([empty] * 6_000),
        say.talk([0] * 19_000),
        say.called(long_arguments(120_000)),
        say.called(json.dumps({"a": "where is it " * 20_000})),
        say('"' + "," * 500_000).decode().encode("utf-16-le"),
    ]
    return [
        *((body, {}, say.path) for body in plain),
        *((body, packed, say.path) for body in (gzip.compress(long_prompt), *map(bomb, bombs))),
    ]


@pytest.mark.parametrize(
    "say",
    [chat, *(pytest.param(say, marks=pytest.mark.long) for say in DIALECTS[1:])],
    ids=[dialect.path for dialect in DIALECTS],
)
async def test_long_bodies_hold_nobody_up(say: Chat) -> None:
    # 8 MiB are read, so that the prompts' own length is what refuses them; the default refuses all unread.
    with serving("embedded:desk", "--max-body", str(8 * MIB)) as server:
        result = await attack(server, bodies_of_all_kinds(say, large=20, bombs=(20,)), at_once=4)
    print(result)
    assert set(result["statuses"]) <= {400, 413}
    assert result["p99_ms"] < 250, result  # on a busy machine; it was seconds
    assert result["peak_mib"] < result["before_mib"] + 100, result


def long_model(folder: Path) -> Path:
    """A small model with a context of 131,072 tokens, for which 2.9 MB may fit and have to be tokenised."""
    desk = Path(stateset_agents.__file__).parent / "embedded" / "desk"
    tokenizer = AutoTokenizer.from_pretrained(desk)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(max_position_embeddings=131_072, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_FLOOD = """
import socket, sys, threading
port, key = int(sys.argv[1]), sys.argv[2]
head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
head += f"Authorization: Bearer {key}\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
def flood():
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(head.encode())
                while True:
                    connection.sendall(b"1\\r\\n \\r\\n" * 20_000)
        except OSError:
            pass
for _ in range(64):
    threading.Thread(target=flood, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.long
@pytest.mark.parametrize("key", ["none is asked for", "wrong", "right"])
def test_health_answers_within_50_ms_beside_64_connections_of_one_byte_chunks(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 2 to 16 seconds."""
    if key != "none is asked for":
        monkeypatch.setenv("STATESET_API_KEY", "right")
    with serving("embedded:desk") as server:
        address = server.url.split("/")[2]
        flood = subprocess.Popen(
            [sys.executable, "-c", _FLOOD, address.split(":")[1], key], stdin=subprocess.PIPE
        )
        try:
            time.sleep(1)
            poller = subprocess.Popen(
                [sys.executable, "-c", _POLL, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            time.sleep(10)
            waits = json.loads(poller.communicate(b"")[0])
        finally:
            flood.kill()
    print(key, len(waits), "polls, p99", round(1000 * waits[int(len(waits) * 0.99)], 1), "ms")
    assert waits[int(len(waits) * 0.99)] < 0.05


@pytest.mark.long
@pytest.mark.parametrize("kind", ["desk", "a context of 131,072 tokens"])
async def test_under_attack_health_answers_within_50_ms_and_memory_is_bounded(
    kind: str, tmp_path: Path
) -> None:
    bodies = [body for say in DIALECTS for body in bodies_of_all_kinds(say, large=60, bombs=(60, 800))]
    model, more, statuses = "embedded:desk", 50, {400, 413}
    if "context" in kind:
        # The call with 60,000 tokens of arguments fits, and a fast machine answers it: the store of keys and
        # values doubles up to its bound, and a piece of the prompt attends to all before it.
        model, more = str(long_model(tmp_path)), 1300
        statuses |= {200}
        for text in (
            "where is it " * 240_000,
            "a" * 2_900_000,
            "<|user|><|end|>" * 170_000,
            "\u00e9" * 400_000,
        ):
            bodies += [(say(text), {}, say.path) for say in DIALECTS]
    with serving(model) as server:
        result = await attack(server, bodies, at_once=4, seconds=30)
    print(kind, result)
    assert set(result["statuses"]) <= statuses
    assert result["p99_ms"] < 50, result
    assert result["peak_mib"] < result["before_mib"] + more, result
