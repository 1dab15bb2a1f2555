"""Thoughts in `serve`'s answers, whole and streamed, for templates that open or frame them."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from chat_templates import trl_tokenizer
from tiny_models import tiny_model

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.serving.server import AgentServer

HI: list[Any] = [{"role": "user", "content": "hi"}]
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
REPLIES = {  # a thought and words; a thought and a call; a thought that a limit cuts after so many characters
    "qwen3_5_think": (
        "They greet.\n</think>\n\nHello!",
        "Look.\n</think>\n\nOne moment.<tool_call>\n<function=look>\n<parameter=at>\nK27\n</parameter>\n"
        "</function>\n</tool_call>",
        ("They greet me and I", 12),
    ),
    "deepseek_r1_distill": ("They greet.\n</think>\n\nHello!", None, ("They greet me and I", 12)),
    "gptoss": (
        f"<|channel|>analysis<|message|>They greet.{FINAL}Hello!",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>One "
        "moment.<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        '{"at": "K27"}',
        ("<|channel|>analysis<|message|>They greet me and I", 42),
    ),
}


@asynccontextmanager
async def served(backend: Any, **settings: Any) -> AsyncIterator[Any]:
    async with (
        MultiTurnAgent(AgentConfig(model_name="mine", **settings), backend=backend) as agent,
        AgentServer(agent) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client.chat.completions


async def whole(chat: Any, **fields: Any) -> dict[str, Any]:
    choice = (await chat.create(model="mine", messages=HI, **fields)).choices[0]
    message = choice.message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    said = {"content": message.content or "", "reasoning": message.model_extra.get("reasoning") or ""}
    return {**said, "calls": calls, "finish": choice.finish_reason}


async def streamed(chat: Any, **fields: Any) -> dict[str, Any]:
    """The same put together from a stream."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    async for chunk in await chat.create(model="mine", messages=HI, stream=True, **fields):
        (choice,) = chunk.choices
        found["content"] += choice.delta.content or ""
        found["reasoning"] += choice.delta.model_extra.get("reasoning") or ""
        calls = choice.delta.tool_calls or ()
        found["calls"] += [(call.function.name, call.function.arguments) for call in calls]
        found["finish"] = choice.finish_reason or found["finish"]
    return found


@pytest.mark.parametrize("template", REPLIES)
async def test_content_holds_words_alone_whole_and_streamed(template: str) -> None:
    words, call, (cut, limit) = REPLIES[template]
    script = [words] * 2 + ([call] * 2 if call else []) + [cut] * 2
    backend = ScriptedBackend(script, tokenizer=trl_tokenizer(template))
    async with served(backend) as chat:
        for ask in (whole, streamed):
            expected = {"content": "Hello!", "reasoning": "They greet.", "calls": [], "finish": "stop"}
            assert await ask(chat) == expected
        for ask in (whole, streamed) if call else ():
            assert await ask(chat, tools=[LOOK]) == {
                "content": "One moment.",
                "reasoning": "Look.",
                "calls": [("look", '{"at": "K27"}')],
                "finish": "tool_calls",
            }
        for ask in (whole, streamed):
            answer = await ask(chat, max_tokens=limit)
            assert answer["content"] == ""
            assert answer["finish"] == "length"
            assert "They greet me and I".startswith(answer["reasoning"])
            assert answer["reasoning"].startswith("They greet")


@pytest.mark.parametrize("template", REPLIES)
@pytest.mark.first(1)
async def test_a_tiny_model_s_stream_says_what_its_whole_answer_says(template: str) -> None:
    tokenizer = trl_tokenizer(template)
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer.hf), mean_resizing=False)
    backend = HuggingFaceBackend(model, tokenizer, copy_model=False)
    async with served(backend, max_new_tokens=60) as chat:
        for seed in range(3):
            answer = await whole(chat, seed=seed)
            assert await streamed(chat, seed=seed) == answer
            assert not {"<think>", "</think>"} & {answer["content"], answer["reasoning"]}


@pytest.mark.parametrize("template", REPLIES)
@pytest.mark.first(1)
async def test_a_stream_of_delimiters_in_any_order_says_what_the_whole_answer_says(template: str) -> None:
    words, call, _ = REPLIES[template]
    pieces = [*re.findall(r"<[^>]*>|[^<]+", f"{words}{call}<think>\n"), "so ", "\n"]

    def write(request: ScriptedRequest) -> str:
        return "".join(random.Random(request.params.stream).choices(pieces, k=12))

    async with served(ScriptedBackend(write, tokenizer=trl_tokenizer(template))) as chat:
        num_thoughts = 0
        for seed in range(15):
            fields = {"seed": seed, "max_tokens": 90 - 2 * seed, "tools": [LOOK] if seed % 2 and call else []}
            answer = await whole(chat, **fields)
            assert await streamed(chat, **fields) == answer
            num_thoughts += bool(answer["reasoning"])
        assert num_thoughts > 3
