"""The coding problems grade rightly: each solution passes, each mutant and what is by heart fails."""

from __future__ import annotations

import pytest
from builders import trajectory

from stateset_agents.environments.problems.coding import PROBLEMS, Problem, scenarios
from stateset_agents.rewards.code import CodeReward


async def score(problem: Problem, program: str) -> float | None:
    talk = trajectory(problem.prompt(), f"```python\n{program}\n```", context={"tests": problem.tests()})
    return (await CodeReward().score(talk)).score


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
async def test_the_solution_passes_and_each_mutant_fails(problem: Problem) -> None:
    assert await score(problem, problem.solution) == 1.0
    scores = [await score(problem, mutant) for mutant in problem.mutants]
    assert len(scores) >= 3
    assert all(found is not None and found < 1 for found in scores), scores


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
async def test_the_visible_cases_by_heart_score_nothing(problem: Problem) -> None:
    answers = {repr(case.given): case.expected for case in problem.visible}
    by_heart = (
        f"import sys\nprint({answers!r}[repr(sys.stdin.read())], end='')"
        if problem.entry_point is None
        else f"def {problem.entry_point}(*given): return {answers!r}[repr(given)]"
    )
    assert await score(problem, by_heart) == 0.0


def test_each_problem_is_a_scenario_that_shows_its_visible_cases_alone() -> None:
    made = scenarios("test")
    assert len(made) == len(PROBLEMS) == len({scenario.id for scenario in made})
    for scenario, problem in zip(made, PROBLEMS, strict=True):
        assert scenario.split == "test"
        for case in problem.visible:
            assert repr(case.expected) in scenario.opening
        for case in problem.hidden:
            shown = repr(case.given) if isinstance(case.given, str) else ", ".join(map(repr, case.given))
            assert f"({shown}) ==" not in scenario.opening
            assert f"{shown} ->" not in scenario.opening
