"""Rewards: what counts as a score, what a failure does, and how rewards mix."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from builders import bare, trajectory

from stateset_agents.core.reward import (
    CompositeReward,
    EnvironmentReward,
    RewardFunction,
    RewardResult,
    as_reward,
    create_helpful_reward,
    reward_function,
    score_trajectories,
    score_trajectory,
)
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Outcome, Trajectory

TALK = trajectory("Where is K27?", "It is shipped.", "Thanks", "You're welcome.")


@reward_function
def count(replies: Sequence[Message]) -> int:
    return len(replies)


@reward_function
async def never() -> None:
    return None


def giving(value: object, name: str = "odd") -> RewardFunction:
    @reward_function(name=name)
    def give() -> object:
        return value

    return give


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.5, 0.5),
        (2, 2.0),
        (True, 1.0),
        (None, None),
        (np.float32(0.25), 0.25),
        (RewardResult(score=0.1), 0.1),
    ],
)
async def test_numbers_truth_values_none_and_results_are_scores(value: object, score: float | None):
    result = await giving(value).score(TALK)
    assert result.score == score
    assert result.score is None or type(result.score) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.5", [0.5], np.float64("nan")])
async def test_what_is_no_number_is_a_failure_that_names_reward_and_value(value: object):
    with pytest.raises(RewardFailure) as failure:
        await score_trajectory(giving(value), TALK)
    message = f"reward odd: score must be a finite number or None, got {value!r}"
    assert str(failure.value) == message
    [result] = await score_trajectories(giving(value), [TALK])
    assert isinstance(result, RewardFailure)
    assert str(result) == message


def test_a_result_checks_its_parts():
    with pytest.raises(RewardFailure, match=r"breakdown\['tone'\] must be a finite number or None, got nan"):
        RewardResult(score=1.0, breakdown={"tone": math.nan})
    with pytest.raises(RewardFailure, match=r"turn_rewards\[1\]"):
        RewardResult(score=1.0, turn_rewards=(1.0, math.inf))
    with pytest.raises(RewardFailure, match=r"turn_rewards are parts of the score, which is None"):
        RewardResult(score=None, turn_rewards=(0.0, 0.5))


async def test_a_function_sees_what_it_names():
    seen: dict[str, object] = {}

    @reward_function
    def look(trajectory, messages, replies, scenario, context, success, outcome, extra=7):
        seen.update(locals())
        return 0

    talk = trajectory("Hi", "Hello.", context={"order": "K27"}, success=True)
    await look.score(talk)
    seen.pop("seen")
    assert seen == {
        "trajectory": talk,
        "messages": talk.messages,
        "replies": talk.replies,
        "scenario": talk.scenario,
        "context": {"order": "K27"},
        "success": True,
        "outcome": talk.outcome,
        "extra": 7,
    }


def test_a_function_that_asks_for_something_else_is_refused_at_once():
    with pytest.raises(
        ConfigurationError, match="reward odd: cannot give parameter 'reply'; there are: traj"
    ):
        reward_function(name="odd")(lambda reply: 0)
    with pytest.raises(ConfigurationError, match=r"cannot give parameter '\*\*given'"):
        reward_function(name="odd")(lambda **given: 0)
    with pytest.raises(ConfigurationError, match="scope must be one of turn, trajectory, group, got 'all'"):
        reward_function(scope="all")(lambda: 0)  # type: ignore[call-overload]  # the mistake under test


async def test_sync_rewards_leave_the_event_loop_free_and_are_local():
    @reward_function
    def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    @reward_function(local=True)
    async def memory() -> float:
        return 0.5

    assert (await where.score(TALK)).score == 0.0
    assert (await memory.score(TALK)).score == 0.5
    assert where.local
    assert memory.local
    assert not never.local


async def test_mistakes_in_a_reward_travel_and_other_errors_leave_it_unscored():
    @reward_function
    def mistaken(replies):
        return replies.length

    @reward_function
    def unlucky():
        raise OSError("disk full")

    with pytest.raises(AttributeError):
        await score_trajectories(mistaken, [TALK])
    with pytest.raises(
        RewardFailure, match=r"^reward unlucky failed: OSError: disk full \(at test_reward\.py:\d+\)$"
    ):
        await score_trajectory(unlucky, TALK)


async def test_one_member_that_fails_leaves_its_siblings_scored():
    @reward_function
    def fragile(trajectory):
        if trajectory.member == 1:
            raise ZeroDivisionError("no orders")
        return trajectory.member

    members = [trajectory("Hi", "Hello.", member=member) for member in range(3)]
    first, second, third = await score_trajectories(fragile, members)
    assert (first, third) == (RewardResult(score=0.0), RewardResult(score=2.0))
    assert isinstance(second, RewardFailure)
    assert bare(second) == "reward fragile failed: ZeroDivisionError: no orders"


class Length(RewardFunction):
    async def score(self, trajectory: Trajectory) -> RewardResult:
        return RewardResult(score=float(len(trajectory.turns)))


async def test_a_subclass_is_named_after_itself_and_counts_as_remote():
    assert (Length().name, Length().scope, Length().local) == ("Length", "trajectory", False)
    assert await score_trajectories(Length(), [TALK, TALK]) == [RewardResult(score=2.0)] * 2


async def test_a_turn_reward_sees_each_turn_as_it_stood_and_counts_its_mean():
    seen: list[tuple[str, int]] = []

    @reward_function(scope="turn")
    async def polite(reply, messages):
        seen.append((reply.content, len(messages)))
        return 1.0 if "welcome" in reply.content else 0.0

    assert await polite.score(TALK) == RewardResult(score=0.5, turn_rewards=(0.0, 0.5))
    assert seen == [("It is shipped.", 2), ("You're welcome.", 4)]

    @reward_function(scope="turn")
    def sometimes(reply):
        return 1.0 if "shipped" in reply.content else None

    assert await sometimes.score(TALK) == RewardResult(score=1.0, turn_rewards=(1.0, 0.0))
    assert await sometimes.score(trajectory("Hi", "Hello.")) == RewardResult(score=None)


async def test_a_group_reward_scores_all_members_together():
    @reward_function(scope="group")
    def rank(trajectories):
        order = sorted(trajectories, key=lambda trajectory: len(trajectory.turns))
        return [order.index(trajectory) if trajectory.turns else math.nan for trajectory in trajectories]

    short = trajectory("Hi", "Hello.")
    first, second, third = await score_trajectories(rank, [TALK, short, trajectory("Hi")])
    assert (first, second) == (RewardResult(score=2.0), RewardResult(score=1.0))
    assert isinstance(third, RewardFailure)
    assert (await rank.score(TALK)).score == 0.0


async def test_a_group_reward_that_breaks_fails_every_member():
    @reward_function(scope="group")
    def broken(trajectories):
        raise OSError("gone")

    @reward_function(scope="group")
    def short(trajectories):
        return [1.0]

    results = await score_trajectories(broken, [TALK, TALK])
    assert [bare(result) for result in results] == ["reward broken failed: OSError: gone"] * 2
    with pytest.raises(ConfigurationError, match="reward short gave 1 results for 2 trajectories"):
        await score_trajectories(short, [TALK, TALK])
    assert await score_trajectories(broken, []) == []


async def test_the_environments_reward_is_turns_plus_outcome():
    talk = trajectory(
        "Hi", "a", "b", "c", turn_rewards=[0.25, None], outcome=Outcome(reward=1.0, breakdown={"done": 1.0})
    )
    assert await EnvironmentReward().score(talk) == RewardResult(
        score=1.25, breakdown={"done": 1.0}, turn_rewards=(0.25, 0.0)
    )
    silent = trajectory("Hi", "a", outcome=Outcome(reward=None))
    assert (await EnvironmentReward().score(silent)).score is None
    assert (await EnvironmentReward().score(TALK)).score is None


async def test_a_composite_is_the_weighted_mean_of_what_applies():
    both = CompositeReward([(count, 3.0), (giving(0.0, "none"), 1.0)])
    assert await both.score(TALK) == RewardResult(score=1.5, breakdown={"count": 2.0, "none": 0.0})
    with_never = CompositeReward({"turns": (count, 0.2), "never": (never, 0.8)})
    assert await with_never.score(TALK) == RewardResult(score=2.0, breakdown={"turns": 2.0})
    assert await CompositeReward([(never, 1.0)]).score(TALK) == RewardResult(score=None)


async def test_composites_nest_and_flatten_their_breakdowns():
    talk = trajectory("Hi", "a", outcome=Outcome(reward=1.0, breakdown={"done": 1.0}))
    inner = CompositeReward([(EnvironmentReward(), 1.0), (count, 1.0)])
    result = await CompositeReward({"inner": (inner, 1.0), "again": (giving(0.0), 1.0)}).score(talk)
    assert result.score == 0.5
    assert result.breakdown == {
        "inner": 1.0,
        "inner/environment": 1.0,
        "inner/environment/done": 1.0,
        "inner/count": 1.0,
        "again": 0.0,
    }


async def test_a_composite_with_a_failing_term_leaves_that_member_unscored():
    @reward_function
    def fragile(trajectory):
        if trajectory.member == 1:
            raise OSError("gone")
        return 0.0

    composite = CompositeReward([(count, 1.0), (fragile, 1.0)])
    members = [trajectory("Hi", "Hello.", member=member) for member in range(2)]
    first, second = await score_trajectories(composite, members)
    assert first == RewardResult(score=0.5, breakdown={"count": 1.0, "fragile": 0.0})
    assert isinstance(second, RewardFailure)
    assert bare(second) == "reward fragile failed: OSError: gone"
    with pytest.raises(RewardFailure, match="fragile"):
        await composite.score(members[1])


async def test_a_term_that_miscounts_one_member_s_turns_leaves_the_others_scored():
    @reward_function
    def two_turns(trajectory: Trajectory) -> RewardResult:
        return RewardResult(score=1.0, turn_rewards=(0.5, 0.5))

    composite = CompositeReward([(two_turns, 1.0)])
    short, scored = await score_trajectories(composite, [trajectory("Hi", "a"), TALK])
    assert isinstance(short, RewardFailure)
    assert str(short) == "reward two_turns: turn_rewards has 2 numbers for a conversation of 1 turns"
    assert isinstance(scored, RewardResult)
    assert scored.turn_rewards == (0.5, 0.5)


async def test_a_composite_hands_the_whole_group_to_its_group_terms():
    @reward_function(scope="group")
    def share(trajectories):
        return [1 / len(trajectories)] * len(trajectories)

    composite = CompositeReward([(share, 1.0), (count, 1.0)])
    assert composite.scope == "group"
    assert [result.score for result in await composite.score_group([TALK] * 4)] == [1.125] * 4


def test_a_composite_is_local_when_all_its_terms_are():
    assert CompositeReward([(count, 1.0), (EnvironmentReward(), 1.0)]).local
    assert not CompositeReward([(count, 1.0), (never, 1.0)]).local


@pytest.mark.parametrize("weight", [0, -1.0, math.nan, math.inf, True, "1"])
def test_weights_that_cannot_work_are_refused(weight: object):
    with pytest.raises(ConfigurationError, match="the weight of reward 'count' must be positive"):
        CompositeReward([(count, weight)])  # type: ignore[list-item]  # the mistake under test


def test_empty_and_doubled_composites_are_refused():
    with pytest.raises(ConfigurationError, match="at least one"):
        CompositeReward([])
    with pytest.raises(ConfigurationError, match="'count' stands twice: name the terms by a mapping"):
        CompositeReward([(count, 1.0), (count, 1.0)])


async def test_members_are_scored_at_the_same_time():
    waiting = asyncio.Barrier(3)

    @reward_function
    async def together():
        async with asyncio.timeout(5):
            await waiting.wait()
        return 1.0

    assert [result.score for result in await together.score_group([TALK] * 3)] == [1.0] * 3


async def test_a_composite_combines_turn_rewards_by_weight():
    talk = trajectory("Hi", "a", "b", "c", turn_rewards=[0.5, 0.5], outcome=Outcome(reward=None))
    reward = CompositeReward([(EnvironmentReward(), 1.0), (giving(3.0), 1.0)])
    result = await reward.score(talk)
    assert result.score == 2.0
    assert result.turn_rewards == (0.25, 0.25)


async def test_a_turn_earns_what_it_moves_the_mean_by():
    scores = iter([1.0, None, 0.0])
    reward = reward_function(scope="turn", name="given")(lambda: next(scores))
    result = await reward.score(trajectory("Hi", "a", "b", "c", "d", "e"))
    assert result.score == 0.5
    assert result.turn_rewards == (1.0, 0.0, -0.5)


async def test_a_plain_function_may_stand_where_a_reward_is_expected():
    def brief(replies):
        return 1.0 / len(replies)

    reward = CompositeReward([(brief, 1.0), (count, 1.0)])
    assert await reward.score(TALK) == RewardResult(score=1.25, breakdown={"brief": 0.5, "count": 2.0})
    assert as_reward(count) is count
    assert as_reward(brief).local


async def test_callable_objects_and_wrapped_coroutines_are_awaited():
    class Judge:
        async def __call__(self, replies):
            return 0.25

    async def judge(replies):
        return 0.75

    assert (as_reward(Judge()).name, as_reward(Judge()).local) == ("Judge", False)
    assert (await as_reward(Judge()).score(TALK)).score == 0.25
    assert (await as_reward(lambda replies: judge(replies)).score(TALK)).score == 0.75


@pytest.mark.parametrize("value", [None, 0.5, "environment", {"environment": 1.0}])
def test_what_is_no_reward_is_refused_in_one_line(value: object):
    with pytest.raises(ConfigurationError, match=f"a reward must be a .*, got {type(value).__name__}: "):
        as_reward(value)  # type: ignore[arg-type]  # the mistake under test


def test_a_list_of_rewards_is_told_what_takes_several():
    with pytest.raises(ConfigurationError, match=r"got list: .*several are a CompositeReward\(\["):
        as_reward([EnvironmentReward(), EnvironmentReward()])  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(("given", "said"), [(1.0, "got 1.0$"), (None, "got None: is a return missing")])
async def test_a_group_reward_that_returns_no_list_is_named(given: object, said: str):
    @reward_function(scope="group")
    def winner(trajectories):
        return given

    with pytest.raises(ConfigurationError, match=f"reward winner of scope group .*{said}"):
        await winner.score_group([TALK, TALK])


async def test_a_class_or_a_factory_that_was_not_called_is_named():
    with pytest.raises(ConfigurationError, match=r"got the class: write EnvironmentReward\(\)"):
        CompositeReward([(EnvironmentReward, 1.0)])
    with pytest.raises(ConfigurationError, match=r"a reward helpful came where its score should"):
        await score_trajectory(as_reward(create_helpful_reward), TALK)


def test_what_has_no_named_parameters_is_refused():
    for value in (EnvironmentReward(), max):
        with pytest.raises(ConfigurationError, match="must be a function with named parameters"):
            reward_function(value)
