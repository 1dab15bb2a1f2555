"""Linear equations in one unknown, solved on a scratchpad.

solve 5 x + 3 = 2 x + 18  ->  <think> 5 x - 2 x = 18 - 3 ; 3 x = 18 - 3 ; 3 x = 15 ; x = 15 / 3 ; x = 5
</think> ...
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from stateset_agents.environments.problems.environment import ProblemEnvironment
from stateset_agents.environments.problems.splits import Drawn, at_least, draw_scenarios
from stateset_agents.environments.problems.traces import Trace
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split

_FAMILIES = {1: "x + b = c", 2: "a x + b = c", 3: "a x + b = c x + d"}


class EquationProblems(ProblemEnvironment):
    """Equations with a whole solution from 0 to `max_solution`.

        EquationProblems(max_level=2)

    Level 1 is x + b = c, level 2 is a x + b = c, level 3 is a x + b = c x + d; the scratchpads have two, four
    and five steps. The level is the difficulty, its shape the family.
    """

    def __init__(
        self,
        *,
        min_level: int = 1,
        max_level: int = 3,
        max_coefficient: int = 9,
        max_constant: int = 50,
        max_solution: int = 30,
        num_train: int = 3000,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """`settings` are those of `ProblemEnvironment`; `max_coefficient` is of a and c, `max_constant` of
        b."""
        at_least(1, min_level=min_level, max_level=max_level, num_train=num_train)
        at_least(1, max_constant=max_constant, max_solution=max_solution)
        at_least(3, max_coefficient=max_coefficient)
        if not min_level <= max_level <= max(_FAMILIES):
            raise ConfigurationError(
                f"levels must go up from 1 to at most {max(_FAMILIES)}, got {min_level} to {max_level}"
            )
        super().__init__(seed=seed, **settings)
        self._levels = range(min_level, max_level + 1)
        self._max_coefficient = max_coefficient
        self._max_constant = max_constant
        self._max_solution = max_solution
        self._num_train = num_train

    def make(self, split: Split) -> Sequence[Scenario]:
        def draw(rng: random.Random, level: int) -> Drawn:
            solution = rng.randint(0, self._max_solution)
            a = rng.randint(level, self._max_coefficient) if level > 1 else 1
            c = rng.randint(1, a - 2) if level > 2 else 0
            b = rng.choice((-1, 1)) * rng.randint(1, self._max_constant)
            numbers = (a, b, c, a * solution + b - c * solution)
            equation = _equation(*numbers)
            return equation, Scenario(
                id=f"equation {equation}",
                family=_FAMILIES[level],
                opening=f"solve {equation} for x",
                context={"answer": solution, "equation": list(numbers), "difficulty": level},
                split=split,
            )

        family = f"equations up to {self._max_coefficient}, {self._max_constant} and {self._max_solution}"
        return draw_scenarios(
            split, self._levels, draw, family=family, num_train=self._num_train, seed=self._seed
        )

    def solve(self, scenario: Scenario) -> Trace:
        steps = equation_steps(*scenario.context["equation"])
        return Trace(steps=tuple(steps), answer=str(scenario.context["answer"]), between=" ; ")


def _equation(a: int, b: int, c: int, d: int) -> str:
    """a x + b = c x + d, without what is 0 and without a factor 1."""
    right = f"{_times(c)}{_signed(d) if d else ''}" if c else str(d)
    return f"{_times(a)}{_signed(b)} = {right}"


def _times(factor: int) -> str:
    return "x" if factor == 1 else f"{factor} x"


def _signed(number: int) -> str:
    return f" {'-' if number < 0 else '+'} {abs(number)}"


def equation_steps(a: int, b: int, c: int, d: int) -> list[str]:
    """The way from a x + b = c x + d to the solution, which must be whole.

    >>> equation_steps(3, 5, 0, 20)
    ['3 x = 20 - 5', '3 x = 15', 'x = 15 / 3', 'x = 5']
    """
    moved = f"{d}{_signed(-b)}"
    steps = [f"{_times(a)} - {_times(c)} = {moved}"] if c else []
    factor, total = a - c, d - b
    steps += [f"{_times(factor)} = {moved}", f"{_times(factor)} = {total}"]
    if factor > 1:
        steps += [f"x = {total} / {factor}", f"x = {total // factor}"]
    return steps
