"""A run's conversations under another reward: counted by hand, grouped as training grouped them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import trajectory

from stateset_agents.cli.main import main
from stateset_agents.core.reward import RewardFunction, RewardResult, reward_function
from stateset_agents.evaluation.recorded import groups_of
from stateset_agents.evaluation.rescoring import rank_correlation, rescore
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup


def group(step: int, name: str, rewards: Sequence[float | None], family: str = "refund") -> TrajectoryGroup:
    """Member m says m + 1 words; None has failed."""
    members = [
        trajectory(
            "hi",
            " ".join(["word"] * (member + 1)),
            scenario=Scenario(id=name, family=family),
            member=member,
            reward=reward,
            status=Status.FAILED if reward is None else Status.TERMINATED,
        )
        for member, reward in enumerate(rewards)
    ]
    return TrajectoryGroup(key=f"{step}/{name}", trajectories=tuple(members))


STEPS = [
    (0, [group(0, "a", [0.0, 0.5, 1.0]), group(0, "b", [1.0, None, 0.0], family="lost")]),
    (1, [group(1, "c", [0.0, 0.0, 0.0])]),
]


@reward_function
def num_words(replies: Sequence[Message]) -> float:
    return len(replies[0].content.split())


@reward_function
def brevity(replies: Sequence[Message]) -> float:
    return -len(replies[0].content.split())


async def test_the_same_order_keeps_every_sign() -> None:
    result = await rescore([STEPS[0]], num_words)
    whole = result.families["refund"]
    assert (whole.n, whole.rank_correlation, whole.flipped) == (3, 1.0, 0.0)
    assert (whole.old_mean, whole.new_mean) == (0.5, 2.0)


async def test_what_turns_round_is_counted_and_shown() -> None:
    result = await rescore(STEPS, brevity)
    assert (result.num_groups, result.num_failed, result.all.n) == (3, 1, 8)
    refund, lost = result.families["refund"], result.families["lost"]
    # a: 1 and 3 change places, the middle one stays at 0; c: all were 0, its first and last are no longer
    assert (refund.encouraged, refund.discouraged, refund.silenced, refund.awakened) == (1, 1, 0, 2)
    assert refund.flipped == pytest.approx(2 / 6)
    assert refund.within_groups == pytest.approx(-1.0)  # c says nothing
    assert (lost.encouraged, lost.discouraged, lost.rank_correlation) == (0, 0, 1.0)
    first = result.flips[0]
    assert (first.step, first.scenario, first.member) == (0, "a", 0)
    assert first.old_advantage == pytest.approx(-first.new_advantage)
    json.dumps(result.summary())


async def test_what_only_one_reward_scores_is_left_out_and_said() -> None:
    @reward_function
    def long_ones(replies: Sequence[Message]) -> float | None:
        words = len(replies[0].content.split())
        if words == 2:
            raise RuntimeError("broken")
        return None if words == 1 else 1.0

    result = await rescore([STEPS[0]], long_ones)
    assert (result.all.n, result.only_old, result.only_new) == (2, 3, 0)
    assert result.failure is not None
    assert "long_ones failed: RuntimeError: broken" in result.failure
    with pytest.raises(ConfigurationError, match="scored by both rewards: look at what the other one needs"):
        await rescore([STEPS[0]], reward_function(lambda replies: None))

    @reward_function
    def away(replies: Sequence[Message]) -> float:
        raise RuntimeError("status 401")

    with pytest.raises(ConfigurationError, match=r"scored by both rewards: reward away failed: .*status 401"):
        await rescore([STEPS[0]], away)


async def test_a_reward_of_groups_gets_them_whole_and_statistics_move_after_each_step() -> None:
    class Seen(RewardFunction):
        scope = "group"
        local = True

        def __init__(self) -> None:
            self.log: list[Any] = []

        async def score(self, trajectory: Trajectory) -> RewardResult:
            raise AssertionError("asked about a group's members one by one")

        async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Any]:
            self.log.append((trajectories[0].scenario.id, len(trajectories)))
            return [RewardResult(score=float(place)) for place in range(len(trajectories))]

        def observe(self, results: Sequence[RewardResult]) -> None:
            self.log.append(len(results))

    seen = Seen()
    await rescore(STEPS, seen)
    assert seen.log == [("a", 3), ("b", 2), 5, ("c", 3), 3]


async def test_a_scenario_that_came_twice_in_a_step_is_two_groups(tmp_path: Path) -> None:
    first, second = group(2, "a", [0.0, 1.0]), group(2, "a", [0.5, 0.0])
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_rollouts(2, [first, second])
        tracker.log_rollouts(3, [group(3, "a", [1.0, 1.0])])
    steps = list(groups_of(RunLog(folder).rollouts()))
    assert [(step, [one.rewards for one in groups]) for step, groups in steps] == [
        (2, [[0.0, 1.0], [0.5, 0.0]]),
        (3, [[1.0, 1.0]]),
    ]
    result = await rescore(steps, num_words)
    assert (result.all.n, result.num_groups) == (6, 3)


@pytest.mark.parametrize(
    ("a", "b", "value"),
    [
        ([1, 2, 3, 4], [10, 20, 40, 30], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 1, 2, 3], [1, 2, 3, 3], 4 / 4.5),  # ranks 1.5 1.5 3 4 and 1 2 3.5 3.5
        ([1, 1], [1, 2], None),
        ([], [], None),
    ],
)
def test_ranks_are_correlated(a: list[float], b: list[float], value: float | None) -> None:
    found = rank_correlation(a, b)
    assert found == (value if value is None else pytest.approx(value))


def test_the_command_names_the_reward_as_a_file_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path)
    scenario = Scenario(id="x", family="sums", context={"answer": 4})
    members = [
        replace(trajectory("2 + 2?", text, scenario=scenario, member=place), reward=reward)
        for place, (text, reward) in enumerate([("Answer: 4", 0.0), ("Answer: 5, surely", 1.0)])
    ]
    with JsonlTracker(folder) as tracker:
        tracker.log_rollouts(0, [TrajectoryGroup(key="0/x", trajectories=tuple(members))])
    out = tmp_path / "rescored.json"
    assert main(["rescore", str(folder.path), "--reward", "correctness", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "change sign: 100.0% (1 to above 0, 1 to below)" in said
    assert "step 0, x, member 0: -1.00 -> +1.00, 0.000 -> 1.000" in said
    assert json.loads(out.read_text())["all"]["rank_correlation"] == -1.0
    argument = ["--reward", "{name: correctness, marker: null}", "--json"]
    assert main(["rescore", str(folder.path), *argument]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["new_mean"] == 0.0
    for wrong, told in (
        (["--reward", "corectness"], "did you mean 'correctness'?"),
        (["--reward", "correctness", "--stage", "test"], "--stage must be one of"),
        (["--reward", "correctness", "--stage", "after"], "has no conversation of stage 'after'"),
    ):
        assert main(["rescore", str(folder.path), *wrong]) == 1
        assert told in capsys.readouterr().err
