"""An evaluation that breaks off goes on: what is kept, what is played again, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Fault, answer, body, status
from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli.output import exclusions
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Observation
from stateset_agents.core.reward import EnvironmentReward, reward_function
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.evaluation.comparison import compare
from stateset_agents.evaluation.evaluator import Evaluation, evaluate
from stateset_agents.evaluation.kept_conversations import KeptConversations
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory

TWO = RolloutLimits(max_concurrent=2)
OUTCOME = Outcome(
    reward=1.0, success=True, breakdown={"a": 1.0}, changes=({"row": 1},), metadata={"violations": {"x": 1}}
)


class Talks(ChattyEnvironment):
    """Judges with all that an outcome can hold; `broken` scenarios end the whole evaluation."""

    def __init__(self, broken: str = "") -> None:
        super().__init__(turns=2, verdict=OUTCOME, answer=self._answer)
        self.broken = broken

    async def start(self, scenario: Scenario, seed: int) -> Any:
        conversation: Any = await super().start(scenario, seed)
        conversation.tools = ({"type": "function", "function": {"name": "look"}},)
        return conversation

    async def _answer(self, conversation: ChattyConversation, reply: Message) -> Observation | None:
        if conversation.scenario.id == self.broken:
            raise ConfigurationError("here it breaks off")
        return None


async def measured(
    server: ChatServer, file: Path, environment: Any = None, **settings: Any
) -> tuple[Evaluation, KeptConversations]:
    client = ChatClient(server.url, settings.pop("model", "m"), backoff=0.001, max_attempts=1)
    agent = EndpointAgent(client, settings.pop("config", None))
    reward = settings.pop("reward", None) or EnvironmentReward()
    number = settings.pop("scenarios", None) or scenarios(4)
    with KeptConversations(file, identity={"environment": "talks"}, usage=lambda: agent.usage) as kept:
        result = await evaluate(agent, environment or Talks(), reward, number, kept=kept, **settings)
    return result, kept


def thinking(request: Any) -> Any:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{"}}
    return body(json.dumps(answer({"content": "Hm ✓ \ud800", "reasoning": "why", "tool_calls": [call]})))(
        request
    )


async def test_a_second_call_plays_only_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "new" / "kept.jsonl"
    async with ChatServer(*[thinking] * 40) as server:
        with pytest.raises(ConfigurationError, match="here it breaks off"):
            await measured(server, file, Talks("s3"), tries=2, limits=TWO)
        asked = len(server.bodies)
        resumed, kept = await measured(server, file, tries=2)
        again = len(server.bodies)
    async with ChatServer(*[thinking] * 40) as server:
        whole, _ = await measured(server, tmp_path / "other.jsonl", tries=2)
        assert len(server.bodies) == 16
    assert kept.num_found >= 1
    assert kept.num_found + kept.num_added == 8
    assert again - asked == 2 * kept.num_added < 16
    assert resumed.summary() == whole.summary()
    assert resumed.violations["any"].value == 1.0
    for one, other in zip(resumed.groups, whole.groups, strict=True):
        assert one == other  # every message, verdict and reward
        assert one.trajectories[0].replies[0].reasoning == "why"
        assert one.trajectories[0].replies[0].tool_calls[0].error is not None
    spent = kept.spent  # of a request that the break cut, nobody knows the tokens
    assert spent.num_requests == again
    assert 10 * (again - 1) <= spent.prompt_tokens == 2 * spent.completion_tokens <= 10 * again


async def test_all_that_is_kept_is_measured_without_a_request(tmp_path: Path) -> None:
    async with ChatServer() as server:
        first, _ = await measured(server, tmp_path / "kept.jsonl")
        second, kept = await measured(server, tmp_path / "kept.jsonl")
        assert len(server.bodies) == 8
    assert (kept.num_found, kept.num_added) == (4, 0)
    assert first.summary() == second.summary()
    assert compare(first, second).verdict == "unclear"


async def test_rewards_are_asked_again(tmp_path: Path) -> None:
    @reward_function
    async def half(trajectory: Trajectory) -> float:
        assert trajectory.outcome is not None
        return 0.5 * trajectory.outcome.metadata["violations"]["x"]

    async with ChatServer() as server:
        await measured(server, tmp_path / "kept.jsonl")
        result, _ = await measured(server, tmp_path / "kept.jsonl", reward=half)
        assert len(server.bodies) == 8
    assert result.mean_reward == 0.5


async def test_what_was_not_answered_is_counted_apart_and_played_by_the_next_call(tmp_path: Path) -> None:
    faults: list[Fault | None] = [None] * 3 + [status(500)]
    async with ChatServer(*faults) as server:
        first, _ = await measured(server, tmp_path / "kept.jsonl")
        second, kept = await measured(server, tmp_path / "kept.jsonl")
    assert (first.num_failed, first.num_unanswered, first.n, first.success) == (1, 1, 3, 1.0)
    assert exclusions(first.summary()) == [
        "left out: 1 conversations that failed (1 of them not answered by the endpoint)"
    ]
    assert (second.num_failed, second.n, kept.num_found, kept.num_added) == (0, 4, 3, 1)


async def test_what_the_environment_broke_is_not_counted_as_unanswered(tmp_path: Path) -> None:
    async def broken(conversation: ChattyConversation, reply: Message) -> Observation | None:
        if conversation.scenario.id == "s0":
            raise EnvironmentFailure("the shop is closed")
        return None

    async with ChatServer() as server:
        result, _ = await measured(server, tmp_path / "k.jsonl", ChattyEnvironment(answer=broken))
    assert (result.num_failed, result.num_unanswered, result.n) == (1, 0, 3)


async def test_nothing_answered_at_all_is_no_result(tmp_path: Path) -> None:
    async with ChatServer(*[status(500)] * 20) as server:
        with pytest.raises(EnvironmentFailure, match=r"none of 4 conversations was played.*status 500"):
            await measured(server, tmp_path / "kept.jsonl")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"model": "other"}, "model 'm', and this evaluation has 'other'"),
        ({"seed": 1}, "seed 0, and this evaluation has 1"),
        ({"temperature": 0.0}, "temperature 1.0, and this evaluation has 0.0"),
        ({"tries": 2}, "tries 1, and this evaluation has 2"),
        ({"config": AgentConfig(max_new_tokens=9)}, "max_new_tokens 256, and this evaluation has 9"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_conversations_of_another_evaluation_are_refused(
    settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    file = tmp_path / "kept.jsonl"
    async with ChatServer() as server:
        await measured(server, file)
        before = file.read_bytes()
        with pytest.raises(ConfigurationError, match=f"holds conversations with {name}: give another file"):
            await measured(server, file, **settings)
        assert len(server.bodies) == 8
    assert file.read_bytes() == before


async def test_another_environment_or_address_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    async with ChatServer() as server:
        await measured(server, file)
    other = "with environment 'talks', and this evaluation has 'shop'"
    with (
        KeptConversations(file, identity={"environment": "shop"}) as kept,
        pytest.raises(ConfigurationError, match=other),
    ):
        kept.begin({})
    async with ChatServer() as server:
        with pytest.raises(ConfigurationError, match="holds conversations with url 'http"):
            await measured(server, file)


def test_a_file_without_conversations_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    for url in ("http://wrong", "http://right", "http://right"):
        with KeptConversations(file) as kept:
            kept.begin({"url": url})
    identities = [json.loads(line).get("identity") for line in file.read_text().splitlines()]
    assert identities == [None, {"url": "http://wrong"}, {"url": "http://right"}]


async def test_a_scenario_that_has_changed_is_refused(tmp_path: Path) -> None:
    changed = [Scenario(id="s0", family="family 0", context={"order": "K27"}), *scenarios(4)[1:]]
    async with ChatServer() as server:
        await measured(server, tmp_path / "kept.jsonl")
        with pytest.raises(ConfigurationError, match="scenario s0, changed since"):
            await measured(server, tmp_path / "kept.jsonl", scenarios=changed)
        more, kept = await measured(server, tmp_path / "kept.jsonl", scenarios=scenarios(6))
    assert (more.n, kept.num_found) == (6, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: ["not JSON", *lines], "line 1: not JSON"),
        (lambda lines: ['{"schema_version": 9}', *lines], "has schema version 9"),
        (lambda lines: [lines[0], '{"step": 1}', *lines[1:]], "line 2: no conversation of an evaluation"),
        (lambda lines: [*lines, '{"conversation": 5}'], "line 7: no conversation of an evaluation"),
        (lambda lines: [*lines, '{"spent": {"dollars": 5}}'], "line 7: no conversation of an evaluation"),
    ],
)
async def test_a_file_of_something_else_is_left_as_it_is(
    damage: Callable[[list[str]], list[str]], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "kept.jsonl"
    async with ChatServer() as server:
        await measured(server, file)
    damaged = "\n".join(damage(file.read_text().splitlines())) + "\n"
    file.write_text(damaged)
    with pytest.raises(ConfigurationError, match=message):
        KeptConversations(file)
    assert file.read_text() == damaged


async def test_a_line_that_a_kill_has_torn_is_played_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    async with ChatServer() as server:
        first, _ = await measured(server, file)
        os.truncate(file, file.stat().st_size - 20)
        second, kept = await measured(server, file)
    assert (kept.num_found, kept.num_added) == (3, 1)
    assert first.summary() == second.summary()


async def test_an_interruption_keeps_what_has_ended_and_what_was_spent(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    async with ChatServer() as server:
        server.delay = 0.05
        agent = EndpointAgent(ChatClient(server.url, "m"))

        async def play() -> None:
            with KeptConversations(file, usage=lambda: agent.usage) as kept:
                await evaluate(agent, Talks(), EnvironmentReward(), scenarios(20), limits=TWO, kept=kept)

        task = asyncio.create_task(play())
        while len(server.bodies) < 12:  # noqa: ASYNC110  # some have ended then, others have begun
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.most_together == 2
    with KeptConversations(file) as kept:
        assert kept.spent.num_requests == agent.usage.num_requests
        assert 0 < len(kept) < 20


def test_one_evaluation_at_a_time_writes_a_file(tmp_path: Path) -> None:
    with KeptConversations(tmp_path / "kept.jsonl"):
        with pytest.raises(ConfigurationError, match="another evaluation is writing"):
            KeptConversations(tmp_path / "kept.jsonl")
        KeptConversations(tmp_path / "other.jsonl").close()
    KeptConversations(tmp_path / "kept.jsonl").close()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot make the folder"):
        KeptConversations(tmp_path / "a file" / "kept.jsonl")


async def test_conversations_of_a_model_that_runs_here_are_kept_too(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        backend = ScriptedBackend(lambda request: "ok")
        async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
            with KeptConversations(tmp_path / "kept.jsonl") as kept:
                result = await evaluate(agent, Talks(), EnvironmentReward(), scenarios(4), kept=kept)
        results.append((result.summary(), len(backend.requests)))
    assert [requests for _, requests in results] == [8, 0]
    assert results[0][0] == results[1][0]


async def test_an_agent_that_has_been_trained_since_is_another_one(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda request: "ok")
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        with KeptConversations(tmp_path / "kept.jsonl") as kept:
            await evaluate(agent, Talks(), EnvironmentReward(), scenarios(1), kept=kept)
        backend.version = 1
        with KeptConversations(tmp_path / "kept.jsonl") as kept:
            work = evaluate(agent, Talks(), EnvironmentReward(), scenarios(1), kept=kept)
            with pytest.raises(ConfigurationError, match="with version 0, and this evaluation has 1"):
                await work
