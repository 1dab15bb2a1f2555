"""Two agents on the same scenarios: the arithmetic by published and hand-counted numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tiny_training import talk

from stateset_agents.evaluation.comparison import (
    compare,
    exact_mcnemar,
    mean_interval,
    mean_verdict,
)
from stateset_agents.evaluation.comparison import paired_interval as of_shares
from stateset_agents.evaluation.evaluator import Evaluation
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, Trajectory, TrajectoryGroup


def played(
    verdicts: Sequence[bool | None], rewards: Sequence[float | None] | None = None, **fields: object
) -> Evaluation:
    """Scenario i of family f(i % 2), judged by verdicts[i]."""
    groups = []
    for place, verdict in enumerate(verdicts):
        trajectory = talk(([1], [2]), outcome=Outcome(reward=None, success=verdict))
        scenario = Scenario(id=f"s{place}", family=f"f{place % 2}", split="test")
        reward = rewards[place] if rewards else None
        groups.append(_group(trajectory, scenario, reward))
    given = {"temperature": 1.0, **fields}
    return Evaluation(
        success=None,
        interval=None,
        mean_reward=None,
        n=len(groups),
        num_failed=0,
        families={},
        groups=groups,
        **given,  # type: ignore[arg-type]  # temperature and groups, by name
    )


def _group(trajectory: Trajectory, scenario: Scenario, reward: float | None) -> TrajectoryGroup:
    return TrajectoryGroup(
        key=scenario.id, trajectories=(replace(trajectory, scenario=scenario, reward=reward),)
    )


def counted(both: int, wins: int, losses: int, neither: int) -> list[tuple[float, float]]:
    """Pairs of A's and B's success."""
    return [(1.0, 1.0)] * both + [(0.0, 1.0)] * wins + [(1.0, 0.0)] * losses + [(0.0, 0.0)] * neither


def test_newcombe_s_interval_gives_published_values() -> None:
    def paired_interval(both: int, wins: int, losses: int, neither: int) -> tuple[float, float]:
        return of_shares(counted(both, wins, losses, neither))

    # airway reactivity before and after transplantation, 1 1 / 7 12: -.286 [-.507, -.026]
    # (Fagerland, Lydersen, Laake, Statistics in Medicine 33, 2014); losses and wins change the sign
    assert paired_interval(1, wins=1, losses=7, neither=12) == pytest.approx((-0.5069, -0.0256), abs=5e-5)
    assert paired_interval(1, wins=7, losses=1, neither=12) == pytest.approx((0.0256, 0.5069), abs=5e-5)
    # 36 12 / 2 0: .2 [.0569, .3404] (Newcombe 1998, table III)
    assert paired_interval(36, wins=12, losses=2, neither=0) == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_the_interval_stays_within_what_a_difference_can_be() -> None:
    assert of_shares(counted(0, wins=30, losses=0, neither=0)) == pytest.approx((0.8395, 1.0), abs=5e-5)
    low, high = of_shares(counted(54, wins=0, losses=0, neither=0))  # no pair differs
    assert (low, high) == pytest.approx((-0.0664, 0.0664), abs=5e-5)
    with pytest.raises(ValueError, match="no pair"):
        of_shares([])


def test_mcnemar_s_exact_test_is_a_coin_on_the_pairs_that_differ() -> None:
    assert exact_mcnemar(9, 1) == exact_mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert exact_mcnemar(5, 5) == exact_mcnemar(0, 0) == 1.0
    assert exact_mcnemar(6, 0) == pytest.approx(2 / 64)
    assert exact_mcnemar(1500, 1200) == pytest.approx(8.3e-9, rel=0.05)  # no overflow


def test_the_interval_of_many_values_is_close_to_the_normal_one() -> None:
    values = [0.0, 1.0] * 200  # standard error .5 / 20 = .025
    assert mean_interval(values) == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=1e-3)


def test_a_verdict_by_the_mean_needs_twenty_scenarios_that_differ_and_says_what_is_missing() -> None:
    apart = [0.4, 0.5, 0.6, 0.5]
    assert mean_verdict(apart * 5) == ("better", "")
    assert mean_verdict([-one for one in apart] * 5) == ("worse", "")
    assert mean_verdict(apart * 4 + [0.0] * 40) == ("unclear", "16 of 56 scenarios differ, 20 must")
    verdict, why = mean_verdict([1.0, -1.0] * 10)
    assert (verdict, why) == ("unclear", "the 98% interval of the mean, [-0.583, +0.583], holds 0")
    assert mean_verdict([]) == ("unclear", "0 of 0 scenarios differ, 20 must")


def test_the_same_difference_everywhere_needs_so_many_that_a_rare_other_one_would_be_there() -> None:
    assert mean_verdict([0.25] * 58) == ("unclear", "all 58 differ by +0.25: 59 must for a verdict")
    assert mean_verdict([0.25] * 59)[0] == "better"
    assert mean_verdict([-0.1] * 59)[0] == "worse"


def test_wins_losses_and_ties_are_counted_by_scenario() -> None:
    a = played([True, False, False, True, False, True], [1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    b = played([True, True, True, False, False, True], [1.0, 1.0, 0.5, 0.0, 0.0, 1.0])
    result = compare(a, b)
    whole = result.success
    assert whole is not None
    assert (whole.n, whole.wins, whole.losses, whole.ties) == (6, 2, 1, 3)
    assert (whole.a, whole.b) == (0.5, 4 / 6)
    assert whole.difference == pytest.approx(1 / 6)
    assert whole.p_value == 1.0
    assert result.reward == pytest.approx((1.0 + 0.5 - 1.0) / 6)
    assert list(result.families) == ["f0", "f1"]
    assert (result.families["f0"].wins, result.families["f0"].losses) == (1, 0)  # s2
    assert (result.families["f1"].wins, result.families["f1"].losses) == (1, 1)  # s1 and s3
    assert result.summary()["success"]["wins"] == 2


def test_scenarios_are_paired_by_name_not_by_place() -> None:
    a, b = played([True, False]), played([True, False])
    turned = Evaluation(**{**_fields(b), "groups": list(reversed(b.groups))})
    whole = compare(a, turned).success
    assert whole is not None
    assert (whole.wins, whole.losses, whole.ties) == (0, 0, 2)


def test_a_scenario_given_twice_is_paired_as_one_with_two_tries() -> None:
    a, b = played([False] * 8), played([True] * 8)
    half = played([False] * 8)
    twice = [
        Evaluation(**{**_fields(one), "groups": [*one.groups, *more.groups]})
        for one, more in ((a, half), (b, half))
    ]
    whole = compare(*twice).success
    assert whole is not None
    assert (whole.n, whole.wins, whole.difference) == (8, 8, 0.5)
    assert whole.verdict == "unclear"  # won and lost alone, 8 to 0, would not do for halves
    assert whole.reason == "8 of 8 scenarios differ, 20 must"


def _fields(evaluation: Evaluation) -> dict[str, object]:
    return {name: getattr(evaluation, name) for name in Evaluation.__dataclass_fields__}


def test_what_one_could_not_play_is_left_out_and_said() -> None:
    a, b = played([True, False]), played([True, True])
    [lost, kept] = b.groups
    failed = replace(lost, trajectories=(replace(lost.trajectories[0], status=Status.FAILED, error="x"),))
    result = compare(a, Evaluation(**{**_fields(b), "groups": [failed, kept]}))
    assert (result.num_pairs, result.num_left_out) == (1, 1)
    assert result.success is not None
    assert (result.success.n, result.success.wins) == (1, 1)


def test_without_a_verdict_the_reward_alone_is_compared() -> None:
    result = compare(played([None, None], [0.0, 0.5]), played([None, None], [1.0, None]))
    assert result.success is None
    assert result.reward == 1.0
    assert result.families == {}


def test_other_scenarios_or_temperatures_are_no_comparison() -> None:
    with pytest.raises(ConfigurationError, match="same scenarios"):
        compare(played([True]), played([True, False]))
    with pytest.raises(ConfigurationError, match=r"same temperature, got 1\.0 and 0\.0"):
        compare(played([True]), played([True], temperature=0.0))
