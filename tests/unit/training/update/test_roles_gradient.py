"""Every role of a problem solved in parts trains on the final verdict, each turn in its own row."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from expected_updates import (
    Policy,
    Talk,
    Way,
    conversations,
    deviation,
    expected_update,
    true_gradient,
    turn_by_turn,
)

from scripts.decomposed_arithmetic import DecomposedArithmetic
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.reasoning import HierarchicalGRPO
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

DESK = DecomposedArithmetic(decompose_prompt="", system_prompt="", num_train=30)
PROBLEM = DESK.scenario_of("2 + 3 - 1")


def call(part: str) -> str:
    return f'<tool_call>{{"name": "solve", "arguments": {{"problem": "{part}"}}}}</tool_call>'


def answer(number: int) -> str:
    return f"<answer> {number} </answer>"


async def played(*replies: str) -> Trajectory:
    agent = MultiTurnAgent(AgentConfig(allow_hidden_tools=True), backend=ScriptedBackend([*replies]))
    async with HierarchicalGRPO(agent, DESK) as hierarchical:
        done = await hierarchical.decompose_problem("2 + 3 - 1")
    assert done.answer == "4"
    assert [(part.problem, part.reply) for part in done.parts] == [("2 + 3", answer(5)), ("5 - 1", answer(4))]
    assert done.tokens.keys() == {"decomposer", "solver", "synthesizer"}
    assert sum(done.tokens.values()) == done.trajectory.num_agent_tokens
    return done.trajectory


async def test_each_part_is_a_row_of_its_own_and_every_token_trains_once_on_the_verdict() -> None:
    trajectory = await played(call("2 + 3"), answer(5), call("5 - 1"), answer(4), answer(4))
    assert [row.indices for row in trajectory.rows] == [(1,), (3,), (0, 2, 4)]
    assert sum(sum(row.action_mask) for row in trajectory.rows) == trajectory.num_agent_tokens
    assert trajectory.reward == 1.0
    wrong = replace(trajectory, member=1, reward=0.0)
    group = TrajectoryGroup(key="g", trajectories=(trajectory, wrong))
    config = TrainingConfig(num_generations=2, advantage_normalization="none")
    right, _ = assign_credit([group], config).samples
    assert [{token.advantage for token in turn} for turn in turn_by_turn(right)] == [{0.5}] * 5


# ------------------------------------------------------------- enumeration of the real conversation

SAID = {
    10: Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(name="solve", arguments={"problem": "2 + 3"}),),
    ),
    11: Message(
        role="assistant",
        content="",
        tool_calls=(ToolCall(name="solve", arguments={"problem": "3 - 1"}),),
    ),
    12: Message(role="assistant", content=answer(4)),
    20: Message(role="assistant", content=answer(5)),
    21: Message(role="assistant", content=answer(2)),
    30: Message(role="assistant", content=answer(4)),
    31: Message(role="assistant", content=answer(1)),
}
DECOMPOSER, SOLVER, SYNTHESIZER = (10, 11, 12), (20, 21), (30, 31)


def text_ids(text: str) -> tuple[int, ...]:
    return tuple(1000 + ord(letter) for letter in text)


def ways(policy: Policy) -> Iterator[Way]:
    verdicts: list[float] = []

    def world(talk: Talk) -> None:
        async def play() -> None:
            conversation = await DESK.start(PROBLEM, 0)
            (said,) = talk.say(text_ids(PROBLEM.opening), DECOMPOSER)
            heard = await conversation.step(SAID[said])
            if not heard.terminated:
                (found,) = talk.say(text_ids(heard.messages[-1].content), SOLVER, follows=None)
                heard = await conversation.step(SAID[found])
                (last,) = talk.say(text_ids(heard.messages[-1].content), SYNTHESIZER, follows=0)
                await conversation.step(SAID[last])
            verdicts.append((await conversation.outcome()).reward or 0.0)

        asyncio.run(play())

    for way in conversations(world, policy):
        yield replace(way, trajectory=replace(way.trajectory, reward=verdicts[-1], turn_rewards=()))


@pytest.mark.parametrize("size", [2, 3])
def test_the_expected_update_of_all_roles_is_the_gradient_of_success(size: int) -> None:
    policy = Policy(DECOMPOSER, SOLVER, SYNTHESIZER)
    every = list(ways(policy))
    assert len(every) == 9  # two calls with two answers and two ends each, and one answer at once
    assert {way.trajectory.reward for way in every} == {0.0, 1.0}
    config = TrainingConfig(
        loss_type="dr_grpo",
        loss_length=4,
        num_generations=size,
        baseline_type="leave_one_out",
        advantage_normalization="none",
    )
    gradient = true_gradient(policy, every)
    for role in (DECOMPOSER, SOLVER, SYNTHESIZER):
        slopes = [float(slope.abs().max()) for (_, family), slope in gradient.items() if family == role]
        assert max(slopes) > 1e-3
    found = deviation(expected_update(policy, every, config), gradient)
    assert found.largest < 1e-12
