"""Countdown: reach a number from others with + - * /, each of them used at most once.

numbers 3 7 25 , target 46  ->  <answer> (25 - 3) * ... </answer>: many answers are right, so the expression
is checked and never evaluated as code.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from stateset_agents.answers.agreement import MAX_ANSWER
from stateset_agents.answers.expressions import read
from stateset_agents.answers.tokens import Unreadable, without_wrapping
from stateset_agents.answers.tree import Apply, Node, Number
from stateset_agents.environments.problems.environment import ProblemEnvironment
from stateset_agents.environments.problems.splits import Drawn, at_least, draw_scenarios
from stateset_agents.environments.problems.traces import Trace
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split


class CountdownProblems(ProblemEnvironment):
    """Numbers and a target that all of them reach.

        CountdownProblems(min_numbers=3, max_numbers=4)

    The difficulty is how many numbers are given; the target is none of them. Several answers are right, so
    `context["verdict"]` says that the environment tells.
    """

    def __init__(
        self,
        *,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 25,
        max_target: int = 99,
        num_train: int = 3000,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """`settings` are those of `ProblemEnvironment`."""
        at_least(2, min_numbers=min_numbers, max_number=max_number, max_target=max_target)
        at_least(1, num_train=num_train)
        if not min_numbers <= max_numbers <= 8:
            raise ConfigurationError(
                f"max_numbers must be from min_numbers, {min_numbers}, to 8, got {max_numbers!r}"
            )
        super().__init__(seed=seed, **settings)
        self._levels = range(min_numbers, max_numbers + 1)
        self._max_number = max_number
        self._max_target = max_target
        self._num_train = num_train

    def make(self, split: Split) -> Sequence[Scenario]:
        def draw(rng: random.Random, count: int) -> Drawn | None:
            numbers = [rng.randint(1, self._max_number) for _ in range(count)]
            steps, solution, target = _combined(rng, numbers)
            if not 0 < target <= self._max_target or target in numbers:
                return None
            listed = " ".join(map(str, numbers))
            key = f"{sorted(numbers)} {target}"
            return key, Scenario(
                id=f"countdown {listed} {target}",
                family=f"{count} numbers",
                opening=f"numbers {listed} , target {target} : use each at most once, with + - * /",
                context={
                    "verdict": "environment",
                    "numbers": numbers,
                    "target": target,
                    "difficulty": count,
                    "steps": steps,
                    "solution": solution,
                },
                split=split,
            )

        family = f"countdown up to {self._max_number} and {self._max_target}"
        return draw_scenarios(
            split, self._levels, draw, family=family, num_train=self._num_train, seed=self._seed
        )

    def judge(self, scenario: Scenario, answer: str) -> float:
        return float(reaches(answer, scenario.context["numbers"], scenario.context["target"]))

    def solve(self, scenario: Scenario) -> Trace:
        context = scenario.context
        return Trace(steps=tuple(context["steps"]), answer=str(context["solution"]), between=" ; ")


def _combined(rng: random.Random, numbers: Sequence[int]) -> tuple[list[str], str, int]:
    """A random way to join all numbers into one: its steps, its expression and its value; -1 for a step that
    is no positive whole number."""
    parts = [(value, str(value)) for value in numbers]
    steps = []
    while len(parts) > 1:
        (left, one), (right, other) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        sign = rng.choice("+-*/")
        value = _value(sign, Fraction(left), Fraction(right))
        if value is None or value.denominator != 1 or value <= 0:
            return [], "", -1
        steps.append(f"{left} {sign} {right} = {value}")
        parts.append((int(value), f"( {one} {sign} {other} )"))
    [(total, expression)] = parts
    return steps, expression[2:-2], total


def _value(sign: str, left: Fraction, right: Fraction) -> Fraction | None:
    match sign:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    return left / right if right else None


def reaches(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Is the answer an expression of these numbers, each used at most once, that is worth the target?

    >>> reaches("(7 - 3) * 5", [3, 5, 7], 20), reaches("20", [3, 5, 7], 20), reaches("5 * 5 - 5", [3, 5, 7],
    20) (True, False, False)
    """
    if len(answer) > MAX_ANSWER:
        return False
    try:
        tree = read(without_wrapping(answer), thousands=False)
    except Unreadable:
        return False
    used: Counter[int] = Counter()
    value = _worth(tree, Counter(numbers), used)
    return value == target and used <= Counter(numbers)


def _worth(node: Node, known: Counter[int], used: Counter[int]) -> Fraction | None:
    """The value of a tree of the four operations; None where another one, or another number, stands in it."""
    if isinstance(node, Number):
        number = int(node.value)
        if node.value != number or number not in known:
            return None
        used[number] += 1
        return node.value
    if not isinstance(node, Apply) or node.name not in ("+", "*", "/"):
        return None
    total: Fraction | None = None
    for place, part in enumerate(node.args):
        is_taken_off = node.name == "+" and place > 0 and isinstance(part, Apply) and part.name == "neg"
        value = _worth(part.args[0] if isinstance(part, Apply) and is_taken_off else part, known, used)
        if value is None:
            return None
        sign = "-" if is_taken_off else node.name
        total = value if total is None else _value(sign, total, value)
        if total is None:
            return None
    return total
