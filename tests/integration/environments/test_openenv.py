"""OpenEnv's own server on loopback, played through its own client: `make test-openenv`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import free_port, serving
from page_snippets import fences
from repository_paths import HELPERS, ROOT
from tiny_training import make_trainer, snapshot

from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.openenv import OpenEnvText
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure, EnvironmentTimeout
from stateset_agents.types.messages import Message

pytestmark = pytest.mark.openenv

GAME = HELPERS / "servers" / "openenv_game.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with serving(GAME, port, "8"):
        yield f"http://127.0.0.1:{port}"


def number(reply: str) -> dict[str, Any]:
    return {"number": int(reply)}


def game(url: str, **settings: Any) -> OpenEnvText:
    given = {
        "parse": number,
        "render": lambda observation: observation["hint"],
        "success": 0.5,
        "num_train": 4,
    }
    return OpenEnvText(url, **{**given, "num_held_out": 2, **settings})


async def begin(environment: OpenEnvText, seed: int = 0, place: int = 0) -> Conversation:
    return await environment.start(environment.scenarios("train")[place], seed)


async def say(conversation: Conversation, *replies: str) -> list[Observation]:
    return [await conversation.step(Message(role="assistant", content=reply)) for reply in replies]


def secret(environment: OpenEnvText, top: int = 9) -> int:
    return random.Random(environment.scenarios("train")[0].context["seed"]).randint(1, top)


async def test_a_number_is_found_and_every_turn_has_its_reward(url: str) -> None:
    environment = game(url, system_prompt="Guess.")
    assert environment.local is False
    conversation = await begin(environment)
    assert [message.content for message in conversation.opening] == ["Guess.", "from 1 to 9"]
    right = secret(environment)
    first, last = await say(conversation, str(right + 1), str(right))
    assert (first.messages[0].content, first.reward, first.terminated) == ("lower", -0.1, False)
    assert (last.messages[0].content, last.reward, last.terminated) == ("found", 1.0, True)
    outcome = await conversation.outcome()
    assert (outcome.reward, outcome.success) == (0.0, True)
    await conversation.close()


async def test_what_is_no_action_is_told_to_the_agent(url: str) -> None:
    conversation = await begin(game(url, misread_reward=-1.0, max_turns=2))
    unread, invalid = await say(conversation, "seven", "0")
    assert "invalid literal for int()" in unread.messages[0].content
    assert invalid.messages[0].content == "that is no valid action: {'number': 0}"
    assert (unread.reward, invalid.reward, invalid.truncated) == (-1.0, -1.0, True)
    assert (await conversation.outcome()).breakdown == {"misread": 2.0}
    await conversation.close()


async def test_settings_of_a_reset_come_from_the_run_and_the_scenario(url: str) -> None:
    shown: dict[str, Any] = {"render": None, "num_train": None, "num_held_out": None}
    scenarios = [{"id": "a", "context": {"seed": 5, "reset": {"top": 3}}}, {"id": "b"}]
    environment = game(url, **shown, scenarios=scenarios, reset={"top": 6})
    small, usual = await begin(environment), await begin(environment, place=1)
    assert small.opening[0].content == '{"hint": "from 1 to 3"}'  # without render, as JSON
    assert usual.opening[0].content == '{"hint": "from 1 to 6"}'
    await asyncio.gather(small.close(), usual.close())


async def test_words_and_whole_replies_may_be_the_action(url: str) -> None:
    by_word = await begin(game(url, parse=None, actions={"one": {"number": 1}, "two": {"number": 2}}))
    [seen] = await say(by_word, "I say one!")
    assert seen.reward in (-0.1, 1.0)
    whole = await begin(
        make_environment({"name": "openenv", "url": url, "reply_field": "number", "num_train": 1})
    )
    [seen] = await say(whole, "3")  # the server reads "3" as a number
    assert seen.messages[0].content.startswith('{"hint": "')
    await asyncio.gather(by_word.close(), whole.close())


async def test_an_error_of_the_server_fails_the_conversation(url: str) -> None:
    conversation = await begin(game(url))
    with pytest.raises(EnvironmentFailure, match="Server error: the game fell off the table"):
        await say(conversation, "99")
    await conversation.close()


async def test_a_server_that_hangs_is_a_time_out(url: str) -> None:
    conversation = await begin(game(url, timeout=0.5))
    with pytest.raises(EnvironmentTimeout, match=r"did not answer within 0\.5 s"):
        await say(conversation, "77")
    with pytest.raises(EnvironmentFailure, match="the connection was lost, and the session with it"):
        await say(conversation, "3")  # a session that was never reset would answer
    await conversation.close()


async def test_a_dropped_connection_fails_the_conversation_even_if_another_server_answers() -> None:
    port = free_port()
    environment = game(f"http://127.0.0.1:{port}", attempts=2)
    with serving(GAME, port):
        idle, asking = await begin(environment), await begin(environment)
        waiting = asyncio.create_task(say(asking, "77"))
        await asyncio.sleep(0.3)
    with pytest.raises(EnvironmentFailure, match="ConnectionClosed"):
        await waiting
    with serving(GAME, port):
        with pytest.raises(EnvironmentFailure, match="the connection was lost, and the session with it"):
            await say(idle, "3")
        again = await begin(environment)
        assert (await say(again, str(secret(environment))))[0].terminated
    await asyncio.gather(*(conversation.close() for conversation in (idle, asking, again)))
    with pytest.raises(EnvironmentFailure, match="Failed to connect"):
        await begin(environment)


async def test_opening_is_tried_again_until_the_server_has_room(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with serving(GAME, port, "1"):
        only = await begin(game(f"http://127.0.0.1:{port}"))
        with pytest.raises(EnvironmentFailure, match=r"a session of the OpenEnv server at .* failed"):
            await begin(game(f"http://127.0.0.1:{port}", attempts=1))
        assert "opening a session again" not in caplog.text
        opening = asyncio.create_task(begin(game(f"http://127.0.0.1:{port}", attempts=8)))
        while "opening a session again" not in caplog.text:  # noqa: ASYNC110  # a log line sets no event
            await asyncio.sleep(0.05)
        await only.close()
        await (await opening).close()


async def test_a_session_cannot_be_forked(url: str) -> None:
    conversation = await begin(game(url))
    with pytest.raises(ConfigurationError, match="cannot be forked: train with another advantage_estimator"):
        conversation.fork()
    await conversation.close()


async def test_it_trains_for_two_steps(url: str, tmp_path: Path) -> None:
    environment = game(url, parse=lambda reply: {"number": 1 + len(reply) % 9}, max_turns=3)
    trainer = make_trainer(
        tmp_path,
        environment=environment,
        reward=EnvironmentReward(),
        max_steps=2,
        num_generations=3,
    )
    await trainer.initialize()
    before = snapshot(trainer)
    await trainer.train()
    after = snapshot(trainer)
    assert any((after[name] != before[name]).any() for name in before)
    assert trainer.summary()["deterministic"] is False
    await trainer.close()
    rollouts = list(RunLog(trainer.run).rollouts("train"))
    assert {rollout.step for rollout in rollouts} == {1, 2}
    assert {rollout.status for rollout in rollouts} <= {"terminated", "truncated"}
    assert all(rollout.reward == sum(turn.reward or 0 for turn in rollout.turns) for rollout in rollouts)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"url": "localhost:8000"}, "url must be an OpenEnv server's"),
        ({"reply_field": "x"}, "give one of reply_field, parse and actions"),
        ({"parse": None}, "give one of reply_field, parse and actions"),
        ({"parse": None, "reply_field": ""}, "reply_field must be the name of a field"),
        ({"attempts": 0}, "attempts must be at least 1"),
        ({"timeout": 0}, "timeout must be seconds above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        game(**{"url": "http://localhost:1", **settings})


async def test_parse_must_make_a_mapping(url: str) -> None:
    conversation = await begin(game(url, parse=lambda reply: 3))
    with pytest.raises(ConfigurationError, match="parse must make the action's fields, a mapping, got 3"):
        await say(conversation, "x")
    await conversation.close()


async def test_the_snippet_of_the_page_plays(url: str) -> None:
    page = ROOT / "docs" / "other-environments.md"
    [snippet] = [fence for fence in fences(page) if "OpenEnvText(" in fence.text]
    namespace: dict[str, Any] = {}
    exec(snippet.text.replace("http://localhost:8000", url), namespace)
    conversation = await begin(namespace["environment"])
    assert conversation.opening[0].content == "from 1 to 5"
    right = secret(namespace["environment"], top=5)
    [seen] = await say(conversation, str(right))
    assert (seen.messages[0].content, (await conversation.outcome()).success) == ("found", True)
    await conversation.close()
