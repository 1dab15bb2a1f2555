"""Gymnasium's own toy-text environments as conversations."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.environments.gymnasium_text import GymnasiumText
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.trajectory import Status

MOVES = ["left", "down", "right", "up"]
SAFE = ["down", "down", "right", "down", "right", "right"]
"""From the start to the gift of the 4x4 lake, without slipping."""


def field(observation: int) -> str:
    return f"field {observation}"


def lake(**settings: Any) -> GymnasiumText:
    given = {"options": {"is_slippery": False}, "render": field, "actions": MOVES, "success": 1.0}
    return GymnasiumText("FrozenLake-v1", **{**given, "num_train": 3, "num_held_out": 2, **settings})


async def begin(environment: GymnasiumText, seed: int = 0) -> Conversation:
    return await environment.start(environment.scenarios("train")[0], seed)


async def say(conversation: Conversation, *replies: str) -> list[Observation]:
    return [await conversation.step(Message(role="assistant", content=reply)) for reply in replies]


async def test_a_lake_is_crossed_in_words() -> None:
    conversation = await begin(lake(system_prompt="Cross the lake."))
    assert [message.content for message in conversation.opening] == ["Cross the lake.", "field 0"]
    seen = await say(conversation, *SAFE)
    assert [answer.messages[0].content for answer in seen] == [
        f"field {number}" for number in (4, 8, 9, 13, 14, 15)
    ]
    assert [answer.reward for answer in seen] == [0, 0, 0, 0, 0, 1]
    assert [answer.terminated for answer in seen] == [False] * 5 + [True]
    outcome = await conversation.outcome()
    assert (outcome.reward, outcome.success) == (0.0, True)  # the turns have the reward
    await conversation.close()


async def test_a_reply_that_is_no_action_costs_a_turn_and_moves_nothing() -> None:
    conversation = await begin(lake(max_turns=4, misread_reward=-0.25))
    seen = await say(conversation, "hm", "right, not left", "I go DOWN.", "swim")
    told = "say one of: left, down, right, up"
    assert [answer.messages[0].content for answer in seen] == [told, told, "field 4", told]
    assert [answer.reward for answer in seen] == [-0.25, -0.25, 0.0, -0.25]
    assert [answer.truncated for answer in seen] == [False, False, False, True]
    outcome = await conversation.outcome()
    assert (outcome.success, outcome.breakdown) == (False, {"misread": 3.0})


async def test_doing_nothing_is_no_success_where_every_step_costs() -> None:
    """Along the cliff each step is -1, so -20 asks for a short way, and silence has 0."""
    cliff = GymnasiumText(
        "CliffWalking-v1", render=field, actions=["up", "right", "down", "left"], success=-20
    )
    verdicts = []
    for replies in (["no"] * 20, ["up"] * 20, ["up", *["right"] * 11, "down"]):
        conversation = await begin(cliff)
        seen = await say(conversation, *replies)
        assert seen[-1].terminated or seen[-1].truncated
        outcome = await conversation.outcome()
        verdicts.append((outcome.success, outcome.reward))
        await conversation.close()
    assert verdicts == [(False, 0.0), (False, 0.0), (True, 0.0)]


async def test_a_tool_call_is_answered_as_one_that_is_not_there() -> None:
    conversation = await begin(lake())
    call = ToolCall(name="move", id="c1")
    seen = await conversation.step(Message(role="assistant", content="left", tool_calls=(call,)))
    assert (seen.messages[0].role, seen.messages[0].tool_call_id) == ("tool", "c1")
    assert "there are no tools here" in seen.messages[0].content


async def test_render_parse_and_success_get_what_they_ask_for() -> None:
    def drawn(observation: int, env: gymnasium.Env[Any, Any], info: dict[str, Any]) -> str:
        where = dict(
            zip(("row", "column", "passenger", "to"), env.unwrapped.decode(observation), strict=True)
        )  # type: ignore[attr-defined]  # Taxi's own
        return f"{where} {int(info['action_mask'].sum())} moves"

    def number(reply: str, env: gymnasium.Env[Any, Any]) -> int:
        return int(reply)  # its ValueError is told to the agent

    taxi = GymnasiumText(
        "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3",
        render=drawn,
        parse=number,
        success=lambda total, rewards, scenario, terminated: terminated and total == sum(rewards),
        scenarios=[{"id": "a", "context": {"seed": 7}}, {"id": "b", "context": {"seed": 8}}],
    )
    first, other = taxi.scenarios("train")
    one, same, two = [
        await taxi.start(scenario, seed) for scenario, seed in ((first, 0), (first, 9), (other, 0))
    ]
    assert one.opening == same.opening != two.opening  # the scenario's seed says where things stand
    assert one.opening[0].content.startswith("{'row': ")
    wrong, off, moved = await say(one, "north", "6", "4")
    assert "invalid literal for int()" in wrong.messages[0].content
    assert off.messages[0].content == "6 is no action: actions are Discrete(6)"
    assert moved.reward in (-1.0, -10.0)
    assert (await one.outcome()).success is False


async def test_the_group_s_seed_resets_where_the_scenario_has_none() -> None:
    slippery = lake(options={}, scenarios=[{"id": "a"}], num_train=None, num_held_out=None)

    async def walk(seed: int) -> list[str]:
        conversation = await begin(slippery, seed)
        walked = []
        for _ in range(8):
            [seen] = await say(conversation, "right")
            walked.append(seen.messages[0].content)
            if seen.terminated:
                break
        return walked

    assert await walk(5) == await walk(5)
    assert len({tuple(await walk(seed)) for seed in range(6)}) > 1


async def test_the_environment_s_own_limit_truncates() -> None:
    conversation = await begin(lake(options={"is_slippery": False, "max_episode_steps": 2}))
    seen = await say(conversation, "left", "left")
    assert [(answer.terminated, answer.truncated) for answer in seen] == [(False, False), (False, True)]
    assert (await conversation.outcome()).success is False


async def test_a_fork_goes_its_own_way_and_slips_alike() -> None:
    conversation = await begin(lake(options={"is_slippery": True}))
    await say(conversation, "left")
    fork = conversation.fork()
    here = [answer.messages for answer in await say(conversation, "left", "up", "left")]
    assert [answer.messages for answer in await say(fork, "left", "up", "left")] == here
    await conversation.close()
    await fork.close()


class Counting(gymnasium.Env[np.ndarray, int]):
    """Shows one array that it goes on writing to; cannot be copied while it has a lock."""

    def __init__(self, locked: bool = False, breaks: bool = False) -> None:
        self.action_space = gymnasium.spaces.Discrete(3)
        self.observation_space = gymnasium.spaces.Box(0, 100, (1,))
        self.count = np.zeros(1)
        self.lock = threading.Lock() if locked else None
        self.breaks = breaks
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.count[0] = (options or {}).get("from", 0)
        return self.count, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.breaks:
            raise ValueError("the simulator is gone")
        assert threading.current_thread() is not threading.main_thread()
        self.count += action
        return self.count, float(action), False, False, {}

    def close(self) -> None:
        self.closed = True


def counting(**settings: Any) -> GymnasiumText:
    def shown(observation: np.ndarray) -> str:
        return str(int(observation[0]))

    given: dict[str, Any] = {"render": shown, "actions": {"none": 0, "one": 1, "two": 2}, "max_turns": 4}
    return GymnasiumText(
        Counting, **{**given, "scenarios": [{"id": "a", "context": {"options": {"from": 5}}}], **settings}
    )


async def test_steps_are_taken_in_a_thread_and_forks_share_no_array() -> None:
    conversation = await begin(counting(success=lambda observation: observation[0] == 7))
    assert conversation.opening[0].content == "5"
    fork = conversation.fork()
    await say(conversation, "two")
    assert (await conversation.outcome()).success is True
    assert (await fork.outcome()).success is False


async def test_what_cannot_be_copied_is_told_with_the_cure() -> None:
    conversation = await begin(counting(options={"locked": True}))
    with pytest.raises(ConfigurationError, match=r"Counting cannot be copied .*another advantage_estimator"):
        conversation.fork()


async def test_an_environment_that_breaks_fails_the_conversation_and_is_no_misread_reply() -> None:
    conversation = await begin(counting(options={"breaks": True}))
    with pytest.raises(EnvironmentFailure, match="Counting failed: ValueError: the simulator is gone"):
        await say(conversation, "one")


async def test_closing_closes_and_so_does_an_opening_that_cannot_be_shown() -> None:
    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting())
        return made[-1]

    good = GymnasiumText(make, render=lambda observation: "x", actions=["stay"], num_train=1)
    await (await begin(good)).close()
    bad = GymnasiumText(make, actions=["stay"], num_train=1)
    with pytest.raises(ConfigurationError, match="the observation is a ndarray, no text: give render"):
        await begin(bad)
    assert [env.closed for env in made] == [True, True]


async def test_an_environment_that_is_ready_too_late_is_closed() -> None:
    """A time limit cuts the reset, which goes on in its thread: nobody else would close what it made."""
    begun, goes_on, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Counting):
        def reset(self, **settings: Any) -> tuple[np.ndarray, dict[str, Any]]:
            begun.set()
            assert goes_on.wait(10)
            return super().reset(**settings)

        def close(self) -> None:
            closed.set()

    opening = asyncio.create_task(begin(GymnasiumText(Slow, render=field, actions=["stay"], num_train=1)))
    assert await asyncio.to_thread(begun.wait, 10)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not closed.is_set()
    goes_on.set()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_an_environment_whose_opening_is_cancelled_just_as_it_is_ready_is_closed() -> None:
    closed, loop = threading.Event(), asyncio.get_running_loop()

    class Ready(Counting):
        def reset(self, **settings: Any) -> tuple[np.ndarray, dict[str, Any]]:
            loop.call_soon_threadsafe(opening.cancel)
            return super().reset(**settings)

        def close(self) -> None:
            closed.set()

    opening = asyncio.create_task(begin(GymnasiumText(Ready, render=field, actions=["stay"], num_train=1)))
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert await asyncio.to_thread(closed.wait, 10)


async def test_an_environment_is_closed_when_the_step_that_nobody_waits_for_is_through() -> None:
    begun, goes_on, order = threading.Event(), threading.Event(), []

    class Slow(Counting):
        def step(self, action: Any) -> Any:
            begun.set()
            assert goes_on.wait(10)
            order.append("stepped")
            return super().step(action)

        def close(self) -> None:
            order.append("closed")

    conversation = await begin(GymnasiumText(Slow, render=field, actions=["stay"], num_train=1))
    step = asyncio.create_task(say(conversation, "stay"))
    assert await asyncio.to_thread(begun.wait, 10)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await conversation.close()
    assert order == []
    goes_on.set()
    for _ in range(1000):
        if len(order) == 2:
            break
        await asyncio.sleep(0.01)
    assert order == ["stepped", "closed"]


async def test_episodes_through_an_agent_earn_the_turns_rewards() -> None:
    agent = MultiTurnAgent(backend=ScriptedBackend(SAFE))
    await agent.initialize()
    scenarios = lake().scenarios("test")
    found = await evaluate(
        agent, lake(), EnvironmentReward(), scenarios, limits=RolloutLimits(max_concurrent=1)
    )
    assert found.success == 1.0
    for group in found.groups:
        [trajectory] = group.trajectories
        assert trajectory.status is Status.TERMINATED
        assert (trajectory.reward, trajectory.turn_rewards) == (1.0, (0, 0, 0, 0, 0, 1))
    await agent.close()


def test_held_out_seeds_are_the_same_for_every_seed() -> None:
    def seeds(environment: GymnasiumText, split: str) -> list[int]:
        return [scenario.context["seed"] for scenario in environment.scenarios(split)]

    one, two = lake(seed=1), lake(seed=2)
    assert [len(one.scenarios(split)) for split in ("train", "validation", "test")] == [3, 2, 2]
    assert seeds(one, "train") != seeds(two, "train")
    assert seeds(one, "test") == seeds(two, "test") != seeds(one, "validation")


def test_a_yaml_file_names_functions_by_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_lake.py").write_text("def told(observation):\n    return f'you are at {observation}'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = {"name": "gymnasium", "env": "FrozenLake-v1", "render": "my_lake:told", "actions": MOVES}
    made = make_environment(spec)
    assert len(made.scenarios("train")) == 1000
    with pytest.raises(ConfigurationError, match="render 'my_lake:tell': module 'my_lake' has no 'tell'"):
        make_environment({**spec, "render": "my_lake:tell"})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"env": "FrozenLak-v1"}, "Did you mean: `FrozenLake`"),
        ({"env": "no_such_module:Lake-v0"}, "No module named 'no_such_module'"),
        ({"env": gymnasium.make("FrozenLake-v1")}, "of its own: give lambda: FrozenLakeEnv"),
        ({"env": 3}, "env must be a name or a function"),
        ({"actions": None}, "give parse, a function of the reply, or actions"),
        ({"parse": field}, "give parse, a function of the reply, or actions"),
        ({"actions": "left"}, "actions must be words"),
        ({"actions": [True, False]}, r"quote yes and no in YAML"),
        ({"actions": ["up", "UP"]}, "two actions have the same word"),
        ({"render": lambda picture: ""}, "cannot give parameter 'picture'; there are: observation"),
        ({"success": "no text"}, "success"),
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"misread_reward": float("nan")}, "misread_reward must be a number"),
        ({"num_train": 0}, "num_train must be at least 1"),
        ({"scenarios": [{"id": "a"}]}, "not both"),
        ({"system_prompt": 3}, "system_prompt must be text"),
        ({"local": "no"}, "local must be true or false"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_cure(settings: dict[str, Any], told: str) -> None:
    given = {"env": "FrozenLake-v1", "render": field, "actions": MOVES, "num_train": 2, **settings}
    with pytest.raises(ConfigurationError, match=told):
        GymnasiumText(**given)


async def test_a_scenario_s_seed_must_be_a_number() -> None:
    environment = lake(scenarios=[{"id": "a", "context": {"seed": "x"}}], num_train=None, num_held_out=None)
    with pytest.raises(ConfigurationError, match="scenario a: seed must be a whole number from 0, got 'x'"):
        await begin(environment)


def test_without_gymnasium_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigurationError, match=r'pip install "gymnasium>=1"'):
        GymnasiumText("FrozenLake-v1", actions=MOVES)


def test_without_openenv_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(
        ConfigurationError, match=r'pip install "openenv>=0.10,<0.11", in an environment of its'
    ):
        make_environment({"name": "openenv", "url": "http://localhost:8000", "reply_field": "message"})
