"""The coding problems grade rightly: each solution passes, each mutant and what is by heart fails."""

from __future__ import annotations

import pytest
from builders import trajectory

from stateset_agents.environments.problems.coding import CodingProblems, Problem, coding_problems
from stateset_agents.rewards.code import CodeReward
from stateset_agents.rewards.reasoning import create_reasoning_reward
from stateset_agents.training.components import make_environment


async def score(problem: Problem, program: str) -> float | None:
    talk = trajectory(problem.prompt(), f"```python\n{program}\n```", context={"tests": problem.tests()})
    return (await CodeReward().score(talk)).score


@pytest.mark.parametrize("problem", coding_problems(), ids=lambda problem: problem.name)
async def test_the_solution_passes_and_each_mutant_fails(problem: Problem) -> None:
    assert await score(problem, problem.solution) == 1.0
    scores = [await score(problem, mutant) for mutant in problem.mutants]
    assert len(scores) >= 3
    assert all(found is not None and found < 1 for found in scores), scores


@pytest.mark.parametrize("problem", coding_problems(), ids=lambda problem: problem.name)
async def test_the_visible_cases_by_heart_score_nothing(problem: Problem) -> None:
    answers = {repr(case.given): case.expected for case in problem.visible}
    by_heart = (
        f"import sys\nprint({answers!r}[repr(sys.stdin.read())], end='')"
        if problem.entry_point is None
        else f"def {problem.entry_point}(*given): return {answers!r}[repr(given)]"
    )
    assert await score(problem, by_heart) == 0.0


def test_each_problem_is_a_scenario_that_shows_its_visible_cases_alone() -> None:
    environment = CodingProblems()
    splits = [environment.scenarios(split) for split in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [6, 2, 2]
    made = [scenario for split in splits for scenario in split]
    assert len({scenario.id for scenario in made}) == len(coding_problems())
    for scenario, problem in zip(made, coding_problems(), strict=True):
        for case in problem.visible:
            assert repr(case.expected) in scenario.opening
        for case in problem.hidden:
            shown = repr(case.given) if isinstance(case.given, str) else ", ".join(map(repr, case.given))
            assert f"({shown}) ==" not in scenario.opening
            assert f"{shown} ->" not in scenario.opening


async def test_the_solver_is_paid_for_format_and_tests_and_the_environment_gives_no_verdict() -> None:
    environment, reward = make_environment({"name": "coding"}), create_reasoning_reward()
    talks = []
    for scenario in environment.scenarios("test"):
        conversation = await environment.start(scenario, 0)
        solver = environment.honest_agent(scenario)
        assert (await conversation.step(solver.message)).terminated
        assert (await conversation.outcome()).success is None
        talks.append(trajectory(scenario.opening, solver.message, context=dict(scenario.context)))
    results = await reward.score_group(talks)
    assert [result.score for result in results] == [pytest.approx(1.1)] * 2
    for result in results:
        total = sum(weight * result.breakdown[name] for name, weight in reward.part_weights.items())
        assert total == pytest.approx(result.score)
