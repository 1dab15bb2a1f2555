"""Two agents on the same scenarios: the arithmetic by published and hand-counted numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tiny_training import talk

from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.evaluation.comparison import compare
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


def test_the_interval_of_many_values_is_close_to_the_normal_one() -> None:
    values = [0.0, 1.0] * 200  # standard error .5 / 20 = .025
    assert mean_interval(values) == pytest.approx((0.5 - 0.049, 0.5 + 0.049), abs=1e-3)


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
    assert (whole.verdict, whole.p_value) == ("better", 2 / 2**8)


@pytest.mark.parametrize("tries", [1, 4, 8])
def test_more_tries_keep_the_verdict_of_fewer(tries: int) -> None:
    """Twenty scenarios, 0 against 100 %: several tries of each made that "unclear"."""
    a, b = (played([verdict] * 20 * tries) for verdict in (False, True))
    of_same = [
        Evaluation(
            **{
                **_fields(side),
                "groups": [_as_scenario(group, place % 20) for place, group in enumerate(side.groups)],
            }
        )
        for side in (a, b)
    ]
    whole = compare(*of_same).success
    assert whole is not None
    assert (whole.n, whole.verdict, whole.reason) == (20, "better", "")
    assert whole.interval[0] > 0.6


def _as_scenario(group: TrajectoryGroup, place: int) -> TrajectoryGroup:
    scenario = Scenario(id=f"s{place}", family=f"f{place % 2}", split="test")
    return _group(group.trajectories[0], scenario, None)


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
