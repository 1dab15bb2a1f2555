"""A fork and the conversation it was taken from know nothing of one another, whatever either does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stateset_agents.core.environment import Conversation, ConversationEnvironment, Environment, Observation
from stateset_agents.core.users.simulated_user import Rule, RuleBasedUser, ScriptedUser, default_user
from stateset_agents.environments.retail_desk import FAMILIES, HonestAgent, RetailDesk
from stateset_agents.environments.retail_desk.full.honest import call
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


LINES = ("Which order id is it?", "Hm.", "Anything else?", "It will take two days.", "Hm.", "Good bye.")
TALK = tuple(map(say, LINES))

USERS = {
    "default": default_user,
    "scripted": lambda scenario, seed: ScriptedUser(["Hi", "a", "b", "c"]),
    "rules": lambda scenario, seed: RuleBasedUser(
        [
            Rule(pattern="which|take", replies=tuple("abcdefgh")),
            Rule(pattern="else", replies=("no",), once=True),
        ],
        opening=("Hi",),
        goal=lambda messages: "two days" in messages[-1].content,
        patience=1,
        seed=seed,
    ),
}


def talking(user: str) -> tuple[Environment, Scenario, Sequence[Message]]:
    scenario = {"topic": "refund", "context": {"order_id": "K27", "expected_facts": {"days": ["two days"]}}}
    environment = ConversationEnvironment([scenario], user=USERS[user], max_turns=5)
    return environment, environment.scenarios("train")[0], TALK


async def at_the_desk(family: str) -> tuple[Environment, Scenario, Sequence[Message]]:
    desk = RetailDesk()
    scenario = next(one for one in desk.scenarios("test") if one.family == family)
    conversation, agent, said = await desk.start(scenario, 3), HonestAgent(), []
    messages = list(conversation.opening)
    while True:
        said.append(agent.reply(messages))
        observation = await conversation.step(said[-1])
        messages += [said[-1], *observation.messages]
        if observation.terminated:
            return desk, scenario, said


Heard = tuple[list[Observation], Outcome]


async def follow(conversation: Conversation, replies: Sequence[Message]) -> Heard:
    heard = []
    for reply in replies:
        heard.append(await conversation.step(reply))
        if heard[-1].terminated or heard[-1].truncated:
            break
    outcome = await conversation.outcome()
    await conversation.close()
    return heard, outcome


async def run_riot(conversation: Conversation, scenario: Scenario) -> None:
    """Say and do what the conversation proper never would."""
    order_id = str(scenario.context.get("order_id", "K27"))
    for reply in (call("cancel_order", order_id=order_id), say("done, your order is cancelled.")):
        if (await conversation.step(reply)).terminated:
            break
    await conversation.close()


@pytest.mark.parametrize("where", [*USERS, *FAMILIES])
async def test_whatever_a_fork_does_its_origin_goes_on_as_without_it_and_the_other_way(where: str) -> None:
    environment, scenario, replies = talking(where) if where in USERS else await at_the_desk(where)
    heard, outcome = await follow(await environment.start(scenario, 3), replies)
    assert len(heard) > 1

    origin = await environment.start(scenario, 3)
    followers: list[tuple[int, Conversation]] = []
    for turn, expected in enumerate(heard):
        assert await origin.step(replies[turn]) == expected
        if turn + 1 < len(heard):
            followers.append((turn + 1, origin.fork()))
            await run_riot(origin.fork(), scenario)
    assert await origin.outcome() == outcome
    await origin.close()
    for turn, fork in followers:
        assert await follow(fork.fork(), replies[turn:]) == (heard[turn:], outcome)
        assert await follow(fork, replies[turn:]) == (heard[turn:], outcome)
