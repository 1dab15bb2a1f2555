"""Expressions to be computed, one operation at a time, on a scratchpad.

compute 2 + 3 * 4 - 1  ->  <think> 2 + 12 - 1 = 14 - 1 = 13 </think> <answer> 13 </answer>
"""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from stateset_agents.answers.agreement import MAX_ANSWER
from stateset_agents.answers.expressions import read
from stateset_agents.answers.tokens import Unreadable, without_wrapping
from stateset_agents.answers.tree import Apply, Node, Number
from stateset_agents.environments.problems.environment import (
    Drawn,
    DrawnProblems,
    Trace,
    at_least,
)
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.settings import expect_that

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class ArithmeticProblems(DrawnProblems):
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
        **settings: Any,
    ) -> None:
        """`settings` are those of `DrawnProblems`."""
        at_least(1, min_operations=min_operations, max_operand=max_operand)
        at_least(max_operand, max_value=max_value)
        rule = f"be at least min_operations, {min_operations}"
        expect_that(max_operations >= min_operations, "max_operations", rule, max_operations)
        super().__init__(
            levels=range(min_operations, max_operations + 1),
            family=f"arithmetic up to {max_operand} and {max_value}",
            **settings,
        )
        self._max_operand = max_operand
        self._max_value = max_value

    def draw(self, rng: random.Random, level: int, split: Split) -> Drawn | None:
        numbers = [rng.randint(1, self._max_operand) for _ in range(level + 1)]
        signs = [rng.choice("+-*") for _ in range(level)]
        expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
        steps = steps_of(expression)
        on_the_way = [int(part) for step in steps for part in step.split() if part not in _OPERATIONS]
        if min(on_the_way) < 0 or max(on_the_way) > self._max_value:
            return None
        return expression, Scenario(
            id=f"arithmetic {expression}",
            family=f"{level} operation{'s' * (level > 1)}",
            opening=f"compute {expression}",
            context={"answer": int(steps[-1]), "expression": expression, "difficulty": level},
            split=split,
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


# solve 5 x + 3 = 2 x + 18  ->  5 x - 2 x = 18 - 3 ; 3 x = 18 - 3 ; 3 x = 15 ; x = 15 / 3 ; x = 5

_FAMILIES = {1: "x + b = c", 2: "a x + b = c", 3: "a x + b = c x + d"}


class EquationProblems(DrawnProblems):
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
        **settings: Any,
    ) -> None:
        """`settings` are those of `DrawnProblems`; `max_coefficient` is of a and c, `max_constant` of b."""
        at_least(1, min_level=min_level, max_level=max_level)
        at_least(1, max_constant=max_constant, max_solution=max_solution)
        at_least(3, max_coefficient=max_coefficient)
        if not min_level <= max_level <= max(_FAMILIES):
            raise ConfigurationError(
                f"levels must go up from 1 to at most {max(_FAMILIES)}, got {min_level} to {max_level}"
            )
        super().__init__(
            levels=range(min_level, max_level + 1),
            family=f"equations up to {max_coefficient}, {max_constant} and {max_solution}",
            **settings,
        )
        self._max_coefficient = max_coefficient
        self._max_constant = max_constant
        self._max_solution = max_solution

    def draw(self, rng: random.Random, level: int, split: Split) -> Drawn:
        solution = rng.randint(0, self._max_solution)
        a = rng.randint(level, self._max_coefficient) if level > 1 else 1
        c = rng.randint(1, a - 2) if level > 2 else 0
        b = rng.choice((-1, 1)) * rng.randint(1, self._max_constant)
        d = a * solution + b - c * solution
        # a x + b = c x + d, without what is 0 and without a factor 1
        right = f"{_times(c)}{_signed(d) if d else ''}" if c else str(d)
        equation = f"{_times(a)}{_signed(b)} = {right}"
        return equation, Scenario(
            id=f"equation {equation}",
            family=_FAMILIES[level],
            opening=f"solve {equation} for x",
            context={"answer": solution, "equation": [a, b, c, d], "difficulty": level},
            split=split,
        )

    def solve(self, scenario: Scenario) -> Trace:
        steps = equation_steps(*scenario.context["equation"])
        return Trace(steps=tuple(steps), answer=str(scenario.context["answer"]), between=" ; ")


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


# numbers 3 7 25 , target 46  ->  (25 - 3) * ...: many answers are right; an answer is never evaluated as code


class CountdownProblems(DrawnProblems):
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
        **settings: Any,
    ) -> None:
        """`settings` are those of `DrawnProblems`."""
        at_least(2, min_numbers=min_numbers, max_number=max_number, max_target=max_target)
        is_range = min_numbers <= max_numbers <= 8
        expect_that(is_range, "max_numbers", f"be from min_numbers, {min_numbers}, to 8", max_numbers)
        super().__init__(
            levels=range(min_numbers, max_numbers + 1),
            family=f"countdown up to {max_number} and {max_target}",
            **settings,
        )
        self._max_number = max_number
        self._max_target = max_target

    def draw(self, rng: random.Random, level: int, split: Split) -> Drawn | None:
        numbers = [rng.randint(1, self._max_number) for _ in range(level)]
        steps, solution, target = _combined(rng, numbers)
        if not 0 < target <= self._max_target or target in numbers:
            return None
        listed = " ".join(map(str, numbers))
        return f"{sorted(numbers)} {target}", Scenario(
            id=f"countdown {listed} {target}",
            family=f"{level} numbers",
            opening=f"numbers {listed} , target {target} : use each at most once, with + - * /",
            context={
                "verdict": "environment",
                "numbers": numbers,
                "target": target,
                "difficulty": level,
                "steps": steps,
                "solution": solution,
            },
            split=split,
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
        (left, left_text), (right, right_text) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        sign = rng.choice("+-*/")
        value = _value(sign, Fraction(left), Fraction(right))
        if value is None or value.denominator != 1 or value <= 0:
            return [], "", -1
        steps.append(f"{left} {sign} {right} = {value}")
        parts.append((int(value), f"( {left_text} {sign} {right_text} )"))
    [(total, expression)] = parts
    return steps, expression[2:-2], total


def _value(sign: str, left: Fraction, right: Fraction) -> Fraction | None:
    if sign == "/":
        return left / right if right else None
    return Fraction(_OPERATIONS[sign](left, right))


def reaches(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Tells whether the answer is an expression of these numbers, each used at most once, worth the target.

    >>> reaches("(7 - 3) * 5", [3, 5, 7], 20), reaches("20", [3, 5, 7], 20), reaches("5 * 5 - 5", [3, 5, 7],
    20) (True, False, False)
    """
    if len(answer) > MAX_ANSWER:
        return False
    try:
        tree = read(without_wrapping(answer), thousands=False)
    except Unreadable:
        return False
    uses: Counter[int] = Counter()
    value = _worth(tree, Counter(numbers), uses)
    return value == target and uses <= Counter(numbers)


def _worth(node: Node, numbers: Counter[int], uses: Counter[int]) -> Fraction | None:
    """The value of a tree of the four operations; None where another one, or another number, stands in it."""
    if isinstance(node, Number):
        number = int(node.value)
        if node.value != number or number not in numbers:
            return None
        uses[number] += 1
        return node.value
    if not isinstance(node, Apply) or node.name not in ("+", "*", "/"):
        return None
    total: Fraction | None = None
    for index, part in enumerate(node.args):
        is_taken_off = node.name == "+" and index > 0 and isinstance(part, Apply) and part.name == "neg"
        value = _worth(part.args[0] if isinstance(part, Apply) and is_taken_off else part, numbers, uses)
        if value is None:
            return None
        sign = "-" if is_taken_off else node.name
        total = value if total is None else _value(sign, total, value)
        if total is None:
            return None
    return total
