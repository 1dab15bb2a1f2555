"""Branches of conversations: where they leave, what they carry, in what order, and that each is closed."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import Counter
from typing import Any

import pytest
from builders import bare
from engines import make_engine
from environments import ChattyConversation, ChattyEnvironment, scenarios
from tiny_training import talk

from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.core.reward import EnvironmentReward, RewardFunction, reward_function
from stateset_agents.runtime.circuit_breakers import FaultPolicy
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Branch, Status, Trajectory, TrajectoryGroup


def speak(request: ScriptedRequest) -> str:
    """A reply that differs from stream to stream."""
    return f"{request.params.stream % 997}"


def engine_of(
    environment: ChattyEnvironment,
    reward: RewardFunction | None = None,
    *,
    backend: ScriptedBackend | None = None,
    **settings: Any,
) -> ComputationalEngine:
    agent = MultiTurnAgent(AgentConfig(), backend=backend or ScriptedBackend(speak))
    return make_engine(
        agent,
        environment,
        reward or EnvironmentReward(),
        **{"num_generations": 2, "num_branches": 2, **settings},
    )


async def rollout_amid_others(engine: ComputationalEngine, number: int = 1) -> list[TrajectoryGroup]:
    await engine.agent.initialize()
    return await engine.rollout(scenarios(number), seed=5, step=0)


async def rollout(engine: ComputationalEngine, number: int = 1) -> list[TrajectoryGroup]:
    groups = await rollout_amid_others(engine, number)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return groups


def places(group: TrajectoryGroup) -> list[tuple[int, int]]:
    return [(branch.trajectory.member, branch.turn) for branch in group.branches]


async def test_every_turn_but_the_first_is_left_by_each_member_s_branches_in_order() -> None:
    environment = ChattyEnvironment(turns=3)
    groups = await rollout(engine_of(environment), number=2)
    assert [places(group) for group in groups] == [
        [(0, 1), (0, 1), (0, 2), (0, 2), (1, 1), (1, 1), (1, 2), (1, 2)]
    ] * 2
    assert Counter(entry[0] for entry in environment.log) == {"start": 4, "fork": 16, "close": 20}
    assert environment.num_open == 0


async def test_a_branch_has_the_member_s_turns_token_for_token_and_then_its_own() -> None:
    (group,) = await rollout(engine_of(ChattyEnvironment(turns=3)))
    for branch in group.branches:
        main = group.trajectories[branch.trajectory.member]
        assert branch.trajectory.turns[: branch.turn] == main.turns[: branch.turn]
        assert branch.trajectory.turns[branch.turn] != main.turns[branch.turn]
        assert branch.trajectory.turns[branch.turn].prompt_ids == main.turns[branch.turn].prompt_ids
        assert len(branch.trajectory.turns) == 3
        assert (branch.trajectory.seed, branch.trajectory.opening) == (main.seed, main.opening)
        assert branch.trajectory.reward == main.reward == 2.25
        own = [len(turn.completion.token_ids) for turn in branch.trajectory.turns[branch.turn :]]
        assert branch.num_agent_tokens == sum(own)
    said = [branch.trajectory.replies for branch in group.branches]
    assert len(set(said)) == len(said)


async def test_members_are_as_they_are_without_branches() -> None:
    plain = await rollout(engine_of(ChattyEnvironment(turns=3), num_branches=0))
    branched = await rollout(engine_of(ChattyEnvironment(turns=3)))
    assert [group.trajectories for group in branched] == [group.trajectories for group in plain]
    assert plain[0].branches == ()


async def test_every_branch_has_a_session_and_a_stream_of_its_own() -> None:
    backend = ScriptedBackend(speak)
    engine = engine_of(ChattyEnvironment(turns=3), backend=backend)
    await rollout(engine, number=2)
    await rollout(engine, number=2)
    assert len({request.session for request in backend.requests}) == 2 * (4 + 16)
    streams = [request.params.stream for request in list(backend.requests)[: len(backend.requests) // 2]]
    assert len(set(streams)) == len(streams)


async def test_a_conversation_of_one_turn_has_no_branches() -> None:
    (group,) = await rollout(engine_of(ChattyEnvironment(turns=1)))
    assert group.branches == ()


async def test_no_fork_is_taken_where_the_context_leaves_no_room_for_another_turn() -> None:
    full = len("user: hi\nassistant:") + 4 + len("\nuser: go on\nassistant:")
    backend = ScriptedBackend(lambda request: "abc", context_length=full)
    environment = ChattyEnvironment()
    (group,) = await rollout(engine_of(environment, backend=backend))
    assert {t.status for t in group.trajectories} == {Status.TRUNCATED}
    assert group.branches == ()
    assert "fork" not in {entry[0] for entry in environment.log}


async def test_no_more_branches_are_played_at_once_than_max_concurrent() -> None:
    environment = ChattyEnvironment(turns=3)
    talking = most = 0

    async def watch(conversation: ChattyConversation, reply: Message) -> None:
        nonlocal most, talking
        talking += 1
        await asyncio.sleep(0.001)
        most = max(most, talking)
        talking -= 1

    environment.answer = watch
    await rollout(engine_of(environment, max_concurrent=3), number=2)
    assert most == 3
    assert environment.num_open == 0


async def test_a_branch_that_fails_is_no_sample_and_is_not_played_again() -> None:
    async def fails(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 3 and failing(reply):
            raise ConnectionError("no route")

    def failing(reply: Message) -> bool:
        return reply.content in spoken

    spoken: set[str] = set()
    environment = ChattyEnvironment(turns=3, answer=fails)
    (first,) = await rollout(engine_of(environment))
    spoken = {first.branches[0].trajectory.replies[-1].content}  # the first branch's last words
    engine = engine_of(environment)
    (group,) = await rollout(engine)
    lost, *others = group.branches
    assert (lost.trajectory.status, lost.trajectory.reward) == (Status.FAILED, None)
    assert (lost.turn, lost.trajectory.member, bare(lost.trajectory.error)) == (
        1,
        0,
        "ConnectionError: no route",
    )
    assert [b.trajectory.reward for b in others] == [2.25] * 7
    assert group.rewards == [2.25, 2.25]
    assert engine.num_retries == 0
    assert environment.num_open == 0


async def test_a_reward_that_fails_leaves_only_its_branch_unscored() -> None:
    seen = 0

    @reward_function
    async def judge(trajectory: Trajectory) -> float:  # on the loop, so that branches come in their order
        nonlocal seen
        seen += 1
        if seen == 4:  # two members, then the second branch
            raise ValueError("bad")
        return 0.5

    engine = engine_of(ChattyEnvironment(), judge, faults=FaultPolicy(reward_retries=0))
    (group,) = await rollout(engine)
    assert [b.trajectory.reward for b in group.branches] == [0.5, None, 0.5, 0.5]
    assert bare(group.branches[1].trajectory.error) == "unscored: reward judge failed: ValueError: bad"


async def test_a_member_that_fails_closes_its_forks_and_the_next_try_takes_new_ones() -> None:
    tries: Counter[str] = Counter()

    async def flaky(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 2:
            tries[reply.content] += 1
            if tries.total() == 1:
                raise ConnectionError("no route")

    environment = ChattyEnvironment(turns=3, answer=flaky)
    engine = engine_of(environment, max_concurrent=1)
    (group,) = await rollout(engine)
    assert engine.num_retries == 1
    assert len(group.branches) == 8
    assert Counter(entry[0] for entry in environment.log) == {"start": 3, "fork": 10, "close": 13}


async def test_no_branch_of_a_member_without_a_reward_is_played() -> None:
    @reward_function
    def second_only(trajectory: Trajectory) -> float | None:
        return 1.0 if trajectory.member else None

    environment = ChattyEnvironment()
    (group,) = await rollout(engine_of(environment, second_only))
    assert places(group) == [(1, 1), (1, 1)]
    assert environment.num_open == 0


async def test_a_rollout_cancelled_among_its_branches_closes_every_fork() -> None:
    waiting, enough = 0, asyncio.Event()

    async def wait(conversation: ChattyConversation, reply: Message) -> None:
        nonlocal waiting
        if conversation.is_fork:
            waiting += 1
            if waiting == 3:
                enough.set()
            await asyncio.sleep(60)

    environment = ChattyEnvironment(turns=3, answer=wait)
    engine = engine_of(environment, max_concurrent=3)
    await engine.agent.initialize()
    task = asyncio.create_task(engine.rollout(scenarios(1), seed=0, step=0))
    async with asyncio.timeout(5):
        await enough.wait()
    assert environment.num_open == 8  # three being played, five held
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.num_open == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("when", ["members", "branches"])
async def test_a_mistake_travels_and_every_fork_is_closed(when: str) -> None:
    async def mistaken(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 3 and conversation.is_fork == (when == "branches"):
            raise TypeError("a mistake")

    environment = ChattyEnvironment(turns=4, answer=mistaken)
    with pytest.raises(TypeError, match="a mistake"):
        await rollout(engine_of(environment))
    assert ("fork", "s0") in {entry[:2] for entry in environment.log}
    assert environment.num_open == 0


class Stubborn(ChattyConversation):
    """Cannot be forked, or its forks cannot be closed."""

    error: Exception

    def fork(self) -> Conversation:
        if isinstance(self.error, NotImplementedError):
            raise self.error
        return super().fork()

    async def close(self) -> None:
        await super().close()
        if self.is_fork:
            raise self.error


class StubbornEnvironment(ChattyEnvironment):
    def __init__(self, error: Exception, **options: Any) -> None:
        super().__init__(**options)
        self.error = error

    async def start(self, scenario: Any, seed: int) -> Conversation:
        conversation = await super().start(scenario, seed)
        assert isinstance(conversation, ChattyConversation)
        stubborn = copy.copy(conversation)
        stubborn.__class__ = Stubborn
        assert isinstance(stubborn, Stubborn)
        stubborn.error = self.error
        return stubborn


async def test_an_environment_that_cannot_fork_is_refused_at_the_first_fork_with_the_cure() -> None:
    environment = StubbornEnvironment(NotImplementedError())
    cure = r"a conversation of StubbornEnvironment cannot be forked, and branches need it: write its fork\(\)"
    with pytest.raises(ConfigurationError, match=cure):
        await rollout(engine_of(environment))
    assert environment.num_open == 0
    groups = await rollout(engine_of(environment, num_branches=0))
    assert groups[0].rewards == [1.75, 1.75]


async def test_a_fork_that_is_no_copy_is_refused() -> None:
    class Shared(ChattyEnvironment):
        async def start(self, scenario: Any, seed: int) -> Conversation:
            conversation: Any = await super().start(scenario, seed)
            conversation.fork = lambda: conversation
            return conversation  # type: ignore[no-any-return]  # an untyped stand-in

    environment = Shared()
    with pytest.raises(ConfigurationError, match=r"ChattyConversation.fork\(\) gave the conversation itself"):
        await rollout(engine_of(environment))
    assert environment.num_open == 0


async def test_a_fork_that_breaks_when_it_is_taken_fails_its_member_alone() -> None:
    class Breaking(ChattyEnvironment):
        async def start(self, scenario: Any, seed: int) -> Conversation:
            conversation: Any = await super().start(scenario, seed)
            fork = conversation.fork

            def second_breaks() -> Conversation:
                if ("fork", scenario.id, seed) in self.log and scenario.id == "s1":
                    raise OSError("no memory")
                twin: Conversation = fork()
                return twin

            conversation.fork = second_breaks
            return conversation

    environment = Breaking()
    fine, broken = await rollout(engine_of(environment), number=2)
    assert places(fine) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert {bare(t.error) for t in broken.trajectories} == {"OSError: no memory"}
    assert broken.branches == ()
    assert environment.num_open == 0


async def test_a_fork_that_breaks_when_it_is_closed_unplayed_costs_nothing_else() -> None:
    async def fails_late(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 2 and not conversation.is_fork:
            raise ConnectionError("no route")

    environment = StubbornEnvironment(OSError("gone"), answer=fails_late)
    (group,) = await rollout(engine_of(environment))
    assert {bare(t.error) for t in group.trajectories} == {"ConnectionError: no route"}
    assert environment.num_open == 0


def test_a_reward_that_compares_members_is_refused_with_branches() -> None:
    @reward_function(scope="group")
    def best(trajectories: tuple[Trajectory, ...]) -> list[float]:
        return [0.0 for _ in trajectories]

    with pytest.raises(ConfigurationError, match="reward best compares the members of a group, and a branch"):
        engine_of(ChattyEnvironment(), best)
    assert engine_of(ChattyEnvironment(), best, num_branches=0).num_branches == 0


def test_a_negative_number_of_branches_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_branches must be at least 0, got -1"):
        engine_of(ChattyEnvironment(), num_branches=-1)


async def test_branches_end_where_their_own_words_lead_them() -> None:
    async def by_parity(conversation: ChattyConversation, reply: Message) -> Observation | None:
        if conversation.turn > 1 and int(reply.content) % 2:
            return Observation(terminated=True, reward=10.0)
        return None

    (group,) = await rollout(engine_of(ChattyEnvironment(turns=4, answer=by_parity), num_branches=6))
    rewards = {branch.trajectory.reward for branch in group.branches}
    assert len(rewards) > 1
    for branch in group.branches:
        last = branch.trajectory.replies[-1].content
        assert len(branch.trajectory.turns) == 4 or int(last) % 2


def test_a_branch_counts_the_tokens_sampled_for_it_alone() -> None:
    trajectory = talk(([9], [1, 2, 3]), ([8], [4, 5]), ([7], [6]))
    assert Branch(turn=1, trajectory=trajectory).num_agent_tokens == 3


class SlowToFork(ChattyEnvironment):
    """A fork waits until `go` is set, the second a little longer; `asked` tells that `begins` were begun."""

    def __init__(self, *, begins: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked, self.go = threading.Event(), threading.Event()
        self.begins = begins
        self.made = threading.Semaphore(0)
        self.pauses = iter((0.0, 0.2))

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        conversation: Any = await super().start(scenario, seed)
        fork = conversation.fork

        def slow() -> Conversation:
            pause = next(self.pauses, 0.0)
            self.begins -= 1
            if self.begins <= 0:
                self.asked.set()
            assert self.go.wait(10)
            time.sleep(pause)
            twin: Conversation = fork()
            self.made.release()
            return twin

        conversation.fork = slow
        return conversation


async def begun(environment: SlowToFork) -> None:
    assert await asyncio.to_thread(environment.asked.wait, 10)


async def test_the_event_loop_goes_on_while_a_conversation_is_copied() -> None:
    environment = SlowToFork()

    async def release() -> None:
        await begun(environment)
        environment.go.set()  # nobody would, if the copy held the loop

    (group,), _ = await asyncio.gather(rollout_amid_others(engine_of(environment)), release())
    assert places(group) == [(0, 1), (0, 1), (1, 1), (1, 1)]
    assert environment.num_open == 0


async def test_a_rollout_cancelled_while_conversations_are_copied_closes_the_copies() -> None:
    environment = SlowToFork(begins=2)
    task = asyncio.create_task(rollout_amid_others(engine_of(environment)))
    await begun(environment)
    task.cancel()
    environment.go.set()  # the first copy's end cancels whoever waits for the second again
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all([await asyncio.to_thread(environment.made.acquire, timeout=10) for _ in range(2)])
    assert environment.num_open == 0


async def test_a_fork_that_hangs_fails_its_conversation_after_the_turn_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stateset_agents.core.rollout.episode._GRACE_SECONDS", 0.05)
    environment = SlowToFork()
    (group,) = await rollout_amid_others(engine_of(environment, turn_timeout=0.2, episode_retries=0))
    assert {member.error for member in group.trajectories} == {
        "EnvironmentTimeout: forking a conversation took the environment longer than 0.2 s: mend the user or "
        "tool that hangs, or raise turn_timeout"
    }
    environment.go.set()
