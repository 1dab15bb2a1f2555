"""The engine with a real model behind it: who waits for whom, equal tokens, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest
from engines import make_engine
from environments import ChattyConversation, ChattyEnvironment, scenarios
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.scheduler import Scheduling
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

TEMPLATE = (
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


async def started(family: str = "llama", scheduling: Scheduling = "deterministic") -> MultiTurnAgent:
    tokenizer = tiny_tokenizer(bos=False)
    tokenizer.hf.chat_template = TEMPLATE
    backend = HuggingFaceBackend(tiny_model(family), tokenizer, scheduling=scheduling)
    # what random weights say is not always what a template writes, and would open rows
    agent = MultiTurnAgent(AgentConfig(max_new_tokens=8, history="keep"), backend=backend)
    await agent.initialize()
    return agent


def engine_of(agent: MultiTurnAgent, environment: ChattyEnvironment, **settings: Any) -> ComputationalEngine:
    return make_engine(agent, environment, EnvironmentReward(), **{"num_generations": 4, **settings})


def members(groups: list[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


async def sessions_left(agent: MultiTurnAgent) -> int:
    """How many conversations the backend still holds, once it has done what it was told."""
    backend: Any = agent.backend
    for _ in range(2):
        await backend.score([1, 2])  # the worker takes changes along with jobs
    return backend.num_conversations


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
async def test_stored_log_probs_are_those_of_a_fresh_full_forward(family: str) -> None:
    agent = await started(family)
    groups = await engine_of(agent, ChattyEnvironment(turns=4)).rollout(scenarios(2), seed=1, step=0)
    backend: Any = agent.backend
    rows = [trajectory.token_ids for trajectory in members(groups)]
    fed = sum(len(turn.prompt_ids) for trajectory in members(groups) for turn in trajectory.turns)
    ended = sum(len(trajectory.turns) - 1 for trajectory in members(groups))
    assert (backend.stats.prefilled_tokens, backend.stats.carried_tokens) == (fed, ended)
    for trajectory, row in zip(members(groups), rows, strict=True):
        assert len(trajectory.turns) == 4
        fresh = [0.0, *await backend.score(row)]
        mask = trajectory.action_mask
        assert trajectory.logprobs == pytest.approx(
            [value * bit for value, bit in zip(fresh, mask, strict=True)], abs=1e-4
        )
    await agent.close()


async def test_a_branch_starts_from_what_its_member_has_cached() -> None:
    agent = await started()
    environment = ChattyEnvironment(turns=4)
    engine = engine_of(agent, environment, num_generations=1, num_branches=1)
    (group,) = await engine.rollout(scenarios(1), seed=1, step=0)
    stats = agent.backend.stats  # type: ignore[attr-defined]  # a HuggingFaceBackend
    (member,) = group.trajectories
    assert len(group.branches) == 3
    fed = sum(len(turn.prompt_ids) for turn in member.turns)
    shared = 0
    for branch in group.branches:
        first, *later = branch.trajectory.turns[branch.turn :]
        before = sum(
            len(turn.prompt_ids) + len(turn.completion.token_ids)
            for turn in branch.trajectory.turns[: branch.turn]
        )
        shared += before + len(first.prompt_ids) - 1  # the same user said the same to the member
        fed += 1 + sum(len(turn.prompt_ids) for turn in later)
    assert (stats.shared_tokens, stats.prefilled_tokens) == (shared, fed)
    assert await sessions_left(agent) == 0
    await agent.close()


async def test_with_one_user_waiting_two_seconds_the_other_seven_conversations_finish_first() -> None:
    agent = await started(scheduling="throughput")
    started_at = time.monotonic()
    finished: list[tuple[str, float]] = []

    async def slow(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.scenario.id == "s3" and conversation.turn == 1:
            await asyncio.sleep(2)
        if conversation.turn == 4:
            finished.append((conversation.scenario.id, time.monotonic() - started_at))

    environment = ChattyEnvironment(turns=4, answer=slow, local=False)
    engine = engine_of(agent, environment, num_generations=1, deterministic=False)
    groups = await engine.rollout(scenarios(8), seed=0, step=0)
    assert [name for name, _ in finished][-1] == "s3"
    assert len(finished) == 8
    assert finished[6][1] < 2 < finished[7][1]
    assert {t.status for t in members(groups)} == {Status.TERMINATED}
    await agent.close()


@pytest.mark.long
@pytest.mark.parametrize("max_concurrent", [4, pytest.param(64, marks=pytest.mark.long)])
async def test_random_delays_leave_every_token_as_it_was(max_concurrent: int) -> None:
    dice = random.Random()  # unseeded on purpose: no two runs wait alike

    async def dawdle(conversation: ChattyConversation, reply: Message) -> None:
        await asyncio.sleep(dice.random() * 0.02)
        if conversation.scenario.id == "s1" and conversation.turn == 1 and len(reply.content) % 2:
            raise ConnectionError("as it happens")  # a retry is part of the same order

    class Slow(EnvironmentReward):
        async def score(self, trajectory: Trajectory) -> Any:
            await asyncio.sleep(dice.random() * 0.02)
            return await super().score(trajectory)

    async def once() -> list[Any]:
        agent = await started()
        environment = ChattyEnvironment(turns=3, answer=dawdle)
        engine = make_engine(
            agent, environment, Slow(), num_generations=3, max_concurrent=max_concurrent, deterministic=True
        )
        groups = [*await engine.rollout(scenarios(3), seed=2, step=0)]
        groups += await engine.rollout(scenarios(3), seed=2, step=1)
        await agent.close()
        assert engine.num_retries > 0
        return [(t.member, t.status, t.token_ids, t.logprobs, t.reward) for t in members(groups)]

    first = await once()
    assert await once() == first
    assert await once() == first


@pytest.mark.long
@pytest.mark.parametrize("max_concurrent", [4, 64])
async def test_random_delays_leave_every_token_of_the_branches_as_it_was(max_concurrent: int) -> None:
    dice = random.Random()  # unseeded on purpose: no two runs wait alike

    async def dawdle(conversation: ChattyConversation, reply: Message) -> None:
        await asyncio.sleep(dice.random() * 0.01)
        if conversation.turn == 3 and len(reply.content) % 4 == 0:
            raise ConnectionError("as it happens")  # among members and among branches

    class Slow(EnvironmentReward):
        async def score(self, trajectory: Trajectory) -> Any:
            await asyncio.sleep(dice.random() * 0.01)
            return await super().score(trajectory)

    async def once() -> list[Any]:
        agent = await started()
        environment = ChattyEnvironment(turns=3, answer=dawdle)
        engine = make_engine(
            agent, environment, Slow(), num_generations=3, num_branches=2, max_concurrent=max_concurrent
        )
        groups = [*await engine.rollout(scenarios(2), seed=2, step=0)]
        groups += await engine.rollout(scenarios(2), seed=2, step=1)
        assert environment.num_open == 0
        assert await sessions_left(agent) == 0
        for branch in (branch for group in groups for branch in group.branches):
            row, mask = branch.trajectory.token_ids, branch.trajectory.action_mask
            fresh = [
                value * bit for value, bit in zip([0.0, *await agent.backend.score(row)], mask, strict=True)
            ]
            assert branch.trajectory.logprobs == pytest.approx(fresh, abs=1e-4)
        await agent.close()
        everything = [*members(groups), *(b.trajectory for group in groups for b in group.branches)]
        return [(t.member, t.status, t.token_ids, t.logprobs, t.reward) for t in everything]

    first = await once()
    assert {Status.FAILED, Status.TERMINATED} == {status for _, status, *_ in first}
    assert len(first) > 2 * 12
    assert await once() == first


@pytest.mark.parametrize("deterministic", [True, False])
async def test_a_cancelled_rollout_leaves_the_backend_empty_and_usable(deterministic: bool) -> None:
    agent = await started(scheduling="deterministic" if deterministic else "throughput")

    async def hang(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 2:
            await asyncio.sleep(60)

    environment = ChattyEnvironment(turns=3, answer=hang)
    engine = engine_of(agent, environment, deterministic=deterministic)
    task = asyncio.create_task(engine.rollout(scenarios(2), seed=0, step=0))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert environment.num_open == 0
    assert await sessions_left(agent) == 0
    environment.answer = None
    groups = await asyncio.wait_for(engine.rollout(scenarios(2), seed=0, step=0), 30)
    assert {t.status for t in members(groups)} == {Status.TERMINATED}
    assert await sessions_left(agent) == 0
    await agent.close()


async def test_a_rollout_that_is_cancelled_in_the_middle_of_a_turn_leaves_the_backend_empty() -> None:
    agent = await started()
    engine = engine_of(agent, ChattyEnvironment(turns=40))
    task = asyncio.create_task(engine.rollout(scenarios(8), seed=0, step=0))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await sessions_left(agent) == 0
    await agent.close()


async def test_two_engines_on_one_agent_finish_side_by_side() -> None:
    agent = await started()
    environment = ChattyEnvironment(turns=3)
    engines = [engine_of(agent, environment, max_concurrent=3), engine_of(agent, environment)]
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(engine.rollout(scenarios(2), seed=0, step=0) for engine in engines))
    for groups in results:
        assert {t.status for t in members(groups)} == {Status.TERMINATED}
        assert [t.reward for t in members(groups)] == [1.0 + 0.5 + 0.5 + 0.25] * 8
    assert await sessions_left(agent) == 0
    await agent.close()


async def test_a_mistake_in_an_environment_leaves_the_backend_empty() -> None:
    async def mistaken(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.scenario.id == "s1":
            raise TypeError("a mistake")

    agent = await started()
    with pytest.raises(TypeError, match="a mistake"):
        await engine_of(agent, ChattyEnvironment(answer=mistaken)).rollout(scenarios(2), seed=0, step=0)
    assert await sessions_left(agent) == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await agent.close()
