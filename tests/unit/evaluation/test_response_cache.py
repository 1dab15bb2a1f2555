"""A reply is sampled once for a model, its settings and a question, and never for a model that is trained."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tiny_training import make_agent

from stateset_agents.backends.base import exclusive, new_weights
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.evaluation.response_cache import ResponseCache
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import Message


def numbered() -> ScriptedBackend:
    """Says how many requests it has had."""
    return ScriptedBackend(lambda request: f"reply {request.turn}")


@pytest.fixture
async def agent() -> AsyncIterator[MultiTurnAgent]:
    async with MultiTurnAgent(AgentConfig(temperature=0.5), backend=numbered()) as agent:
        yield agent


async def said(
    cache: ResponseCache, agent: MultiTurnAgent, prompt: str = "2 + 3?", **settings: object
) -> str:
    return (await cache.get_or_generate(prompt, agent, **settings)).message.content


async def test_the_first_reply_to_a_question_is_the_reply_to_it(agent: MultiTurnAgent) -> None:
    cache = ResponseCache()
    assert [await said(cache, agent) for _ in range(3)] == ["reply 0"] * 3
    assert await said(cache, agent, "3 + 4?") == "reply 1"
    assert len(cache) == 2
    assert cache.metrics() == {"cache/hits": 2.0, "cache/misses": 2.0}
    assert cache.metrics() == {"cache/hits": 0.0, "cache/misses": 0.0}


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.1}, {"max_new_tokens": 7}, {"top_k": 5}, {"stream": 2}]
)
async def test_other_sampling_is_another_question(agent: MultiTurnAgent, changed: dict[str, float]) -> None:
    cache = ResponseCache()
    assert await said(cache, agent) == "reply 0"
    assert (await said(cache, agent, **changed))[:7] == "reply 1"[: changed.get("max_new_tokens")]
    assert len(cache) == 2
    assert await said(cache, agent) == "reply 0"


async def test_another_thought_before_is_another_question(agent: MultiTurnAgent) -> None:
    cache = ResponseCache()
    for thought in ("5 it is", "6 it is"):
        await cache.get_or_generate(
            [
                Message(role="user", content="2 + 3?"),
                Message(role="assistant", content="done", reasoning=thought),
                Message(role="user", content="and?"),
            ],
            agent,
        )
    assert len(cache) == 2


async def test_other_weights_are_another_model(agent: MultiTurnAgent) -> None:
    cache = ResponseCache()
    assert await said(cache, agent) == "reply 0"
    agent.backend.version += 1
    assert await said(cache, agent) == "reply 1"
    new_weights(agent.backend)  # of another trainer, with the same number
    assert await said(cache, agent) == "reply 2"


async def test_two_models_of_one_name_are_two() -> None:
    cache = ResponseCache()
    for _ in range(2):
        async with MultiTurnAgent(AgentConfig(), backend=numbered()) as agent:
            await said(cache, agent)
    assert cache.metrics()["cache/hits"] == 0


async def test_the_oldest_leaves_first_however_often_it_was_asked_for(agent: MultiTurnAgent) -> None:
    cache = ResponseCache(2)
    for prompt in ("a", "b", "a", "a", "c"):
        await said(cache, agent, prompt)
    assert len(cache) == 2
    assert await said(cache, agent, "b") == "reply 1"
    assert await said(cache, agent, "c") == "reply 2"
    assert await said(cache, agent, "a") == "reply 3"


async def test_a_hundred_thousand_are_kept_unless_said() -> None:
    assert ResponseCache().max_size == 100_000


async def test_who_asks_the_same_meanwhile_waits_for_its_reply() -> None:
    backend = ScriptedBackend(lambda request: f"reply {request.turn}", delay=0.01)
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        cache = ResponseCache()
        replies = await asyncio.gather(*(said(cache, agent) for _ in range(5)))
        assert replies == ["reply 0"] * 5
        assert cache.metrics() == {"cache/hits": 4.0, "cache/misses": 1.0}


async def test_a_reply_that_failed_is_asked_for_again() -> None:
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend([])) as agent:
        cache = ResponseCache()
        asked = (said(cache, agent) for _ in range(2))
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) for result in results] == [BackendError] * 2
        assert (len(cache), cache.metrics()["cache/misses"]) == (0, 2.0)


async def test_a_model_that_is_trained_is_refused(agent: MultiTurnAgent) -> None:
    cache = ResponseCache()
    await said(cache, agent)
    with (
        exclusive(agent.backend, object()),
        pytest.raises(ConfigurationError, match="is being trained"),
    ):
        await said(cache, agent)
    assert await said(cache, agent) == "reply 0"


async def test_a_real_model_s_reply_is_the_same_tokens() -> None:
    async with make_agent() as agent:
        cache = ResponseCache()
        first, again = [await cache.get_or_generate("hi", agent, temperature=1.0) for _ in range(2)]
        fresh = await cache.get_or_generate("hi", agent, temperature=1.0, stream=1)
    assert first is again
    assert fresh.token_ids != first.token_ids


@pytest.mark.parametrize("size", [0, 1.5, True])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ConfigurationError, match="max_size must be a whole number from 1 on"):
        ResponseCache(size)


async def test_an_unknown_setting_is_named(agent: MultiTurnAgent) -> None:
    with pytest.raises(ConfigurationError, match="warmth is no setting of sampling"):
        await said(ResponseCache(), agent, warmth=1)
