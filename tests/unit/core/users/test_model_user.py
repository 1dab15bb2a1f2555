"""Users played by a model behind a chat endpoint, over a real loopback connection."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from chat_server import ChatServer, answer, status
from engines import make_engine

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.users.model_user import ModelUser, ModelUsers
from stateset_agents.types.errors import BudgetExceeded, ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Status

CLAIMS = [{"topic": "return", "context": {"item": "a red lamp"}}]
WANTS = "You bought {item} and want to return it."


def says(*lines):
    """Faults that answer with these lines, one after another."""
    return [
        lambda request, line=line: web.Response(
            text=json.dumps(answer(line)), content_type="application/json"
        )
        for line in lines
    ]


async def play(server, replies=("Which item?", "Done."), instructions=WANTS, **client):
    users = ModelUsers(ChatClient(server.url, "m", backoff=0.01, **client), instructions)
    environment = ConversationEnvironment(CLAIMS, user=users)
    assert environment.local is False
    async with MultiTurnAgent(backend=ScriptedBackend(list(replies))) as agent:
        engine = make_engine(agent, environment, EnvironmentReward(), num_generations=1, episode_retries=0)
        (group,) = await engine.rollout(environment.scenarios("train"), seed=0, step=0)
    return group.trajectories[0]


@pytest.mark.parametrize(("end", "success"), [("Thanks! [done]", True), ("[LEAVE]", False)])
async def test_a_conversation_with_a_model_as_user(end, success):
    async with ChatServer(*says("I want to return something.", " The lamp. ", end)) as server:
        one = await play(server)
    assert [message.content for message in one.messages] == [
        "I want to return something.",
        "Which item?",
        "The lamp.",
        "Done.",
    ]
    assert (one.status, one.success, one.reward) == (Status.TERMINATED, success, float(success))
    first, second, third = (body["messages"] for body in server.bodies)
    assert first[0]["role"] == "system"
    assert first[0]["content"].endswith("You bought a red lamp and want to return it.")
    assert [message["role"] for message in first] == ["system", "user"]
    assert second[1:] == [
        {"role": "assistant", "content": "I want to return something."},
        {"role": "user", "content": "Which item?"},
    ]
    assert [message["role"] for message in third] == ["system", "assistant", "user", "assistant", "user"]


async def test_a_busy_endpoint_is_waited_for_and_one_that_is_gone_fails_the_conversation():
    busy = status(429, Retry_After="0.05")
    async with ChatServer(busy, *says("Hello?", "[done]")) as server:
        one = await play(server)
        assert (one.status, len(server.bodies)) == (Status.TERMINATED, 3)
    async with ChatServer(*[status(401, "no key")] * 4) as server:
        one = await play(server)
    assert one.status is Status.FAILED
    assert "status 401" in one.error


async def test_a_budget_that_is_used_up_ends_what_is_going_on():
    async with ChatServer(*says("Hello?", "Well?")) as server:
        with pytest.raises(BudgetExceeded, match="budget of 1 calls"):
            await play(server, max_calls=1)


async def test_an_empty_answer_fails_the_conversation():
    async with ChatServer(*says("  ")) as server:
        one = await play(server)
    assert one.status is Status.FAILED
    assert "said nothing" in one.error


async def test_without_instructions_the_user_knows_the_scenario():
    async with ChatServer(*says("[leave]")) as server:
        client = ChatClient(server.url, "m")
        user = ModelUsers(client)(Scenario(id="s", family="lost_parcel", context={"order": "K27"}), 0)
        assert await user.reply(()) is None
        told = server.bodies[0]["messages"][0]["content"]
    assert 'You need help with lost parcel. What you know: {"order": "K27"}' in told
    assert isinstance(user.fork(), ModelUser)


def test_what_the_scenario_does_not_have_is_named():
    users = ModelUsers(ChatClient("http://localhost:1/v1", "m"), "You want {thing}.")
    with pytest.raises(ConfigurationError, match="ask for 'thing', its context has item"):
        users(Scenario(id="s", context={"item": "a lamp"}), 0)
    with pytest.raises(ConfigurationError, match="ChatClient"):
        ModelUsers("http://localhost:1/v1")
