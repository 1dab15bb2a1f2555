"""Thoughts and framed calls on their whole way: the agent's own, never the user's, tools' or judge's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_templates import trl_tokenizer
from tiny_models import tiny_model
from tiny_training import make_agent

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import reward_function
from stateset_agents.core.rollout.episode import EpisodeSeeds, run_episode
from stateset_agents.rewards.judge import judge_prompt
from stateset_agents.serving.chat_session import ChatSession
from stateset_agents.serving.saved_conversations import load_conversations, save_conversation
from stateset_agents.serving.server import AgentServer
from stateset_agents.training.trl.backend import TrlBackend
from stateset_agents.types.messages import SamplingParams

CALL = "<|tool_call_start|>[look_up(order='it\\'s K27')]<|tool_call_end|>"
FRAMED = f"<think>Order K27?</think>Let me see.{CALL}"
SECRET = "<think>\nThey sound angry.\n</think>\n\nIn Oslo."
HI = [{"role": "user", "content": "hi"}]


def look_up(order: str) -> str:
    """Where an order is."""
    return f"{order} is in Oslo"


@asynccontextmanager
async def framed_agent(script: Sequence[str], **settings: Any) -> Any:
    """LFM2: its calls stand between control tokens, which decoding leaves out unless it is told not to."""
    backend = ScriptedBackend(script, tokenizer=trl_tokenizer("lfm2_v2"), context_length=10_000)
    async with MultiTurnAgent(AgentConfig(model_name="mine", **settings), backend=backend) as agent:
        yield agent, backend


class Listener:
    """A user who keeps all that it was shown."""

    def __init__(self, heard: list[Message]) -> None:
        self.heard = heard

    async def reply(self, messages: Sequence[Message]) -> str | None:
        self.heard[:] = messages
        return "and now?" if sum(message.role == "user" for message in messages) < 2 else None


async def test_nobody_but_the_agent_s_own_trajectory_has_its_thoughts() -> None:
    heard: list[Message] = []
    environment = ConversationEnvironment(
        scenarios=[{"id": "s", "topic": "order"}],
        user=lambda scenario, seed: Listener(heard),
        tools=[look_up],
        max_turns=3,
    )
    (scenario,) = environment.scenarios("train")
    seeds = EpisodeSeeds(user=1, agent=2)
    async with framed_agent([FRAMED, SECRET, SECRET]) as (agent, _):
        trajectory = await run_episode(agent, environment, scenario, seeds=seeds, session=Session(0, 0))
    assert trajectory.error is None
    first, second, _ = (turn.completion.message for turn in trajectory.turns)
    assert (first.content, first.reasoning) == ("Let me see.", "Order K27?")
    assert [call.arguments for call in first.tool_calls] == [{"order": "it's K27"}]
    assert trajectory.turns[0].feedback[0].content == "it's K27 is in Oslo"
    assert (second.content, second.reasoning) == ("In Oslo.", "They sound angry.")
    replies = [message.content for message in heard if message.role == "assistant"]
    assert replies == ["Let me see.", "In Oslo.", "In Oslo."]
    assert all(message.reasoning is None for message in heard)
    assert "angry" not in judge_prompt(trajectory, "Is it good?")
    rewarded: list[Message] = []
    for reward in (
        reward_function(lambda messages, replies: rewarded.extend([*messages, *replies]) or 1.0),
        reward_function(lambda reply: rewarded.append(reply) or 1.0, scope="turn"),
    ):
        await reward.score(trajectory)
    assert len(rewarded) == len(trajectory.messages) + 2 * len(trajectory.turns)
    assert all(message.reasoning is None for message in rewarded)


async def test_answers_are_words_and_streams_too() -> None:
    async with framed_agent([SECRET, SECRET, f"{FRAMED} ok"]) as (agent, _):
        assert await agent.generate_response("where?") == "In Oslo."
        pieces = [piece async for piece in agent.stream_response("where?")]
        assert "".join(pieces) == "In Oslo."
        assert len(pieces) > 2
        # No tools are offered: what looks like a call stays text, its control tokens do not.
        assert await agent.generate_response("where?") == "Let me see.[look_up(order='it\\'s K27')] ok"


@pytest.mark.parametrize("stop", ["Oslo", "."])
async def test_a_stop_string_ends_words_as_before(stop: str) -> None:
    async with framed_agent([SECRET], stop=(stop,)) as (agent, _):
        completion = await agent.reply([1], agent.sampling(stream=0))
    cut = SECRET[: SECRET.index(stop)]
    message = agent.template.parser.read(cut)
    assert (completion.message, completion.finish_reason) == (message, "stop")


async def test_a_chat_streams_words_and_keeps_thoughts_in_its_messages(tmp_path: Path) -> None:
    async with framed_agent([FRAMED, SECRET, "Bye."]) as (agent, _):
        async with ChatSession(agent, tools=[look_up]) as chat:
            events = [event async for event in chat.stream("where is K27?")]
        texts = "".join(event for event in events if isinstance(event, str))
        assert texts == "Let me see.In Oslo."
        assert [message.reasoning for message in chat.messages] == [
            None,
            "Order K27?",
            None,
            "They sound angry.",
        ]
        save_conversation(tmp_path / "talk.jsonl", chat.messages)
        (loaded,) = load_conversations(tmp_path / "talk.jsonl")
        assert tuple(loaded) == chat.messages


@asynccontextmanager
async def served(script: Sequence[str]) -> Any:
    async with (
        framed_agent(script) as (agent, backend),
        AgentServer(agent) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client.chat.completions, backend


async def test_a_server_s_answers_have_the_thoughts_beside_the_words() -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    async with served([SECRET, "Hi.", FRAMED]) as (chat, _):
        message = (await chat.create(model="mine", messages=HI)).choices[0].message
        assert (message.content, message.reasoning) == ("In Oslo.", "They sound angry.")
        plain = (await chat.create(model="mine", messages=HI)).choices[0].message
        assert plain.content == "Hi."
        assert "reasoning" not in plain.model_dump()
        deltas = [
            chunk.choices[0].delta.model_dump(exclude_none=True)
            async for chunk in await chat.create(model="mine", messages=HI, tools=tools, stream=True)
        ]
        assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "Order K27?"
        assert sum("reasoning" in delta for delta in deltas) > 2
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert calls[0]["function"]["arguments"] == '{"order": "it\'s K27"}'


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_a_client_may_bring_thoughts_back(name: str) -> None:
    async with served([SECRET]) as (chat, _):
        talk = [*HI, {"role": "assistant", "content": "In Oslo.", name: "Hm."}, *HI]
        assert (await chat.create(model="mine", messages=talk)).choices[0].message.content == "In Oslo."
        for wrong in (3, "x" * (2**20 + 1)):
            talk[1] = {"role": "assistant", "content": "", name: wrong}
            with pytest.raises((openai.BadRequestError, openai.APIStatusError)) as caught:
                await chat.create(model="mine", messages=talk)
            assert caught.value.status_code in (400, 413)


async def test_raw_text_has_control_tokens_where_they_are_asked_for_and_never_the_one_that_ended_it() -> None:
    tokenizer = trl_tokenizer("lfm2_v2")
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer.hf))
    backend = HuggingFaceBackend(model, tokenizer, copy_model=False)
    await backend.start()
    inner = tokenizer.encode_markup("<|tool_call_start|>")[0]
    ids = (*tokenizer.encode("a"), inner, *tokenizer.encode("b"))
    params = SamplingParams(max_new_tokens=40, stream=3, temperature=1.0)
    try:
        for stops in ((), tuple(range(200, 256))):  # bytes end a turn, too
            raw = replace(params, skip_special_tokens=False, stop_token_ids=stops)
            plain = await backend.generate(ids, replace(raw, skip_special_tokens=True))
            marked = await backend.generate(ids, raw)
            assert marked.token_ids == plain.token_ids
            said = marked.token_ids if marked.finish_reason == "length" else marked.token_ids[:-1]
            assert plain.message.content == tokenizer.decode(said)
            assert marked.message.content == tokenizer.decode_markup(said)
    finally:
        await backend.close()


async def test_trl_s_generation_keeps_control_tokens_too() -> None:
    tokenizer = trl_tokenizer("lfm2_v2")

    async def sample(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        ids = [*tokenizer.encode_markup(FRAMED), *tokenizer.eos_ids[:1]]
        return [(ids, [0.0] * len(ids)) for _ in prompts]

    inner = ScriptedBackend([], tokenizer=tokenizer)
    backend = TrlBackend(inner, sample, temperature=1.0, max_new_tokens=256)
    async with MultiTurnAgent(AgentConfig(max_new_tokens=256), backend=inner) as agent:
        completion = await backend.generate([1], agent.sampling(stream=0))
    assert completion.message.content == FRAMED
    assert agent.template.parser.read_completion(completion).message.tool_calls[0].name == "look_up"


async def test_an_agent_without_frames_says_every_text_as_before() -> None:
    texts = [" Hello \n", "a < b <thin", "take <tool_call>{} ", "what is <|end|>?", "\n"]
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(texts * 2)) as agent:
        for text in texts:
            assert await agent.generate_response("x") == text
        for text in texts:
            assert "".join([piece async for piece in agent.stream_response("x")]) == text
    async with make_agent(max_new_tokens=20) as one:
        assert one.sampling(stream=1).skip_special_tokens
