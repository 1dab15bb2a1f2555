"""Expressions to be computed, one operation at a time, on a scratchpad.

compute 2 + 3 * 4 - 1  ->  <think> 2 + 12 - 1 = 14 - 1 = 13 </think> <answer> 13 </answer>
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.environments.problems.environment import ProblemEnvironment
from stateset_agents.environments.problems.splits import Drawn, at_least, draw_scenarios
from stateset_agents.environments.problems.traces import Trace
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticProblems(ProblemEnvironment):
    """Sums, differences and products of small whole numbers.

        ArithmeticProblems(min_operations=2, max_operations=4)

    The difficulty is the number of operations, and so is the number of steps on the scratchpad: each rewrites
    the expression with one operation done, products first, from the left. No number on the way is negative or
    above `max_value`. A scenario's family is its difficulty, as "3 operations".
    """

    def __init__(
        self,
        *,
        min_operations: int = 2,
        max_operations: int = 4,
        max_operand: int = 9,
        max_value: int = 99,
        num_train: int = 3000,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """`settings` are those of `ProblemEnvironment`; `num_train` problems are as many of each
        difficulty."""
        at_least(1, min_operations=min_operations, max_operand=max_operand, num_train=num_train)
        at_least(max_operand, max_value=max_value)
        if max_operations < min_operations:
            raise ConfigurationError(
                f"max_operations must be at least min_operations, {min_operations}, got {max_operations!r}"
            )
        super().__init__(seed=seed, **settings)
        self._levels = range(min_operations, max_operations + 1)
        self._max_operand = max_operand
        self._max_value = max_value
        self._num_train = num_train

    def make(self, split: Split) -> Sequence[Scenario]:
        def draw(rng: random.Random, operations: int) -> Drawn | None:
            numbers = [rng.randint(1, self._max_operand) for _ in range(operations + 1)]
            signs = [rng.choice("+-*") for _ in range(operations)]
            expression = str(numbers[0]) + "".join(
                f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True)
            )
            steps = steps_of(expression)
            on_the_way = [int(part) for step in steps for part in step.split() if part not in _OPERATIONS]
            if min(on_the_way) < 0 or max(on_the_way) > self._max_value:
                return None
            context = {"answer": int(steps[-1]), "expression": expression, "difficulty": operations}
            return expression, Scenario(
                id=f"arithmetic {expression}",
                family=f"{operations} operation{'s' * (operations > 1)}",
                opening=f"compute {expression}",
                context=context,
                split=split,
            )

        family = f"arithmetic up to {self._max_operand} and {self._max_value}"
        return draw_scenarios(
            split, self._levels, draw, family=family, num_train=self._num_train, seed=self._seed
        )

    def solve(self, scenario: Scenario) -> Trace:
        context: Mapping[str, Any] = scenario.context
        return Trace(
            steps=tuple(steps_of(context["expression"])), answer=str(context["answer"]), between=" = "
        )


def steps_of(expression: str) -> list[str]:
    """The expression after each operation, products first.

    >>> steps_of("2 + 3 * 4 - 1")
    ['2 + 12 - 1', '14 - 1', '13']
    """
    parts = expression.split()
    steps = []
    while len(parts) > 1:
        place = parts.index("*") if "*" in parts else 1
        value = _OPERATIONS[parts[place]](int(parts[place - 1]), int(parts[place + 1]))
        parts[place - 1 : place + 2] = [str(value)]
        steps.append(" ".join(parts))
    return steps
