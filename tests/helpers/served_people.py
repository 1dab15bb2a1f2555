"""People of an environment who talk to a served agent by OpenAI's client, and report how it went."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import openai

from stateset_agents.core.environment import Environment
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive

MOST_REPLIES = 30
"""Of a conversation that the environment does not end."""


async def talk(
    client: openai.AsyncOpenAI, environment: Environment, scenario: Scenario, name: str, model: str
) -> bool:
    """One conversation; its outcome is the environment's verdict."""
    conversation = await environment.start(scenario, derive(0, "people", name))
    messages = list(conversation.opening)
    try:
        for _ in range(MOST_REPLIES):
            answer = await client.chat.completions.create(
                model=model,
                messages=[message.to_openai() for message in messages],  # type: ignore[misc]  # plain dicts
                tools=[dict(tool) for tool in conversation.tools],  # type: ignore[misc]  # plain dicts
                max_tokens=48,
                extra_headers={"X-Conversation-Id": name},
            )
            reply = Message.from_openai(answer.choices[0].message.model_dump(exclude_none=True))
            observation = await conversation.step(reply)
            messages += [reply, *observation.messages]
            if observation.terminated or observation.truncated:
                break
        outcome = await conversation.outcome()
    finally:
        await conversation.close()
    body = {"conversation": name, "success": bool(outcome.success)}
    await client.post("/outcomes", body=body, cast_to=object)
    return bool(outcome.success)


async def crowd(
    url: str,
    environment: Environment,
    scenarios: Sequence[Scenario],
    *,
    model: str,
    most: int,
    at_once: int,
    is_over: Callable[[], bool],
    name: str = "person",
) -> Counter[bool]:
    """Conversations, so many at once, until it is over or there were `most`; how they ended."""
    ended: Counter[bool] = Counter()
    numbers: Iterator[int] = iter(range(most))

    async def person(client: openai.AsyncOpenAI) -> None:
        for number in numbers:
            scenario = scenarios[number % len(scenarios)]
            ended[await talk(client, environment, scenario, f"{name} {number}", model)] += 1
            if is_over():
                return

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        await asyncio.gather(*(person(client) for _ in range(at_once)))
    return ended
