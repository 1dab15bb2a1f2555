"""Small programming problems with hidden tests, and `CodingProblems`, their environment."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stateset_agents.environments.problems.environment import ProblemEnvironment, Trace
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.scenario import Scenario, Split


class Case(NamedTuple):
    """An input and the expected output."""

    given: tuple[Any, ...] | str
    """Arguments, or the text of stdin."""
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A task, how it is graded, and programs with known grades."""

    name: str
    task: str
    entry_point: str | None
    """The function's name; None: the program reads stdin."""
    visible: tuple[Case, ...]
    """Cases that the prompt shows; they score nothing."""
    hidden: tuple[Case, ...]
    solution: str
    mutants: Sequence[str] = field(repr=False)
    """Wrong programs; each fails a hidden case."""

    def prompt(self) -> str:
        """The task as the agent reads it."""
        instruction = (
            f"Write a Python function `{self.entry_point}`. {self.task}"
            if self.entry_point
            else f"Write a Python program that reads from standard input and prints. {self.task}"
        )
        examples = "\n".join(self._example(case) for case in self.visible)
        return f"{instruction}\n\nExamples:\n{examples}\n\nAnswer with one block of Python."

    def _example(self, case: Case) -> str:
        if self.entry_point is None:
            return f"{case.given!r} -> {case.expected!r}"
        return f"{self.entry_point}({', '.join(map(repr, case.given))}) == {case.expected!r}"

    def tests(self) -> dict[str, Any]:
        """The tests as a scenario's `context["tests"]` has them."""
        key = "stdin" if self.entry_point is None else "arguments"
        cases = [
            {key: case.given, "expected": case.expected, "visible": case in self.visible}
            for case in (*self.visible, *self.hidden)
        ]
        name = {} if self.entry_point is None else {"entry_point": self.entry_point}
        return {**name, "cases": cases}


@functools.cache
def coding_problems() -> tuple[Problem, ...]:
    """The problems of `coding.yaml`."""

    def cases(pairs: Sequence[Any]) -> tuple[Case, ...]:
        return tuple(
            Case(args if isinstance(args, str) else tuple(args), expected) for args, expected in pairs
        )

    problems = read_yaml(Path(__file__).with_name("coding.yaml"))
    return tuple(
        Problem(**{**problem, "visible": cases(problem["visible"]), "hidden": cases(problem["hidden"])})
        for problem in problems
    )


class CodingProblems(ProblemEnvironment):
    """The ten problems: six to train on, two for validation, two for the test.

    Whether a program is right the reward tells, by the hidden tests (`reward: code`, or `reasoning`, which
    also pays for the format); the environment gives no verdict.
    """

    answer_between = ("<answer>\n```python\n", "\n```\n</answer>")

    def make(self, split: Split) -> Sequence[Scenario]:
        return [
            Scenario(
                id=f"coding/{problem.name.replace(' ', '-')}",
                family="coding",
                opening=problem.prompt(),
                context={"tests": problem.tests()},
                split=split,
            )
            for problem in coding_problems()[_PLACES[split]]
        ]

    def judge(self, scenario: Scenario, answer: str) -> float | None:
        return None

    def solve(self, scenario: Scenario) -> Trace:
        [problem] = [problem for problem in coding_problems() if problem.prompt() == scenario.opening]
        thought = "A function" if problem.entry_point else "A program"
        steps = (f"{thought} is asked for.", problem.task)
        return Trace(steps=steps, answer=f"\n```python\n{problem.solution.strip()}\n```\n")


_PLACES: Mapping[Split, slice] = {"train": slice(6), "validation": slice(6, 8), "test": slice(8, None)}
