"""k tries, twins, broken rules and misses, counted by hand; and that intervals are over scenarios."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from builders import trajectory
from environments import ChattyEnvironment, scenarios

from stateset_agents.algorithms.intervals import mean_interval, share_interval, wilson
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.evaluation.comparison import compare
from stateset_agents.evaluation.evaluator import Evaluation, evaluate, measured
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, Trajectory, TrajectoryGroup


def tried(
    verdicts: Sequence[Sequence[bool | None]],
    *,
    pairs: Sequence[str | None] = (),
    metadata: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
    rewards: Sequence[Sequence[float]] = (),
) -> Evaluation:
    """Scenario i with its tries' verdicts; None is a conversation that could not be played."""
    groups = []
    for place, own in enumerate(verdicts):
        context = {"pair": pairs[place]} if pairs and pairs[place] else {}
        scenario = Scenario(id=f"s{place}", family=f"f{place % 2}", context=context)
        members = tuple(
            trajectory(
                "hi",
                "ok",
                scenario=scenario,
                member=member,
                status=Status.FAILED if success is None else Status.TERMINATED,
                outcome=None if success is None else Outcome(success=success),
                metadata=(metadata or {}).get((place, member), {}),
                reward=rewards[place][member] if rewards else None,
            )
            for member, success in enumerate(own)
        )
        groups.append(TrajectoryGroup(key=scenario.id, trajectories=members))
    return measured(groups, tries=max(map(len, verdicts)), temperature=1.0)


def test_pass_at_k_and_pass_hat_k_are_means_over_scenarios() -> None:
    result = tried([[True, False, False, False], [True, True, True, False], [True] * 4])
    assert result.success == pytest.approx((0.25 + 0.75 + 1) / 3)
    assert list(result.pass_at) == list(result.pass_hat) == [1, 2, 4]
    assert result.pass_at[1].value == result.pass_hat[1].value == pytest.approx(result.success)
    assert result.pass_at[2].value == pytest.approx((0.5 + 1 + 1) / 3)
    assert result.pass_hat[2].value == pytest.approx((0 + 0.5 + 1) / 3)
    assert (result.pass_at[4].value, result.pass_hat[4].value) == pytest.approx((1.0, 1 / 3))
    assert result.pass_hat[4].interval == wilson(1, 3)


def test_an_unplayed_try_leaves_its_scenario_out_of_the_largest_k_only() -> None:
    result = tried([[True, None], [False, True]])
    assert (result.n, result.num_failed) == (3, 1)
    assert result.success == 0.75  # each scenario counts once
    assert (result.pass_at[1].n, result.pass_at[2].n) == (2, 1)
    assert result.pass_at[2].value == 1.0


def test_intervals_are_over_scenarios_not_over_tries() -> None:
    """Ten scenarios that are always or never solved say as much after 8 tries as after one."""
    once = tried([[place < 5] for place in range(10)])
    often = tried([[place < 5] * 8 for place in range(10)])
    assert once.interval == often.interval == wilson(5, 10)
    varied = [[place < 5] * 6 + [place >= 5] * 2 for place in range(10)]  # .75 or .25
    low, high = tried(varied).interval or (0, 0)
    assert (low, high) == share_interval([0.75] * 5 + [0.25] * 5)
    naive_low, naive_high = wilson(40, 80)
    assert high - low > naive_high - naive_low


def test_equal_shares_are_not_certain() -> None:
    low, high = share_interval([0.5] * 4)
    assert (low, high) == pytest.approx(wilson(6, 12))
    assert share_interval([0.0] * 4) == wilson(0, 4)
    with pytest.raises(ValueError, match="no share"):
        share_interval([])


def test_the_interval_of_a_mean_has_its_level_over_many_experiments() -> None:
    """95 % intervals of a mean of 40 shares hold the truth in about 95 of 100 experiments."""
    draw = random.Random(0)
    held = 0
    for _ in range(200):
        shares = [sum(draw.random() < chance for _ in range(4)) / 4 for chance in [0.2, 0.8] * 20]
        low, high = mean_interval(shares) or (0, 0)
        held += low <= 0.5 <= high
    assert 180 <= held <= 200


def test_twins_count_when_both_are_right() -> None:
    result = tried(
        [[True, True], [True, False], [True, True], [False, True], [False, False]],
        pairs=["a", "a", "b", "b", "alone"],
    )
    assert result.twins is not None
    assert (result.twins.value, result.twins.n) == ((0.5 + 0.5) / 2, 2)  # try 1 of a, try 2 of b
    assert tried([[True], [True]]).twins is None


def test_who_always_refuses_gets_no_pair() -> None:
    refuser = tried([[True], [False]] * 6, pairs=[f"p{place // 2}" for place in range(12)])
    assert refuser.success == 0.5
    assert refuser.twins is not None
    assert refuser.twins.value == 0.0
    assert refuser.twins.interval == wilson(0, 6)


def test_broken_rules_and_misses_are_counted_where_somebody_counts() -> None:
    metadata = {
        (0, 0): {"violations": {"no consent": 2, "leak": 0}, "user_miss": 3},
        (0, 1): {"violations": {}, "user_miss": 0},
        (1, 0): {"violations": {"leak": 1}, "user_miss": 1},
    }
    result = tried([[True, True], [True, True]], metadata=metadata)
    rates = {rule: one.value for rule, one in result.violations.items()}
    assert rates == {"leak": 0.5, "no consent": 0.25, "any": 0.75}  # s0: half its tries, s1: its only one
    assert result.user_miss is not None
    assert result.user_miss.value == pytest.approx((1.5 + 1) / 2)
    nobody = tried([[True]])
    assert (nobody.violations, nobody.user_miss) == ({}, None)
    kept = tried([[True]], metadata={(0, 0): {"violations": {}}})
    assert {rule: one.value for rule, one in kept.violations.items()} == {"any": 0.0}


def test_the_summary_holds_what_was_measured_as_plain_json() -> None:
    metadata = {(0, 0): {"violations": {"leak": 1}, "user_miss": 1}}
    told = json.loads(json.dumps(tried([[True, False]] * 2, pairs=["a", "a"], metadata=metadata).summary()))
    assert told["pass_hat"]["2"] == {"value": 0.0, "interval": list(wilson(0, 2)), "n": 2}
    assert told["twins"]["value"] == 0.5
    assert told["violations"]["any"]["value"] == 1.0
    assert told["user_miss"]["value"] == 1.0
    plain = tried([[True]]).summary()
    assert not {"pass_at", "pass_hat", "twins", "violations", "user_miss"} & set(plain)


async def test_every_scenario_is_tried_by_other_draws_and_the_same_user() -> None:
    backend = ScriptedBackend(lambda request: "ok")
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        result = await evaluate(agent, ChattyEnvironment(), EnvironmentReward(), scenarios(3), tries=4)
        with pytest.raises(ConfigurationError, match="tries must be a whole number of at least 1, got 0"):
            await evaluate(agent, ChattyEnvironment(), EnvironmentReward(), scenarios(3), tries=0)
    assert result.tries == 4
    for group in result.groups:
        assert [one.member for one in group.trajectories] == [0, 1, 2, 3]
        assert len({one.seed for one in group.trajectories}) == 1
    first = [request.params.stream for request in backend.requests if request.turn == 0]
    assert len(set(first)) == 12


def test_two_agents_with_several_tries_are_paired_by_scenario() -> None:
    a = tried([[True, False], [False, False], [True, True], [False, False]] * 5)
    b = tried([[True, True], [True, False], [True, True], [True, False]] * 5)
    success = compare(a, b).success
    assert success is not None
    assert (success.a, success.b, success.difference) == pytest.approx((0.375, 0.75, 0.375))
    assert (success.wins, success.losses, success.ties, success.n) == (15, 0, 5, 20)
    # 15 of 15 that differ to one side: a coin does it in 2 / 2^15 of the cases.
    assert (success.verdict, success.p_value) == ("better", 2 / 2**15)
    assert compare(b, a).verdict == "worse"
    assert compare(a, a).verdict == "unclear"
    assert compare(a, b).summary()["families"]["f0"]["verdict"] in ("better", "unclear")
    with pytest.raises(ConfigurationError, match="equally many tries, got 2 and 1"):
        compare(a, tried([[True]] * 20))


def test_better_needs_six_scenarios_that_differ() -> None:
    """5 of 5 won: a coin does it in 6 % of the cases."""
    for number, verdict, other in (
        (1, "unclear", "unclear"),
        (5, "unclear", "unclear"),
        (6, "better", "worse"),
    ):
        lost, won = [tried([[solved]] * number + [[True]] * 4) for solved in (False, True)]
        assert (compare(lost, won).verdict, compare(won, lost).verdict) == (verdict, other), number


def test_a_coin_decides_and_the_interval_says_the_same() -> None:
    """10 won and 3 lost of 20: Newcombe's interval left 0 out, where the coin falls so in 9 %."""
    solved = [(True, True)] * 3 + [(False, True)] * 10 + [(True, False)] * 3 + [(False, False)] * 4
    success = compare(tried([[one] for one, _ in solved]), tried([[other] for _, other in solved])).success
    assert success is not None
    assert success.interval[0] <= 0
    assert success.verdict == "unclear"
    assert success.reason == "random signs give as much in 9% of the cases"


def test_without_a_verdict_the_reward_says_who_is_better() -> None:
    def rewarded(value: float, number: int = 8) -> Evaluation:
        whole = tried([[True]] * number, rewards=[[value + place] for place in range(number)])
        groups = [
            TrajectoryGroup(key=g.key, trajectories=tuple(_unjudged(t) for t in g.trajectories))
            for g in whole.groups
        ]
        return measured(groups, tries=1, temperature=1.0)

    assert compare(rewarded(0.0, 20), rewarded(0.5, 20)).verdict == "better"
    assert compare(rewarded(0.0, 20), rewarded(0.0, 20)).verdict == "unclear"
    few = compare(rewarded(0.0), rewarded(0.5))
    assert (few.verdict, few.reason) == ("unclear", "8 of 8 scenarios differ, at least 20 must")
    assert few.summary()["reason"] == few.reason


def _unjudged(one: Trajectory) -> Trajectory:
    return replace(one, outcome=None)
