"""Many episodes at once: scenarios in, scored groups out, whatever happens to single members."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from builders import bare
from engines import engine_settings
from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine, create_computational_engine
from stateset_agents.core.environment import Observation
from stateset_agents.core.reward import EnvironmentReward, RewardFunction, reward_function
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup


def speak(request: ScriptedRequest) -> str:
    return f"reply {request.turn}"


def engine_of(
    environment: ChattyEnvironment,
    reward: RewardFunction | None = None,
    *,
    backend: ScriptedBackend | None = None,
    **settings: Any,
) -> ComputationalEngine:
    agent = MultiTurnAgent(AgentConfig(), backend=backend or ScriptedBackend(speak))
    reward = EnvironmentReward() if reward is None else reward
    settings = engine_settings(**{"num_generations": 3, **settings})
    return create_computational_engine(agent, environment, reward, **settings)


async def rollout(engine: ComputationalEngine, number: int = 3, **more: Any) -> list[TrajectoryGroup]:
    await engine.agent.initialize()
    groups = await engine.rollout(scenarios(number), **{"seed": 5, "step": 0, **more})
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return groups


def members(groups: list[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


async def test_groups_and_members_stand_in_order_however_long_they_take() -> None:
    async def uneven(conversation: ChattyConversation, reply: Message) -> None:
        await asyncio.sleep(0.01 * (conversation.seed % 3))

    environment = ChattyEnvironment(answer=uneven)
    groups = await rollout(engine_of(environment, backend=ScriptedBackend(speak, delay=0.001)), step=7)
    assert [group.key for group in groups] == ["7/s0", "7/s1", "7/s2"]
    assert [[t.member for t in group.trajectories] for group in groups] == [[0, 1, 2]] * 3
    assert [{t.scenario.id for t in group.trajectories} for group in groups] == [{"s0"}, {"s1"}, {"s2"}]
    assert [t.reward for t in members(groups)] == [1.75] * 9
    assert environment.num_open == 0


async def test_a_group_meets_one_user_and_its_members_sample_for_themselves() -> None:
    backend = ScriptedBackend(speak)
    engine = engine_of(ChattyEnvironment(), backend=backend)
    groups = await rollout(engine)
    seeds = [{t.seed for t in group.trajectories} for group in groups]
    assert [len(seed) for seed in seeds] == [1, 1, 1]
    assert len(set.union(*seeds)) == 3
    streams = [request.params.stream for request in backend.requests]
    assert len(set(streams)) == len(streams) == 18

    again = ScriptedBackend(speak)
    same = await rollout(engine_of(ChattyEnvironment(), backend=again))
    assert [t.seed for t in members(same)] == [t.seed for t in members(groups)]
    assert sorted(request.params.stream for request in again.requests) == sorted(streams)
    other = await rollout(engine, step=1)
    assert not {t.seed for t in members(other)} & {t.seed for t in members(groups)}
    assert not {t.seed for t in members(await rollout(engine, seed=6))} & {t.seed for t in members(groups)}


async def test_a_scenario_that_comes_twice_in_a_step_meets_another_user() -> None:
    backend = ScriptedBackend(speak)
    engine = engine_of(ChattyEnvironment(), backend=backend)
    await engine.agent.initialize()
    twice = [*scenarios(1), *scenarios(1)]
    first, second = await engine.rollout(twice, seed=5, step=0)
    assert first.trajectories[0].seed != second.trajectories[0].seed
    assert len({request.params.stream for request in backend.requests}) == 12
    assert len({request.session for request in backend.requests}) == 6


async def test_no_scenarios_give_no_groups() -> None:
    assert await rollout(engine_of(ChattyEnvironment()), number=0) == []


@pytest.mark.parametrize("deterministic", [True, False])
async def test_no_more_conversations_are_open_than_max_concurrent(deterministic: bool) -> None:
    environment = ChattyEnvironment()
    most = 0

    async def watch(conversation: ChattyConversation, reply: Message) -> None:
        nonlocal most
        await asyncio.sleep(0.001)
        most = max(most, environment.num_open)

    environment.answer = watch
    await rollout(engine_of(environment, max_concurrent=4, deterministic=deterministic), number=5)
    assert most == 4
    assert Counter(entry[0] for entry in environment.log) == {"start": 15, "close": 15}


async def test_a_member_that_fails_is_played_again_and_its_siblings_go_on() -> None:
    tries: Counter[int] = Counter()

    async def flaky(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.scenario.id == "s1" and conversation.turn == 1:
            tries[conversation.seed] += 1
            if tries[conversation.seed] == 2:  # the second member, once
                raise ConnectionError("no route")

    engine = engine_of(ChattyEnvironment(answer=flaky))
    groups = await rollout(engine)
    assert {t.status for t in members(groups)} == {Status.TERMINATED}
    assert [t.reward for t in members(groups)] == [1.75] * 9
    assert engine.num_retries == 1
    assert tries.total() == 4


@pytest.mark.parametrize("retries", [0, 2])
async def test_a_member_that_keeps_failing_is_given_up_unscored(retries: int) -> None:
    async def broken(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.scenario.id == "s1":
            raise ConnectionError("no route")

    environment = ChattyEnvironment(answer=broken)
    engine = engine_of(environment, episode_retries=retries)
    first, failed, last = await rollout(engine)
    assert {t.status for t in failed.trajectories} == {Status.FAILED}
    assert failed.rewards == [None] * 3
    assert [bare(t.error) for t in failed.trajectories] == ["ConnectionError: no route"] * 3
    assert [t.member for t in failed.trajectories] == [0, 1, 2]
    assert first.rewards == last.rewards == [1.75] * 3
    assert engine.num_retries == 3 * retries
    starts = [entry for entry in environment.log if entry[:2] == ("start", "s1")]
    assert len(starts) == 3 * (1 + retries)


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (ValueError("bad"), "unscored: reward score failed: ValueError: bad"),
        (float("nan"), "unscored: reward score: score must be a finite number or None, got nan"),
        ("good", "unscored: reward score: score must be a finite number or None, got 'good'"),
        (None, None),
    ],
)
async def test_what_is_no_score_leaves_its_member_unscored(score: Any, error: str | None) -> None:
    @reward_function(name="score")
    def judge(trajectory: Trajectory) -> Any:
        if trajectory.member != 1:
            return 0.5
        if isinstance(score, Exception):
            raise score
        return score

    (group,) = await rollout(engine_of(ChattyEnvironment(), judge), number=1)
    assert group.rewards == [0.5, None, 0.5]
    assert bare(group.trajectories[1].error) == str(error)
    assert group.trajectories[1].status is Status.TERMINATED


async def test_a_truncated_conversation_is_scored() -> None:
    async def cut(conversation: ChattyConversation, reply: Message) -> Observation:
        return Observation(truncated=True)

    (group,) = await rollout(engine_of(ChattyEnvironment(answer=cut)), number=1)
    assert {t.status for t in group.trajectories} == {Status.TRUNCATED}
    assert group.rewards == [1.0] * 3


async def test_a_failed_member_is_never_shown_to_the_reward() -> None:
    seen: list[int] = []

    @reward_function(scope="group")
    def best_of(trajectories: tuple[Trajectory, ...]) -> list[float]:
        seen.extend(t.member for t in trajectories)
        return [float(t.member) for t in trajectories]

    fresh = iter(range(3))

    async def first_breaks(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 1 and next(fresh) == 0:
            raise ConnectionError

    (group,) = await rollout(
        engine_of(ChattyEnvironment(answer=first_breaks), best_of, episode_retries=0, max_concurrent=1),
        number=1,
    )
    assert seen == [1, 2]
    assert group.rewards == [None, 1.0, 2.0]


async def wait_long(conversation: ChattyConversation, reply: Message) -> None:
    if conversation.scenario.id != "s0":
        await asyncio.sleep(60)


async def test_a_mistake_in_an_environment_travels_and_ends_everything() -> None:
    async def mistaken(conversation: ChattyConversation, reply: Message) -> None:
        await wait_long(conversation, reply)
        raise TypeError("a mistake")

    environment = ChattyEnvironment(answer=mistaken)
    started = time.monotonic()
    with pytest.raises(TypeError, match="a mistake"):
        await rollout(engine_of(environment))
    assert time.monotonic() - started < 5
    assert environment.num_open == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_mistake_in_a_reward_travels_at_once_and_ends_everything() -> None:
    @reward_function
    def mistaken(trajectory: Trajectory) -> float:
        raise AttributeError("a mistake")

    environment = ChattyEnvironment(answer=wait_long)
    started = time.monotonic()
    with pytest.raises(AttributeError, match="a mistake"):
        await rollout(engine_of(environment, mistaken))
    assert time.monotonic() - started < 5
    assert environment.num_open == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_cancelled_rollout_leaves_nothing_behind() -> None:
    environment = ChattyEnvironment(answer=wait_long)
    engine = engine_of(environment)
    await engine.agent.initialize()
    task = asyncio.create_task(engine.rollout(scenarios(3), seed=0, step=0))
    for _ in range(1000):
        await asyncio.sleep(0.005)
        if environment.num_open == 6:
            break
    assert environment.num_open == 6
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.num_open == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_group_is_scored_while_others_still_talk() -> None:
    scored = asyncio.Event()

    class Watching(EnvironmentReward):
        async def score_group(self, trajectories: Any) -> Any:
            scored.set()
            return await super().score_group(trajectories)

    async def wait_for_score(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.scenario.id == "s1":
            await scored.wait()

    engine = engine_of(ChattyEnvironment(answer=wait_for_score), Watching(), deterministic=False)
    async with asyncio.timeout(5):
        groups = await rollout(engine, number=2)
    assert [t.reward for t in members(groups)] == [1.75] * 6


async def test_two_engines_on_one_agent_use_sessions_of_their_own() -> None:
    backend = ScriptedBackend(speak, delay=0.001)
    agent = MultiTurnAgent(AgentConfig(), backend=backend)
    await agent.initialize()
    engines = [
        ComputationalEngine(agent, ChattyEnvironment(), EnvironmentReward(), num_generations=2) for _ in "ab"
    ]
    results = await asyncio.gather(*(engine.rollout(scenarios(3), seed=0, step=0) for engine in engines))
    assert [[group.key for group in groups] for groups in results] == [["0/s0", "0/s1", "0/s2"]] * 2
    sessions = {request.session for request in backend.requests}
    assert len(sessions) == 12
    assert len(backend.requests) == 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 0}, "num_generations must be at least 1, got 0"),
        ({"max_concurrent": 0}, "max_concurrent must be at least 1, got 0"),
        ({"episode_retries": -1}, "episode_retries must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine_of(ChattyEnvironment(), **settings)


async def test_one_member_is_enough_for_evaluation() -> None:
    groups = await rollout(engine_of(ChattyEnvironment(), num_generations=1))
    assert [len(group.trajectories) for group in groups] == [1, 1, 1]
