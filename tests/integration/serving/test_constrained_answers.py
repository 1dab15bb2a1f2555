"""tool_choice and response_format by OpenAI's own client, over a tiny random model: only a grammar could."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.server import AgentServer

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **function}}


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    model = tiny_model()
    model.config.max_position_embeddings = 2048
    config = AgentConfig(model_name="tiny", chat_template="plain", max_new_tokens=200)
    backend = HuggingFaceBackend(model, tiny_tokenizer(), copy_model=False)
    async with (
        MultiTurnAgent(config, backend=backend) as agent,
        AgentServer(agent) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def answer(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    created = await client.chat.completions.create(**{"model": "tiny", "messages": HI, **fields})
    return created.choices[0]


async def test_a_required_call_comes_and_a_named_one_is_that_tool(client: openai.AsyncOpenAI) -> None:
    tools = [tool("weather"), tool("forecast")]
    for seed in range(3):
        choice = await answer(
            client, tools=tools, tool_choice="required", seed=seed, parallel_tool_calls=False
        )
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        named = {"type": "function", "function": {"name": "forecast"}}
        choice = await answer(client, tools=tools, tool_choice=named, seed=seed)
        assert {call.function.name for call in choice.message.tool_calls} == {"forecast"}


async def test_a_stream_gives_the_same_call(client: openai.AsyncOpenAI) -> None:
    fields = {
        "model": "tiny",
        "messages": HI,
        "tools": [tool("weather")],
        "tool_choice": "required",
        "seed": 1,
    }
    whole = await answer(client, **fields)
    stream = await client.chat.completions.create(**fields, stream=True)
    parts = [
        call
        async for chunk in stream
        for call in (chunk.choices[0].delta.tool_calls or () if chunk.choices else ())
    ]
    streamed = "".join(call.function.arguments or "" for call in parts if call.index == 0)
    assert streamed == whole.message.tool_calls[0].function.arguments


async def test_json_schema_and_json_object_are_kept(client: openai.AsyncOpenAI) -> None:
    strict = {"name": "city", "schema": {**CITY, "additionalProperties": False}, "strict": True}
    choice = await answer(client, response_format={"type": "json_schema", "json_schema": strict}, seed=0)
    assert json.loads(choice.message.content)["city"] in ("Oslo", "Rome")
    choice = await answer(client, response_format={"type": "json_object"}, seed=0, max_tokens=40)
    assert choice.message.content.startswith("{")


async def test_what_no_grammar_keeps_is_a_400_that_names_it(client: openai.AsyncOpenAI) -> None:
    refused = {"not": {"type": "string"}}
    bad = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": refused}}},
    }
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        await answer(client, response_format=bad)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="names 'gone', and the tools are: weather"):
        await answer(
            client, tools=[tool("weather")], tool_choice={"type": "function", "function": {"name": "gone"}}
        )
    for word in ("auto", "none", "required"):  # what a tool is called must not change what is asked for
        named = {"type": "function", "function": {"name": word}}
        with pytest.raises(openai.BadRequestError, match=f"cannot name a tool '{word}'"):
            await answer(client, tools=[tool(word), tool("weather")], tool_choice=named)
    endless = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    with pytest.raises(openai.BadRequestError, match="llguidance cannot follow"):
        await answer(client, response_format=endless)
    with pytest.raises(openai.BadRequestError, match="tools are missing"):
        await answer(client, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="could cut an answer"):
        await answer(client, response_format={"type": "json_object"}, stop="x")


async def test_without_the_library_strict_tools_are_served_and_required_calls_are_refused(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send `strict` unasked, such as OpenAI's Agents SDK."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tools = [tool("weather", strict=True)]
    assert await answer(client, tools=tools, max_tokens=5)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        with pytest.raises(openai.BadRequestError, match=r'pip install \\?"llguidance') as caught:
            await answer(client, tools=tools, tool_choice=choice)
        assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_constraint")
