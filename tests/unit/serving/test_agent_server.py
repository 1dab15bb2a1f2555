"""An agent behind OpenAI's interface, asked by the real openai client."""

from __future__ import annotations

import asyncio
import math
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import openai
import pytest
from warm_python import warm_python

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import BackendError, ConfigurationError

HI = [{"role": "user", "content": "hi"}]
CALL = 'Let me look. <tool_call>{"name": "look", "arguments": {"order": "K27"}}</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@asynccontextmanager
async def served(script, **settings):
    backend = ScriptedBackend(script, context_length=500)
    config = AgentConfig(model_name="mine", **settings)
    async with (
        MultiTurnAgent(config, backend=backend) as agent,
        AgentServer(agent) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client.chat.completions, backend, server


async def test_a_client_asks_an_agent():
    async with served(["Hello!"], system_prompt="Be brief.") as (chat, backend, _):
        answer = await chat.create(model="mine", messages=HI)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hello!", "stop")
        assert answer.usage.completion_tokens == 7
        assert answer.usage.prompt_tokens == len(backend.requests[0].prompt_ids)
        assert backend.requests[0].text.startswith("system: Be brief.\nuser: hi")


async def test_a_stream_gives_words_as_they_come_and_calls_at_the_end():
    async with served([CALL]) as (chat, _, _):
        strict = {**LOOK, "function": {**LOOK["function"], "strict": True}}  # openai 2 streams no other
        options = {"stream_options": {"include_usage": True}, "tools": [strict]}
        async with chat.stream(model="mine", messages=HI, **options) as events:
            pieces = [event.delta async for event in events if event.type == "content.delta"]
            final = await events.get_final_completion()
        choice = final.choices[0]
        assert len(pieces) > 5
        assert "".join(pieces) == choice.message.content == "Let me look."
        assert choice.message.tool_calls[0].function.arguments == '{"order": "K27"}'
        assert choice.finish_reason == "tool_calls"
        assert final.usage.completion_tokens == len(CALL) + 1


async def test_a_request_s_sampling_takes_the_place_of_the_agent_s():
    async with served(lambda request: "Hello you", temperature=0.5, seed=3) as (chat, backend, _):
        await chat.create(model="mine", messages=HI)
        fields = {"temperature": 0.2, "top_p": 0.9, "seed": 7}
        answer = await chat.create(model="mine", messages=HI, max_tokens=3, **fields)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Hel", "length")
        answer = await chat.create(model="mine", messages=HI, stop=" you", **fields)
        assert answer.choices[0].message.content == "Hello"
        default, overridden, again = (request.params for request in backend.requests)
        assert (default.temperature, overridden.temperature, overridden.top_p) == (0.5, 0.2, 0.9)
        assert overridden.stream == again.stream != default.stream


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature must be greater than or equal to 0, got -1"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, got 0"),
        ({"stop": ""}, "stop cannot be: String should have at least 1 character"),
        ({"n": 9}, "n must be less than or equal to 8"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "the model's context 500"),
    ],
)
async def test_invalid_fields_are_named(fields, words):
    async with served(["no"]) as (chat, _, _):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await chat.create(**{"model": "mine", "messages": HI, "stream": stream, **fields})
            assert words in caught.value.message


async def test_a_backend_that_breaks_is_a_server_error():
    async with served([BackendError("no memory left")]) as (chat, _, _):
        with pytest.raises(openai.InternalServerError, match="no memory left"):
            await chat.create(model="mine", messages=HI)


async def test_a_port_that_is_taken_is_told():
    async with served(["x"]) as (_, _, server):
        port = int(server.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigurationError, match="choose another with --port"):
            async with AgentServer(server.agent, port=port):
                pass


def test_the_serve_verb_answers_until_it_is_told_to_stop():
    words = [sys.executable, "-m", "stateset_agents.cli.main", "serve", "embedded:desk", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("embedded:desk answers at http://127.0.0.1:")
            with openai.OpenAI(base_url=line.split()[-1], api_key="none", max_retries=0) as client:
                answer = client.chat.completions.create(model="embedded:desk", messages=HI, max_tokens=8)
            assert answer.usage.completion_tokens > 0
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


_BREAKS = """
import sys
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.cli.main import main
step = Batcher.step
def breaks(self, turns):
    if any(turn.limit == 13 for turn in turns):
        raise RuntimeError("out of memory")
    return step(self, turns)
Batcher.step = breaks
sys.exit(main(["serve", "embedded:desk", "--port", "0"]))
"""


def test_a_worker_that_breaks_ends_serve_with_exit_code_1_and_one_line():
    words = [*warm_python(), "-c", _BREAKS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                chat = client.chat.completions
                assert (
                    chat.create(model="embedded:desk", messages=HI, max_tokens=2).usage.completion_tokens > 0
                )
                with pytest.raises(openai.InternalServerError, match="the generation worker broke"):
                    chat.create(model="embedded:desk", messages=HI, max_tokens=13)
            assert process.wait(60) == 1
            error_text = process.stderr.read()
        finally:
            process.kill()
    assert error_text == "stateset-agents: the generation worker broke: RuntimeError: out of memory\n"


async def test_health_is_503_once_the_worker_broke():
    config = AgentConfig(model_name="embedded:desk", max_new_tokens=4)
    async with (
        MultiTurnAgent(config) as agent,
        AgentServer(agent) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        aiohttp.ClientSession(server.url.removesuffix("v1")) as http,
    ):
        chat = client.chat.completions
        for temperature in (1e-38, 1e-320, 5e-324):  # these ended the worker once
            assert (await chat.create(model="embedded:desk", messages=HI, temperature=temperature)).choices
        async with http.get("health") as response:
            assert response.status == 200

        def breaks(*_):
            raise RuntimeError("out of memory")

        agent.backend._batcher.step = breaks
        with pytest.raises(openai.InternalServerError):
            await chat.create(model="embedded:desk", messages=HI)
        async with http.get("health") as response:
            assert response.status == 503
            assert "out of memory" in await response.text()


async def test_the_cache_goes_back_to_the_system_when_nobody_asks_for_a_while():
    config = AgentConfig(model_name="embedded:desk", max_new_tokens=64)
    async with (
        MultiTurnAgent(config) as agent,
        AgentServer(agent, rest_after=0.2) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        ask = partial(client.chat.completions.create, model="embedded:desk", messages=HI, seed=3)
        before = await ask()
        model = agent.backend._batcher.model
        cached_tokens = model.num_slots * model.num_columns
        assert cached_tokens > 0
        for _ in range(400):
            await asyncio.sleep(0.05)
            if not model.num_slots:
                break
        assert model.num_slots == 0
        after = await ask()
        assert after.choices[0].message.content == before.choices[0].message.content


@pytest.mark.parametrize(("name", "value"), [("rest_after", 0.0), ("rest_after", math.nan), ("max_body", 0)])
async def test_a_bound_that_cannot_be_is_refused(name, value):
    async with MultiTurnAgent(AgentConfig(model_name="mine"), backend=ScriptedBackend(["hi"])) as agent:
        with pytest.raises(ConfigurationError, match=f"{name} must be"):
            AgentServer(agent, **{name: value})
