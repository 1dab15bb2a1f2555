"""User code that hangs, blocks, or breaks again and again: what it costs, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from typing import Any

import pytest
from builders import bare, trajectory
from engines import make_engine
from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import (
    CompositeReward,
    EnvironmentReward,
    RewardFunction,
    RewardResult,
    reward_function,
)
from stateset_agents.core.scoring.base import score_trajectories
from stateset_agents.core.tools import Toolbox, tool
from stateset_agents.runtime.user_code import RateLimitedWarnings, format_error
from stateset_agents.types.errors import (
    ConfigurationError,
    EnvironmentFailure,
    EnvironmentTimeout,
    RewardTimeout,
)
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.trajectory import Status, TrajectoryGroup

SHORT, LONG = 0.3, 60.0
"""A time limit that what works keeps on a busy machine, and a wait that would be noticed."""


@pytest.fixture
def stuck() -> Any:
    """A sync function that hangs until the test is over."""
    over = threading.Event()
    yield lambda *_: over.wait(LONG)
    over.set()


async def play(environment: Any, reward: Any = None, **settings: Any) -> tuple[Any, list[TrajectoryGroup]]:
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(lambda request: "ok"))
    await agent.initialize()
    engine = make_engine(agent, environment, reward or EnvironmentReward(), **settings)
    return engine, await engine.rollout(scenarios(1), seed=0, step=0)


# ------------------------------------------------------------------------------ tools


async def hangs() -> str:
    await asyncio.sleep(LONG)
    return ""


async def test_a_tool_that_hangs_is_cut_off_sync_or_async(stuck: Any) -> None:
    @tool(timeout=SHORT)
    def waits() -> str:
        return str(stuck())

    for entry in (waits, tool(name="waits", timeout=SHORT)(hangs)):
        said = r"^tool waits took longer than 0\.3 s: mend what hangs, or raise its timeout$"
        with pytest.raises(EnvironmentTimeout, match=said):
            await Toolbox([entry]).call(ToolCall(name="waits", arguments={}))


def test_a_tools_time_limit_must_be_one() -> None:
    for wrong in (0, -1.0, "fast"):
        with pytest.raises(ConfigurationError, match="tool hangs: timeout must be seconds above 0 or None"):
            tool(timeout=wrong)(hangs)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize("result", ["x" * 10_000_000, ["x" * 9_999_996], "y" * 10_000_000])
async def test_ten_megabytes_of_a_tool_are_cut_and_the_agent_is_told(result: Any) -> None:
    def dump() -> Any:
        return result

    answer = await Toolbox([dump], max_result_chars=100).call(ToolCall(name="dump", arguments={}))
    shown, note = answer.content.split("\n")
    assert len(shown) == 100
    assert note == "[cut here: 9999900 more characters were left out]"


async def test_a_result_of_just_the_right_length_is_whole() -> None:
    def dump() -> str:
        return "x" * 100

    answer = await Toolbox([dump], max_result_chars=100).call(ToolCall(name="dump", arguments={}))
    assert answer.content == "x" * 100
    with pytest.raises(ConfigurationError, match="max_result_chars must be at least 1, got 0"):
        ConversationEnvironment([{"opening": "hi"}], max_result_chars=0)


# ------------------------------------------------------------------------------ users


async def wait_long(conversation: ChattyConversation, reply: Message) -> None:
    await asyncio.sleep(LONG)


async def test_a_user_that_hangs_fails_its_conversation_and_the_run_is_not_repeatable() -> None:
    environment = ChattyEnvironment(answer=wait_long)
    engine, [group] = await play(environment, num_generations=2, turn_timeout=SHORT, episode_retries=0)
    assert [member.status for member in group.trajectories] == [Status.FAILED] * 2
    assert group.trajectories[0].error == (
        "EnvironmentTimeout: answering a reply took the environment longer than 0.3 s: mend the user or tool "
        "that hangs, or raise turn_timeout"
    )
    assert environment.num_open == 0
    assert (engine.num_timeouts, engine.num_retries, engine.repeatable) == (2, 0, False)


class Blocking:
    """A user without `local` whose reply is not async."""

    def __init__(self) -> None:
        self.thread: Any = None

    def reply(self, messages: Any) -> str | None:
        self.thread = threading.current_thread()
        time.sleep(0.05)
        return None


async def test_a_user_with_a_sync_reply_runs_in_a_thread_and_counts_as_remote() -> None:
    user = Blocking()
    environment = ConversationEnvironment([{"opening": "hi"}], user=lambda scenario, seed: user)  # type: ignore[arg-type, return-value]  # sync on purpose
    assert not environment.local
    [scenario] = environment.scenarios("train")
    conversation = await environment.start(scenario, 0)
    observation = await conversation.step(Message(role="assistant", content="hello"))
    assert observation.terminated
    assert user.thread is not threading.current_thread()


async def test_a_user_function_may_be_async_and_must_make_a_user() -> None:
    async def make(scenario: Any, seed: int) -> Any:
        return Blocking() if seed else "hi"

    environment = ConversationEnvironment([{"opening": "hi"}], user=make)  # type: ignore[arg-type]  # async on purpose
    [scenario] = environment.scenarios("train")
    await environment.start(scenario, 1)
    with pytest.raises(ConfigurationError, match=r"must make an object with reply\(messages\).*, got 'hi'"):
        await environment.start(scenario, 0)


def test_a_user_function_that_breaks_is_one_line_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"no user could be made for scenario s1: KeyError: 'mood'"):
        ConversationEnvironment([{"id": "s1"}], user=lambda scenario, seed: scenario.context["mood"])


# ------------------------------------------------------------------------------ rewards


def only_member(stalls: Any, name: str = "judge") -> RewardFunction:
    """Scores 1, except that member 1 never gets an answer."""

    @reward_function(name=name, local=True)
    async def judge(trajectory: Any) -> float:
        if trajectory.member == 1:
            await stalls()
        return 1.0

    return judge


MEMBERS = [trajectory("hi", "a", member=member) for member in range(3)]


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in a composite"])
async def test_a_reward_that_hangs_leaves_its_member_alone_unscored(wrapped: bool) -> None:
    judge = only_member(hangs)
    reward = CompositeReward([(judge, 1.0)]) if wrapped else judge
    results = await score_trajectories(reward, MEMBERS, seconds=SHORT)
    assert [isinstance(result, RewardResult) for result in results] == [True, False, True]
    assert isinstance(results[1], RewardTimeout)
    assert str(results[1]) == (
        "reward judge took longer than 0.3 s: mend what hangs, or raise reward_timeout"
    )


async def test_a_sync_reward_that_hangs_leaves_its_member_alone_unscored(stuck: Any) -> None:
    class Judge(RewardFunction):
        def score(self, trajectory: Any) -> Any:  # type: ignore[override]  # sync on purpose
            return stuck() if trajectory.member == 1 else 0.5

    results = await score_trajectories(Judge(), MEMBERS, seconds=SHORT)
    assert [getattr(result, "score", None) for result in results] == [0.5, None, 0.5]
    assert isinstance(results[1], RewardTimeout)


async def test_a_group_reward_that_hangs_leaves_all_its_members_unscored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stateset_agents.core.scoring.base._GRACE", 0.0)

    @reward_function(scope="group")
    async def ranking(trajectories: Any) -> list[float]:
        await asyncio.sleep(LONG)
        return []

    results = await score_trajectories(ranking, MEMBERS, seconds=SHORT)
    assert [type(result) for result in results] == [RewardTimeout] * 3


async def test_a_rewards_own_timeout_is_no_time_limit() -> None:
    @reward_function
    def judge(trajectory: Any) -> float:
        raise TimeoutError("no answer from the judge")

    [result, *_] = await score_trajectories(judge, MEMBERS, seconds=LONG)
    assert bare(result) == "reward judge failed: TimeoutError: no answer from the judge"
    assert not isinstance(result, RewardTimeout)


async def test_a_late_score_makes_the_run_not_repeatable() -> None:
    engine, [group] = await play(
        ChattyEnvironment(), only_member(hangs), num_generations=2, reward_timeout=SHORT
    )
    assert group.rewards == [1.0, None]
    assert (engine.num_timeouts, engine.repeatable) == (2, False)  # it was asked twice


# ------------------------------------------------------------------------------ what is said


async def test_a_cause_is_told_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(conversation: ChattyConversation, reply: Message) -> None:
        raise OSError("the desk is closed")

    await play(ChattyEnvironment(answer=broken), num_generations=4, episode_retries=0)
    assert [bare(record.getMessage()) for record in caplog.records if record.levelno == logging.WARNING] == [
        "conversation failed  scenario=s0 member=0 error=OSError: the desk is closed",
        "conversation failed: 4 times in all  error=OSError: the desk is closed",
    ]


def test_other_causes_are_told_too(caplog: pytest.LogCaptureFixture) -> None:
    said = RateLimitedWarnings()
    for cause in ("a", "b", "a", "a"):
        said.warn("broke", cause)
    said.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "broke  error=a",
        "broke  error=b",
        "broke: 3 times in all  error=a",
    ]


# ------------------------------------------------------------------------------ where it broke


def line_of(function: Any, lines_down: int) -> str:
    return rf" \(at test_user_code\.py:{function.__code__.co_firstlineno + lines_down}\)"


async def test_what_breaks_in_user_code_is_told_with_its_file_and_line() -> None:
    def success(scenario: Any, messages: Any) -> bool:
        return bool(scenario.context["degreez"])

    def comfort(trajectory: Any) -> float:
        return float(json.loads("{"))

    def heat() -> str:
        return str(1 / 0)

    environment = ConversationEnvironment([{"opening": "hi"}], success=success, max_turns=1)
    _, [group] = await play(environment, num_generations=1, episode_retries=0)
    said = f"EnvironmentFailure: success failed: KeyError: 'degreez'{line_of(success, 1)}"
    assert re.fullmatch(said, group.trajectories[0].error or "")
    [result] = await score_trajectories(reward_function(comfort), MEMBERS[:1])
    assert re.search(rf"^reward comfort failed: JSONDecodeError: .*{line_of(comfort, 1)}$", str(result))
    with pytest.raises(EnvironmentFailure, match=rf"division by zero{line_of(heat, 1)}; mend it, or raise"):
        await Toolbox([heat]).call(ToolCall(name="heat", arguments={}))


async def test_a_failure_that_the_package_names_itself_has_no_line() -> None:
    assert format_error(EnvironmentTimeout("took longer")) == "EnvironmentTimeout: took longer"
    assert format_error(OSError("gone")) == "OSError: gone"  # never raised
