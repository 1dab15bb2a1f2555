"""A judge against a check: accuracy and Cohen's kappa, by published and hand-made numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from builders import trajectory
from chat_server import ChatServer

from stateset_agents.core.reward import reward_function
from stateset_agents.rewards.judge import JudgeReward, cohens_kappa, create_judge_reward, measure_agreement
from stateset_agents.rewards.verifiable import create_correctness_reward
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory


def test_kappa_is_agreement_beyond_chance() -> None:
    assert cohens_kappa(20, 5, 10, 15) == 0.4  # the textbook's grants: .7 observed, .5 by chance
    assert cohens_kappa(45, 15, 25, 15) == pytest.approx(0.1304, abs=5e-5)
    assert cohens_kappa(25, 35, 5, 35) == pytest.approx(0.2593, abs=5e-5)
    assert cohens_kappa(5, 0, 0, 5) == 1.0
    assert cohens_kappa(0, 5, 5, 0) == -1.0
    assert cohens_kappa(45, 45, 5, 5) == 0.0  # a judge that says yes in nine of ten, whatever it sees
    assert cohens_kappa(9, 0, 0, 0) is None
    assert cohens_kappa(0, 0, 0, 0) is None


def sums(rights: Sequence[bool], tries: int = 1) -> list[Trajectory]:
    return [
        trajectory(
            "2 + 2?",
            f"Answer: {4 if right else 5}",
            scenario=Scenario(id=f"s{place // tries}", context={"answer": 4}),
        )
        for place, right in enumerate(rights)
    ]


async def test_a_judge_over_the_wire_is_held_against_a_check() -> None:
    talks = sums([True] * 20 + [False] * 20)
    quirks = {3: "Score: 2", 25: "Score: 9", 26: "Score: 9", 30: "I cannot say."}
    order: list[str] = []

    def speak(prompt: str) -> str:
        order.append(prompt)
        place = len(order) - 1
        return quirks.get(place, "Score: 8" if '"Answer: 4"' in prompt else "Score: 1")

    async with ChatServer(speak=speak) as server:
        judge = create_judge_reward("Is it right?", url=server.url, model="m", max_concurrent=1)
        found = await measure_agreement(judge, create_correctness_reward(), talks)
    assert (found.both, found.only_judge, found.only_check, found.neither) == (19, 2, 1, 17)
    assert (found.n, found.num_unscored) == (39, 1)
    assert found.accuracy == pytest.approx(36 / 39)
    assert found.kappa == cohens_kappa(19, 2, 1, 17)
    low, high = found.accuracy_interval
    assert 0.79 < low < found.accuracy < high < 1
    assert found.kappa_interval is not None
    assert found.kappa is not None
    assert 0.59 < found.kappa_interval[0] < found.kappa < found.kappa_interval[1] <= 1
    json.dumps(found.summary())


async def test_a_judge_that_always_says_yes_agrees_by_accuracy_only() -> None:
    @reward_function
    def yes(replies: Sequence[Message]) -> float:
        return 1.0

    found = await measure_agreement(yes, create_correctness_reward(), sums([True] * 9 + [False]))
    assert (found.accuracy, found.kappa) == (0.9, 0.0)
    same = await measure_agreement(yes, yes, sums([True] * 3))
    assert (same.accuracy, same.kappa, same.kappa_interval) == (1.0, None, None)


async def test_conversations_of_one_scenario_are_drawn_together() -> None:
    @reward_function
    def by_scenario(scenario: Scenario) -> float:
        return float(int(scenario.id[1:]) % 2)

    @reward_function
    def first_half(scenario: Scenario) -> float:
        return float(int(scenario.id[1:]) < 8)

    apart = await measure_agreement(by_scenario, first_half, sums([True] * 16))
    together = await measure_agreement(by_scenario, first_half, sums([True] * 64, tries=4))
    assert together.accuracy == apart.accuracy
    assert together.accuracy_interval == apart.accuracy_interval  # four tries say no more than one


async def test_nothing_to_hold_against_is_one_line() -> None:
    with pytest.raises(ConfigurationError, match="no conversation has a verdict of judge and check"):
        await measure_agreement(
            create_correctness_reward(), create_correctness_reward(), [trajectory("a", "b")]
        )


async def test_why_nothing_has_a_verdict_is_told() -> None:
    def away(prompt: str) -> str:
        raise RuntimeError("status 401")

    with pytest.raises(ConfigurationError, match=r"judge and check: reward judge failed: .*status 401"):
        await measure_agreement(JudgeReward(away, "?"), create_correctness_reward(), sums([True]))
