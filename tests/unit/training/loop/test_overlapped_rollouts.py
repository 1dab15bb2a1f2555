"""The pipeline with real engine and conversations: whatever breaks, hangs or is cut, each group ends once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from engines import make_engine
from environments import ChattyConversation, ChattyEnvironment, scenarios
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import RewardFunction, RewardResult
from stateset_agents.runtime.circuit_breakers import FaultPolicy
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.overlapped_rollouts import Pipeline
from stateset_agents.training.loop.rollouts import Admission, End
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory

SCENARIOS = scenarios(5)
MEMBERS = 2


class Dice(RewardFunction):
    """Members of some groups earn the same, some scores never come."""

    name = "dice"
    local = True

    async def score(self, trajectory: Trajectory) -> RewardResult:
        throw = derive(trajectory.seed, "reward") % 5
        if throw == 0:
            raise OSError("no score")
        return RewardResult(score=float(trajectory.member if throw > 1 else 1))


def unruly(chance: random.Random) -> Any:
    """Users that take a moment, and now and then break off or say nothing at all."""

    async def answer(conversation: ChattyConversation, reply: Message) -> None:
        throw = chance.random()
        if throw < 0.1:
            raise ConnectionError("no route")
        await asyncio.sleep(30 if throw < 0.15 else chance.random() * 0.002)

    return answer


async def play_run(seed: int, *, staleness: int, resamples: int, per_step: int, steps: int) -> None:
    """A run of several lives: it is cut off after a random number of steps, and goes on from the frontier."""
    chance = random.Random(seed)
    environment = ChattyEnvironment(answer=unruly(chance))
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(lambda request: "yes"))
    await agent.initialize()
    config = TrainingConfig(
        num_generations=MEMBERS,
        max_staleness=staleness,
        max_resamples=resamples,
        max_concurrent=5,
        seed=seed,
        min_group_size=2,
    )
    engine = make_engine(
        agent,
        environment,
        Dice(),
        num_generations=MEMBERS,
        deterministic=False,
        episode_retries=0,
        turn_timeout=0.02,
        faults=FaultPolicy(reward_retries=0, breaker_failures=0),
    )
    ends: dict[int, End] = {}
    done = 0
    while done < steps:
        events: list[tuple[str, int]] = []
        admission = Admission(
            groups_per_step=per_step,
            remaining=(steps - done) * per_step,
            max_staleness=staleness,
            max_concurrent=5,
            group_size=MEMBERS,
            max_resamples=resamples,
            first=len(ends),
        )
        pipeline = Pipeline(
            engine,
            lambda place: SCENARIOS[place % len(SCENARIOS)],
            admission,
            config,
            event=lambda event, told=events, **fields: told.append((event, fields["group"])),
            on_change=lambda: None,
        )
        pipeline.admit()
        for _ in range(chance.randint(1, 4)):
            played = await asyncio.wait_for(pipeline.next(), 20)  # progress never stops
            assert admission.submitted == admission.accepted + admission.rejected + admission.running
            assert environment.num_open <= 5
            assert not played.batch.ends.keys() & ends.keys()
            ends |= played.batch.ends
            assert len(played.selected) == per_step
            assert len(played.batch.filtered) <= resamples
            await asyncio.sleep(chance.random() * 0.004)  # the update
            pipeline.release(played)
            done += 1
            if done == steps:
                break
        dropped = await pipeline.close()
        assert environment.num_open == 0
        began = {place for event, place in events if event == "group admitted"}
        finished = {place for event, place in events if event == "group finished"}
        assert began - finished == set(dropped)
    assert sorted(ends) == list(range(len(ends)))
    assert {task for task in asyncio.all_tasks() if task.get_name().startswith("group")} == set()
    await agent.close()


@pytest.mark.parametrize("per_step", [1, 7, 12])
def test_how_often_a_scenario_came_before_in_its_step_is_counted_on(per_step: int) -> None:
    asked: list[int] = []

    def scenario_at(place: int) -> Any:
        asked.append(place)
        return SCENARIOS[place % len(SCENARIOS)]

    config = TrainingConfig(per_device_train_batch_size=per_step, gradient_accumulation_steps=1)
    assert config.episodes_per_step() == per_step
    nobody: Any = None
    pipeline = Pipeline(nobody, scenario_at, nobody, config, event=nobody, on_change=nobody)
    start = per_step + per_step // 2  # a resumed run may begin within a step
    for place in range(start, start + 30):
        before = range(place - place % per_step, place)
        expected = sum(other % len(SCENARIOS) == place % len(SCENARIOS) for other in before)
        assert pipeline._times_before(place) == expected
    assert len(asked) <= 2 * 30 + per_step


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(0, 2), st.integers(1, 3), st.integers(3, 6))
def test_whatever_breaks_hangs_or_is_cut_every_group_ends_once(
    seed: int, staleness: int, resamples: int, per_step: int, steps: int
) -> None:
    asyncio.run(play_run(seed, staleness=staleness, resamples=resamples, per_step=per_step, steps=steps))


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"num_branches": 1}])
async def test_a_group_by_itself_has_no_clock_and_no_branches(settings: dict[str, Any]) -> None:
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(["yes"]))
    given = {"deterministic": False, **settings}
    engine = make_engine(agent, ChattyEnvironment(), Dice(), **given)
    with pytest.raises(ConfigurationError, match="num_branches=0 and deterministic=False"):
        await engine.play_group(SCENARIOS[0], seed=0, step=0, slots=asyncio.Semaphore(1))
