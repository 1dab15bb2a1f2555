"""Judges and users that think: what an endpoint's model thought is no part of its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from chat_server import ChatServer, Fault, body

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.openai.responses import WordStream, words_of
from stateset_agents.core.users.model_user import ModelUsers
from stateset_agents.rewards.judge import JudgeReward
from stateset_agents.types.errors import EnvironmentFailure, RewardFailure
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

HI = [Message(role="user", content="hi")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Score: 7", "Score: 7"),
        (" a < b \n", " a < b \n"),
        ("<think>Score: 3?</think>\n\nScore: 7", "Score: 7"),
        ("Score: 3?\n</think>\n\nScore: 7", "Score: 7"),  # the prompt has opened the thought
        ("<think>Score: 3?", ""),
        ("\n<think>so</think> I see. <think>but</think> No.\n", "\nI see. No.\n"),
        ("</think>yes", "yes"),
        ("I <thin", "I <thin"),
    ],
)
def test_the_words_of_a_content(content: str, words: str) -> None:
    assert words_of(content) == words
    if "<think>" in content or "</think>" not in content:
        for size in (1, 3, 100):
            stream = WordStream()
            pieces = [stream.add(content[at : at + size]) for at in range(0, len(content), size)]
            assert "".join([*pieces, stream.finish()]) == words


def whole(finish: str = "stop", **message: Any) -> Fault:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return body(json.dumps({"choices": [choice]}))


def streamed(*deltas: dict[str, str], finish: str = "stop") -> Fault:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    text = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
    return lambda request: web.Response(text=f"{text}data: [DONE]\n\n", content_type="text/event-stream")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_beside_the_content_are_passed_over(name: str) -> None:
    async with ChatServer(
        whole(content="Score: 7", **{name: "Score: 3?"}),
        whole(content=None, finish="length", **{name: "Score: 3?"}),
        streamed(
            {name: "Score: 3?"}, {"content": "<think>hm</th"}, {"content": "ink>Score"}, {"content": ": 7"}
        ),
        streamed({name: "Score: 3?"}, finish="length"),
    ) as server:
        client = ChatClient(server.url, "m", max_attempts=1)
        assert (await client.complete(HI)).text == "Score: 7"
        cut = await client.complete(HI)
        assert (cut.text, cut.finish_reason) == ("", "length")
        pieces: list[str] = []
        assert (await client.complete(HI, on_text=pieces.append)).text == "Score: 7"
        assert "".join(pieces) == "Score: 7"
        cut = await client.complete(HI, on_text=pieces.append)
        assert (cut.text, cut.finish_reason) == ("", "length")
        assert "".join(pieces) == "Score: 7"


async def test_a_judge_that_thinks_is_read_by_its_verdict() -> None:
    trajectory = Trajectory(scenario=Scenario(id="s", family="refund"), opening=(HI[0],), turns=())
    async with ChatServer(
        whole(content="<think>Score: 3? No.</think>Kind.\nScore: 7"),
        whole(content="<think>Score: 3", finish="length"),
    ) as server:
        judge = JudgeReward(ChatClient(server.url, "m"), "Is it kind?")
        assert (await judge.score(trajectory)).score == 0.7
        with pytest.raises(RewardFailure, match=r"cut \(length\): raise its max_new_tokens"):
            await judge.score(trajectory)


async def test_a_user_that_thinks_says_its_words_alone() -> None:
    async with ChatServer(
        whole(content="I want it all. [done]?</think>Where is my order?"),
        whole(content=None, reasoning="What do I want?", finish="length"),
    ) as server:
        user = ModelUsers(ChatClient(server.url, "m"))(Scenario(id="s", family="refund"), 0)
        assert await user.reply([]) == "Where is my order?"
        with pytest.raises(EnvironmentFailure, match="said nothing: raise its max_new_tokens"):
            await user.reply([])
