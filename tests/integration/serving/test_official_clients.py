"""OpenAI's and Anthropic's clients against a real server; every body is validated by their types."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from official_clients import Judge, anthropic_client, openai_client
from published_rows import picture
from pydantic import BaseModel
from tiny_models import tiny_model, tiny_tokenizer
from tiny_vlm import save_tiny_vlm

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.limits import Limits
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import BackendError

ORDER = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
E_ACUTE = {"type": "base64", "media_type": "image/png", "data": "\u00e9"}
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "look", "arguments": {"order": "%s"}}</tool_call>'


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]


class Clients:
    """A server's clients, the judge of its answers, and its script, whose replies come in turn."""

    def __init__(self, server: AgentServer, script: list[Any], judge: Judge) -> None:
        self.server, self.script, self.judge = server, script, judge
        self.openai = openai_client(server.url, judge)
        self.anthropic = anthropic_client(server.url, judge)
        self.num_calls = 0

    def create(self, **fields: Any) -> Any:
        self.num_calls += 1
        return self.openai.responses.create(**{"model": "mine", "input": "hi", **fields})

    def message(self, **fields: Any) -> Any:
        self.num_calls += 1
        return self.anthropic.messages.create(
            **{"model": "mine", "max_tokens": 400, "messages": HI, **fields}
        )


@asynccontextmanager
async def serving(backend: Any = None, **settings: Any) -> AsyncIterator[Clients]:
    script: list[Any] = []
    if backend is None:
        backend = ScriptedBackend(lambda _: script.pop(0) if script else "Hello!", context_length=20_000)
    limits = settings.pop("limits", None)
    config = AgentConfig(**{"model_name": "mine", **settings})
    agent = MultiTurnAgent(config, backend=None if isinstance(backend, str) else backend)
    async with agent, AgentServer(agent, limits=limits, name="mine") as server:
        clients = Clients(server, script, Judge())
        async with clients.openai, clients.anthropic:
            yield clients


@asynccontextmanager
async def constrained() -> AsyncIterator[Clients]:
    """A tiny random model: only a grammar could make it keep to anything."""
    model = tiny_model()
    model.config.max_position_embeddings = 2048
    backend = HuggingFaceBackend(model, tiny_tokenizer(), copy_model=False)
    async with serving(backend, chat_template="plain", max_new_tokens=200) as clients:
        yield clients


def function(name: str = "look", parameters: Any = ORDER) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": parameters, "strict": True}


def custom(name: str = "look", schema: Any = ORDER) -> dict[str, Any]:
    return {"name": name, "description": "looks", "input_schema": schema}


async def test_a_script_of_responses() -> None:
    async with serving() as it:
        first = await it.create()
        assert (first.output_text, first.status) == ("Hello!", "completed")
        assert first.usage.total_tokens == first.usage.input_tokens + 7
        assert (await it.create(instructions="be brief")).instructions == "be brief"
        cut = await it.create(max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        settings = {
            "temperature": 0.5,
            "top_p": 0.9,
            "metadata": {"a": "b"},
            "user": "u",
            "truncation": "disabled",
        }
        told = await it.create(**settings)
        assert {name: getattr(told, name) for name in settings} == settings
        await it.create(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low"})
        await it.create(
            input=[
                {"role": "developer", "content": "x"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "y"}]},
            ]
        )

        # tools: parallel calls, and their results by items and by the response's id
        it.script[:] = ["Let me look. " + CALL % "K1" + CALL % "K2", "Both are here.", "Both."]
        items: list[Any] = [{"role": "user", "content": "K1 and K2?"}]
        called = await it.create(input=items, tools=[function()])
        calls = [item for item in called.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"order": "K1"}, {"order": "K2"}]
        assert called.output_text == "Let me look."
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "here"} for call in calls
        ]
        back = await it.create(input=[*items, *called.output, *results], tools=[function()])
        assert back.output_text == "Both are here."
        again = await it.create(input=results, previous_response_id=called.id, tools=[function()])
        assert again.usage.input_tokens == back.usage.input_tokens
        assert (await it.create(tools=[function()], tool_choice="none")).tool_choice == "none"
        it.script[:] = [CALL % "K1" + CALL % "K2"]
        single = await it.create(tools=[function()], parallel_tool_calls=False)
        assert len(single.output) == 1

        # thoughts go out as reasoning items, and come back
        for include in ([], ["reasoning.encrypted_content"]):
            it.script[:] = ["<think>Shelf?</think>It is here.", "Yes."]
            thought = await it.create(store=False, include=include)
            reasoning, words = thought.output
            assert (reasoning.content[0].text, words.content[0].text) == ("Shelf?", "It is here.")
            assert thought.usage.output_tokens_details.reasoning_tokens > 0
            sent = [item.model_dump(exclude_none=True) for item in thought.output]
            if include:
                del sent[0]["content"]  # some clients pass on the encrypted text alone
            await it.create(input=[*HI, *sent, {"role": "user", "content": "sure?"}])

        # streams
        async with it.openai.responses.stream(model="mine", input="hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            whole = await stream.get_final_response()
        assert "".join(deltas) == whole.output_text == "Hello!"
        it.script[:] = ["<think>Shelf?</think>Hm. " + CALL % "K1" + CALL % "K2"]
        async with it.openai.responses.stream(model="mine", input="hi", tools=[function()]) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_response()
        assert [item.type for item in whole.output] == ["reasoning", "message", *["function_call"] * 2]
        assert whole.output[2].parsed_arguments == {"order": "K1"}
        assert kinds[:2] == ["response.created", "response.in_progress"]
        events = [event async for event in await it.create(stream=True, max_output_tokens=2)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.output[0].status == "incomplete"
        async for event in await it.create(stream=True, previous_response_id=whole.id, input=results):
            last = event
        assert last.response.previous_response_id == whole.id
        it.script[:] = [""]
        assert (await it.create()).output_text == ""
        for n in range(4):  # a conversation by ids
            first = await it.create(input=f"and {n}?", previous_response_id=first.id)
        assert await it.openai.models.retrieve("mine")
        assert it.num_calls + 3 >= 25
        assert it.judge.seen["Response"] >= 18
        assert it.judge.seen["ResponseReasoningTextDeltaEvent"] >= 1
        assert it.judge.seen["ResponseFunctionCallArgumentsDoneEvent"] == 2


async def test_a_script_of_chat_completions() -> None:
    async with serving() as it:
        create, num_calls = it.openai.chat.completions.create, 0
        tools: Any = [{"type": "function", "function": {"name": "look", "parameters": ORDER, "strict": True}}]
        for fields in (
            *({}, {"n": 2}, {"max_tokens": 2}, {"max_completion_tokens": 2}, {"stop": "l"}, {"seed": 3}),
            *({"logprobs": True}, {"temperature": 0.5, "top_p": 0.9}, {"tools": tools}, {"user": "u"}),
            *({"tools": tools, "tool_choice": "none"}, {"metadata": {"a": "b"}}, {"store": False}),
            {"reasoning_effort": "low", "verbosity": "low"},
        ):
            for is_streamed in (False, True):
                num_calls += 1
                answer = await create(model="mine", messages=HI, stream=is_streamed, **fields)
                if is_streamed:
                    assert [chunk async for chunk in answer]
        it.script[:] = ["<think>Shelf?</think>Hm. " + CALL % "K1" + CALL % "K2"] * 2
        whole = await create(model="mine", messages=HI, tools=tools)
        options = {"include_usage": True}
        async with it.openai.chat.completions.stream(
            model="mine", messages=HI, tools=tools, stream_options=options
        ) as stream:
            streamed = await stream.get_final_completion()
        assert streamed.usage == whole.usage
        message = whole.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "here"} for call in message.tool_calls
        ]
        assert (await create(model="mine", messages=[*HI, message, *results], tools=tools)).choices
        assert num_calls + 3 >= 25
        assert it.judge.seen["ChatCompletion"] == 16


async def test_a_script_of_messages() -> None:
    async with serving() as it:
        first = await it.message()
        assert ([block.text for block in first.content], first.stop_reason) == (["Hello!"], "end_turn")
        assert first.usage.output_tokens == 7
        assert (await it.message(max_tokens=2)).stop_reason == "max_tokens"
        stopped = await it.message(stop_sequences=["x", "ll"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "ll")
        assert stopped.content[0].text == "He"
        count = await it.anthropic.messages.count_tokens(model="mine", messages=HI, system="be brief")
        answer = await it.message(system="be brief")
        assert answer.usage.input_tokens == count.input_tokens > first.usage.input_tokens
        await it.message(
            system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
        )
        await it.message(extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 5})
        await it.message(metadata={"user_id": "u"}, service_tier="auto", thinking={"type": "adaptive"})
        await it.message(messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}])

        # tools: parallel calls and their results
        it.script[:] = ["Let me look. " + CALL % "K1" + CALL % "K2", "Both are here."]
        called = await it.message(tools=[custom()])
        assert called.stop_reason == "tool_use"
        text, *calls = called.content
        assert (text.text, [call.input for call in calls]) == (
            "Let me look.",
            [{"order": "K1"}, {"order": "K2"}],
        )
        results = [
            {
                "type": "tool_result",
                "tool_use_id": calls[1].id,
                "content": [{"type": "text", "text": "gone"}],
            },
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "here", "is_error": False},
            {"type": "text", "text": "so?"},
        ]
        talk = [*HI, called.to_param(), {"role": "user", "content": results}]
        back = await it.message(messages=talk, tools=[custom()])
        assert back.content[0].text == "Both are here."
        count = await it.anthropic.messages.count_tokens(model="mine", messages=talk, tools=[custom()])
        assert back.usage.input_tokens == count.input_tokens
        assert (await it.message(tools=[custom()], tool_choice={"type": "none"})).content
        it.script[:] = [CALL % "K1" + CALL % "K2"]
        one = {"type": "auto", "disable_parallel_tool_use": True}
        assert len((await it.message(tools=[custom()], tool_choice=one)).content) == 1

        # thoughts go out as thinking blocks, and come back
        it.script[:] = ["<think>Shelf?</think>It is here.", "Yes."]
        thought = await it.message()
        assert [block.type for block in thought.content] == ["thinking", "text"]
        assert thought.content[0].thinking == "Shelf?"
        sure = [*HI, thought.to_param(), {"role": "user", "content": "sure?"}]
        assert (await it.message(messages=sure)).content[0].text == "Yes."

        # streams
        async with it.anthropic.messages.stream(model="mine", max_tokens=64, messages=HI) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Hello!"
            whole = await stream.get_final_message()
        assert whole.usage.input_tokens == first.usage.input_tokens
        it.script[:] = ["<think>Shelf?</think>Hm. " + CALL % "K1" + CALL % "K2"] * 2
        async with it.anthropic.messages.stream(
            model="mine", max_tokens=200, messages=HI, tools=[custom()]
        ) as stream:
            kinds = [event.type async for event in stream]
            whole = await stream.get_final_message()
        plain = await it.message(tools=[custom()], max_tokens=200)
        assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in plain.content]
        assert (whole.stop_reason, whole.usage.output_tokens) == ("tool_use", plain.usage.output_tokens)
        assert {"thinking", "signature", "text", "input_json"} <= set(kinds)
        events = [event async for event in await it.message(stream=True, max_tokens=2)]
        assert [event.type for event in events][-2:] == ["message_delta", "message_stop"]
        assert events[-2].delta.stop_reason == "max_tokens"
        it.script[:] = [""]
        assert [block.text for block in (await it.message()).content] == [""]
        messages = list(HI)
        for n in range(6):
            answer = await it.message(messages=messages)
            messages += [answer.to_param(), {"role": "user", "content": f"and {n}?"}]
        assert it.num_calls + 4 >= 25
        assert it.judge.seen["Message"] >= 20
        assert it.judge.seen["RawContentBlockDeltaEvent"] >= 6


async def test_what_a_grammar_keeps_is_kept_in_every_dialect() -> None:
    async with constrained() as it:
        tools = [function("weather", CITY), function("forecast", CITY)]
        answer = await it.create(tools=tools, tool_choice="required", parallel_tool_calls=False)
        (call,) = answer.output
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        named = {"type": "function", "name": "forecast"}
        answer = await it.create(tools=tools, tool_choice=named)
        assert answer.tool_choice.name == "forecast"
        assert {call.name for call in answer.output} == {"forecast"}
        parsed = await it.openai.responses.parse(model="mine", input="hi", text_format=Weather)
        assert parsed.output_parsed.city in ("Oslo", "Rome")
        async with it.openai.responses.stream(model="mine", input="hi", text_format=Weather) as stream:
            assert (await stream.get_final_response()).output_parsed.city in ("Oslo", "Rome")
        cut = await it.create(text={"format": {"type": "json_object"}}, max_output_tokens=20)
        assert cut.output_text.startswith("{")

        tools = [custom("weather", CITY), custom("forecast", CITY)]
        message = await it.message(tools=tools, tool_choice={"type": "any"}, max_tokens=200)
        assert message.stop_reason == "tool_use"
        choice = {"type": "tool", "name": "forecast"}
        message = await it.message(tools=tools, tool_choice=choice, max_tokens=200)
        assert {block.name for block in message.content} == {"forecast"}
        assert message.content[0].input["city"] in ("Oslo", "Rome")
        fields: Any = {"model": "mine", "max_tokens": 200, "messages": HI, "output_format": Weather}
        assert (await it.anthropic.messages.parse(**fields)).parsed_output.city in ("Oslo", "Rome")
        async with it.anthropic.messages.stream(**fields) as stream:
            assert (await stream.get_final_message()).parsed_output.city in ("Oslo", "Rome")

        completion = await it.openai.chat.completions.parse(
            model="mine", messages=HI, response_format=Weather
        )
        assert completion.choices[0].message.parsed.city in ("Oslo", "Rome")


async def test_a_picture_is_the_same_in_every_dialect(tmp_path: Path) -> None:
    data = base64.b64encode(picture()).decode()
    url = f"data:image/png;base64,{data}"
    model = save_tiny_vlm(tmp_path / "model")
    async with serving(model_name=model, backend="from the folder", max_new_tokens=4) as it:
        chat = await it.openai.chat.completions.create(
            model="mine",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what?"},
                        {"type": "image_url", "image_url": {"url": url}},
                    ],
                }
            ],
        )
        parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url}]
        response = await it.create(input=[{"role": "user", "content": parts}])
        source = {"type": "base64", "media_type": "image/png", "data": data}
        blocks = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
        message = await it.message(messages=[{"role": "user", "content": blocks}], max_tokens=4)
        lengths = [chat.usage.prompt_tokens, response.usage.input_tokens, message.usage.input_tokens]
        assert len(set(lengths)) == 1
        parts[1]["image_url"] = "https://example.org/a.png"
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]: a picture must be a data URL"):
            await it.create(input=[{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type must be 'function', got \"web_search\"",
            "tools",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "\u00e9"}, *HI]},
            "encrypted_content is not",
            "input",
        ),
        ({"conversation": "c"}, "conversation is not served here", "conversation"),
        ({"background": True}, "background is not served here", "background"),
        ({"truncation": "auto"}, "truncation must be 'disabled'", "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]", "include"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type must be 'message'", "input"),
        ({"input": [{"type": "item_reference", "id": "w"}]}, "input[0].type must be", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "content[0].type", "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "assistant's own", "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id is missing", "input"),
        ({"input": "x" * 30_000}, "context", "input"),
        ({"tool_choice": "required"}, "tools are missing", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "names 'x'", "tool_choice"),
        ({"max_output_tokens": 10**6}, "max_output_tokens must be", "max_output_tokens"),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA%"}, *HI]},
            "encrypted_content is not of this server",
            "input",
        ),
    ],
)
async def test_what_responses_do_not_serve_is_named(fields: Any, words: str, param: str) -> None:
    async with serving() as it:
        with pytest.raises(openai.BadRequestError) as caught:
            await it.create(**fields)
        assert words in caught.value.message
        assert caught.value.param == param
        assert it.judge.seen["OpenAI's error"] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "tools[0].type must be 'custom'",
        ),
        ({"extra_body": {"container": "c"}}, "container is not served here"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking."),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "content[0].type must be 'text'",
        ),
        ({"messages": [{"role": "assistant", "content": "so"}]}, "the assistant's own"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "no message of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": E_ACUTE}]}]},
            "data URL is not base64",
        ),
        ({"tool_choice": {"type": "any"}}, "tools are missing"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "names 'x'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"max_tokens": 10**6}, "max_tokens must be"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, "context"),
    ],
)
async def test_what_messages_do_not_serve_is_named(fields: Any, words: str) -> None:
    async with serving() as it:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await it.message(**fields)
        error = caught.value.body
        assert words in error["error"]["message"]
        assert error["error"]["type"] == "invalid_request_error"
        assert error["request_id"] == caught.value.response.headers["request-id"]
        assert it.judge.seen["ErrorResponse"] == 1


async def test_a_response_that_is_not_kept_is_not_found() -> None:
    async with serving(limits=Limits(max_remembered=500)) as it:
        first, unstored = await it.create(), await it.create(store=False)
        assert await it.create(previous_response_id=first.id)
        await it.create(input="y" * 300)
        for id in (unstored.id, first.id, "resp_x"):  # not stored, forgotten for others, never here
            with pytest.raises(openai.NotFoundError, match="is forgotten: send all items") as caught:
                await it.create(previous_response_id=id)
            assert (caught.value.code, caught.value.param) == (
                "previous_response_not_found",
                "previous_response_id",
            )


async def test_errors_have_each_dialect_s_shape_and_class() -> None:
    async with serving() as it:
        with pytest.raises(openai.NotFoundError, match="ask for 'mine'"):
            await it.create(model="other")
        with pytest.raises(anthropic.NotFoundError, match="ask for 'mine'"):
            await it.message(model="other")
        it.script[:] = [RuntimeError("a secret of the house")] * 2
        with pytest.raises(openai.InternalServerError):
            await it.create()
        with pytest.raises(anthropic.InternalServerError) as broken:
            await it.message(stream=True)
        assert broken.value.body["error"]["type"] == "api_error"
        assert await it.server.drain(5) == 0
        with pytest.raises(anthropic.APIStatusError) as closing:
            await it.message()
        assert (closing.value.status_code, closing.value.body["error"]["type"]) == (503, "overloaded_error")


class BreaksOff(ScriptedBackend):
    async def generate(
        self, prompt_ids: Any, params: Any, *, session: Any = None, on_text: Any = None
    ) -> Any:
        on_text("It is ")
        raise BackendError("no memory left")


async def test_a_stream_that_breaks_off_says_so_in_each_dialect() -> None:
    async with serving(BreaksOff([])) as it:
        events = [event async for event in await it.create(stream=True)]
        assert [event.type for event in events][-2:] == ["error", "response.failed"]
        assert events[-2].message == events[-1].response.error.message == "no memory left"
        with pytest.raises(anthropic.APIStatusError, match="no memory left"):
            async for _ in await it.message(stream=True):
                pass


async def test_a_full_server_is_a_429_in_each_dialect() -> None:
    started = asyncio.Event()

    async def slow(request: Any) -> str:
        started.set()
        await asyncio.sleep(30)
        return "late"

    limits = Limits(max_running=1, max_waiting=0)
    async with serving(ScriptedBackend(slow), limits=limits) as it:
        running = asyncio.create_task(it.create())
        await started.wait()
        with pytest.raises(openai.RateLimitError, match="ask again later") as told:
            await it.create(stream=True)
        assert told.value.response.headers["Retry-After"]
        with pytest.raises(anthropic.RateLimitError, match="ask again later") as asked:
            await it.message()
        assert asked.value.body["error"]["type"] == "rate_limit_error"
        with pytest.raises(anthropic.RateLimitError):
            await it.anthropic.messages.count_tokens(model="mine", messages=HI)
        running.cancel()


async def test_a_drain_that_cuts_streams_says_so_in_each_dialect() -> None:
    class Endless(ScriptedBackend):
        async def generate(self, *_: Any, on_text: Any = None, **__: Any) -> Any:
            while True:
                on_text("on ")
                await asyncio.sleep(0.01)

    async def last_event(stream: Any) -> Any:
        async for event in stream:
            last = event
        return last

    async with serving(Endless([])) as it:
        asked = [
            asyncio.create_task(it.create(stream=True)),
            asyncio.create_task(it.message(stream=True)),
        ]
        await asyncio.sleep(0.3)  # the judge reads streams whole, so their clients wait for the cut
        assert await it.server.drain(0.1) == 2
        response, message = [await one for one in asked]
        assert (await last_event(response)).type == "response.failed"
        with pytest.raises(anthropic.APIStatusError, match="shut down"):
            await last_event(message)
