"""What failed is asked for again: an answer of the environment, a score."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from builders import trajectory
from chat_server import ChatServer, status
from engines import make_engine
from environments import ChattyEnvironment, scenarios

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Observation
from stateset_agents.core.reward import (
    CompositeReward,
    EnvironmentReward,
    RewardFunction,
    RewardResult,
    score_trajectories,
)
from stateset_agents.core.rollout.time_limited_environment import TimeLimitedEnvironment
from stateset_agents.rewards.judge import JudgeReward
from stateset_agents.runtime.circuit_breakers import FaultPolicy, FaultTolerance
from stateset_agents.types.errors import ConfigurationError, RewardFailure, RewardTimeout
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, Trajectory, TrajectoryGroup


class Flaky:
    """Replies are answered with how many the conversation has heard; every answer is lost the first time."""

    local = True

    def __init__(self, *, forks: bool = True) -> None:
        self.forks = forks
        self.open = 0
        self.lost: set[Any] = set()

    def scenarios(self, split: str) -> list[Scenario]:
        return scenarios(2)

    async def start(self, scenario: Scenario, seed: int) -> Any:
        self.lose(("start", scenario.id))
        return FlakyConversation(self, scenario.id, 0)

    def lose(self, what: Any) -> None:
        if what not in self.lost:
            self.lost.add(what)
            raise ConnectionError("the answer was lost")


class FlakyConversation:
    tools: Sequence[Any] = ()

    def __init__(self, desk: Flaky, name: str, heard: int) -> None:
        self.opening = (Message(role="user", content="hi"),)
        self._desk, self._name, self._heard = desk, name, heard
        desk.open += 1

    async def step(self, reply: Message) -> Observation:
        self._heard += 1
        self._desk.lose((self._name, self._heard))
        said = Message(role="user", content=f"{self._heard} heard")
        return Observation(messages=(said,), terminated=self._heard == 3)

    async def outcome(self) -> Outcome:
        self._desk.lose((self._name, "outcome"))
        return Outcome(success=self._heard == 3)

    def fork(self) -> FlakyConversation:
        if not self._desk.forks:
            raise NotImplementedError
        return FlakyConversation(self._desk, self._name, self._heard)

    async def close(self) -> None:
        self._desk.open -= 1


def patient(environment: Any, **policy: Any) -> ComputationalEngine:
    faults = FaultPolicy(**{"turn_retries": 1, "retry_backoff": 0.0, **policy})
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(lambda request: "yes"))
    settings = {"num_generations": 1, "episode_retries": 0, "faults": faults}
    return make_engine(agent, environment, EnvironmentReward(), **settings)


async def played(engine: ComputationalEngine) -> list[TrajectoryGroup]:
    await engine.agent.initialize()
    groups = await engine.rollout(scenarios(2), seed=5, step=0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return groups


async def test_an_answer_that_was_lost_is_asked_for_again_on_a_copy_that_had_not_heard_the_reply() -> None:
    desk = Flaky()
    engine = patient(desk)
    [group, *others] = await played(engine)
    [whole] = group.trajectories
    assert [turn.feedback[0].content for turn in whole.turns] == ["1 heard", "2 heard", "3 heard"]
    assert whole.success is True
    assert desk.open == 0
    assert engine.num_retries == 5 * (1 + len(others))
    assert not engine.repeatable


async def test_a_conversation_that_cannot_be_copied_is_told_with_the_cure() -> None:
    with pytest.raises(
        ConfigurationError, match="cannot be forked, and turn_retries needs it: write its fork"
    ):
        await played(patient(Flaky(forks=False)))


async def test_a_copy_that_comes_when_nobody_waits_for_it_is_closed() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Slow(FlakyConversation):
        def fork(self) -> FlakyConversation:
            begun.set()
            assert goes_on.wait(10)
            return super().fork()

    desk = Flaky()
    desk.lost.add(("start", "s0"))

    async def start(scenario: Scenario, seed: int) -> Any:
        return Slow(desk, scenario.id, 0)

    desk.start = start  # type: ignore[method-assign]  # only this desk's
    steady = TimeLimitedEnvironment(desk, 5.0, FaultTolerance(FaultPolicy(turn_retries=1)))
    conversation = await steady.start(scenarios(1)[0], 0)
    step = asyncio.create_task(conversation.step(Message(role="assistant", content="hello")))
    assert await asyncio.to_thread(begun.wait, 10)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    goes_on.set()
    for _ in range(1000):
        if desk.open == 1 and asyncio.all_tasks() == {asyncio.current_task()}:
            break
        await asyncio.sleep(0.01)
    assert desk.open == 1  # the conversation itself, not its copy


# ------------------------------------------------------------------------------ rewards

TALKS = [trajectory("hi", "yes", member=member) for member in range(3)]


class Judge(RewardFunction):
    """Answers each member the n-th time it is asked; counts."""

    def __init__(self, works_at: int, error: BaseException | None = None, name: str = "judge") -> None:
        self.name = name
        self.works_at = works_at
        self.error = error or ConnectionError("away")
        self.asked: dict[int, int] = {}

    async def score(self, trajectory: Trajectory) -> RewardResult:
        times = self.asked[trajectory.member] = self.asked.get(trajectory.member, 0) + 1
        if times < self.works_at:
            raise self.error
        return RewardResult(score=1.0)


def policy(**settings: Any) -> FaultTolerance:
    return FaultTolerance(FaultPolicy(**{"retry_backoff": 0.0, "breaker_failures": 0, **settings}))


async def scores(reward: RewardFunction, asked: FaultTolerance, seconds: float | None = None) -> list[Any]:
    results = await score_trajectories(reward, TALKS, seconds=seconds, fault_tolerance=asked)
    return [result.score if isinstance(result, RewardResult) else type(result) for result in results]


async def test_a_reward_that_broke_is_asked_again_so_often_and_not_more() -> None:
    asked = policy(reward_retries=2)
    assert await scores(Judge(3), asked) == [1.0] * 3
    assert asked.num_retries == {"reward judge": 6}
    last = Judge(4)
    assert await scores(last, policy(reward_retries=2)) == [RewardFailure] * 3
    assert last.asked == {0: 3, 1: 3, 2: 3}


async def test_only_the_part_of_a_composite_that_broke_is_asked_again() -> None:
    sound, broken = Judge(1, name="sound"), Judge(2, name="broken")
    assert await scores(CompositeReward([(sound, 1.0), (broken, 1.0)]), policy()) == [1.0] * 3
    assert (sum(sound.asked.values()), sum(broken.asked.values())) == (3, 6)


async def test_a_failure_that_the_reward_itself_tells_is_its_last_word() -> None:
    asked = policy(breaker_failures=1)
    judge = Judge(2, RewardFailure("no verdict in it"))
    assert await scores(judge, asked) == [RewardFailure] * 3
    assert judge.asked == {0: 1, 1: 1, 2: 1}
    assert asked.repeatable
    assert asked.breaker("reward judge").state == "closed"


async def test_each_asking_has_its_own_time() -> None:
    class Slow(Judge):
        async def score(self, trajectory: Trajectory) -> RewardResult:
            self.asked[trajectory.member] = self.asked.get(trajectory.member, 0) + 1
            if self.asked[trajectory.member] == 1:
                await asyncio.sleep(60)
            return RewardResult(score=1.0)

    asked = policy()
    assert await scores(Slow(1), asked, seconds=0.1) == [1.0] * 3
    assert asked.num_timeouts == 3
    assert await scores(Slow(1), policy(reward_retries=0), seconds=0.1) == [RewardTimeout] * 3


async def test_a_group_is_asked_again_as_a_whole() -> None:
    class Ranking(Judge):
        scope = "group"

        async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Any]:
            self.asked[0] = self.asked.get(0, 0) + 1
            if self.asked[0] < self.works_at:
                raise self.error
            return [RewardResult(score=float(place)) for place, _ in enumerate(trajectories)]

    ranking = Ranking(2)
    assert await scores(ranking, policy()) == [0.0, 1.0, 2.0]
    assert ranking.asked == {0: 2}


async def test_a_reward_behind_an_open_breaker_is_waited_for() -> None:
    asked = policy(breaker_failures=3, breaker_pause=0.05, reward_retries=5)
    assert await scores(Judge(1), asked) == [1.0] * 3
    assert await scores(Judge(3), asked) == [1.0] * 3
    assert asked.metrics()["faults/outages"] >= 1
    assert asked.metrics()["breaker/reward_judge"] == 0.0


async def test_a_reward_that_answers_that_it_cannot_score_is_up() -> None:
    asked = policy(breaker_failures=1, breaker_pause=0.001, reward_retries=0)
    asked.breaker("reward judge").has_worked = True
    assert (await score_trajectories(Judge(9), TALKS[:1], fault_tolerance=asked))[0]
    assert asked.breaker("reward judge").state == "open"
    assert await scores(Judge(9, RewardFailure("no verdict in it")), asked) == [RewardFailure] * 3
    assert asked.breaker("reward judge").state == "closed"


async def test_the_engine_counts_and_tells_what_it_did() -> None:
    engine = patient(ChattyEnvironment())
    await played(engine)
    assert engine.repeatable
    told = engine.fault_tolerance.metrics()
    assert told == {
        "faults/retries": 0.0,
        "faults/timeouts": 0.0,
        "faults/outages": 0.0,
        "faults/waited": 0.0,
        "breaker/environment": 0.0,
        "breaker/reward_environment": 0.0,
    }


async def test_a_conversation_that_began_as_its_caller_was_cancelled_is_closed():
    environment = ChattyEnvironment()
    task = asyncio.create_task(TimeLimitedEnvironment(environment, 5.0).start(scenarios(1)[0], 0))
    while not environment.num_open:  # noqa: ASYNC110  # the very moment counts
        await asyncio.sleep(0)
    task.cancel()  # it is there, and nobody has taken it yet
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.num_open == 0


async def test_a_conversation_is_not_played_again_with_what_is_not_waited_for_any_more():
    def never(scenario: Scenario, seed: int) -> Any:
        raise ConnectionError("no route")

    environment = ChattyEnvironment()
    environment.start = never
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(["yes"]))
    faults = FaultPolicy(breaker_failures=1, retry_backoff=0.0)
    engine = make_engine(
        agent, environment, EnvironmentReward(), num_generations=1, episode_retries=5, faults=faults
    )
    groups = await played(engine)
    assert [one.status for group in groups for one in group.trajectories] == [Status.FAILED] * 2
    assert engine.num_retries == 0


async def test_the_tries_of_a_judge_s_client_are_in_the_metrics() -> None:
    async with ChatServer(status(503), status(429)) as server:
        asked = policy()
        judge = JudgeReward(ChatClient(server.url, "m", backoff=0.001), "Was it kind?")
        assert await scores(judge, asked) == [0.7] * 3
    assert asked.num_retries == {"endpoint m": 2}
    assert asked.metrics()["faults/retries"] == 2.0
    assert not asked.repeatable


async def test_what_failed_before_a_retry_is_not_kept_alive() -> None:
    """A conversation of thousands of tokens may hang on it."""
    failures: list[weakref.ref[Exception]] = []

    class Broken(Exception):
        pass

    async def second_works(attempt: int) -> int:
        if attempt == 0:
            error = Broken()
            failures.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error
        return attempt

    gc.collect()
    gc.disable()
    try:
        steady = FaultTolerance(FaultPolicy(retry_backoff=0.0))
        assert await steady.retry(second_works, name="turn", times=1, stream=0, service="environment") == 1
        assert [failure() for failure in failures] == [None]
    finally:
        gc.enable()
