r"""Compares an answer to a maths problem with the true one.

>>> math_agreement(r"\frac{1}{2}", 0.5), math_agreement("41 or 42", 42), math_agreement("6 * 7", 42)
(True, False, False)

Rewards and environments call it. A wrong answer that is taken for right teaches, so that every rule errs on
the side of no: what cannot be read is not the answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, get_args

from stateset_agents.answers.exact import are_equal, rational
from stateset_agents.answers.expressions import read
from stateset_agents.answers.symbolic import symbolically_equal
from stateset_agents.answers.tokens import Unreadable, plain_text, without_wrapping
from stateset_agents.answers.tree import Ambiguous, Apply, Group, Node, Number, Symbol, power_of_ten
from stateset_agents.answers.units import is_neutral_unit, same_unit, unit_name
from stateset_agents.types.errors import ConfigurationError

Form = Literal["value", "expression"]
MAX_ANSWER = 200
"""Characters of an answer; a longer one is none."""
_MAX_TRUTH = 2_000


_Read = Node | str
"""A tree; or the words of an answer that is no mathematics: they are compared as they stand, without case but
for units (mW, MW)."""


@dataclass(frozen=True, slots=True)
class _Truth:
    """The right answer: one value, or all of several."""

    items: tuple[tuple[_Read, ...], ...]
    """The wordings of each value."""
    is_list: bool


def math_agreement(given: str, expected: object, *, form: Form = "value") -> bool:
    r"""True where `given` is the answer that is `expected`.

    Args:
        given: Answer, plain or LaTeX, in at most 200 characters: `42`, `1,250.5`, `\frac12`, `[1, 3)`.
        expected: A number, a text, or a list: then all its values are the answer, in any order, and a list in
            it holds wordings of one value. A text such as "1, 2" or "\{1, 2\}" is a list, too.
        form: `value`: the answer must be evaluated. Where the truth is a rational number nothing may stand in
            the answer but a sign, a decimal point, a power of ten (`1.5 \times 10^3`, 3 million) and a
            fraction bar that does not come out even, so that restating the problem (`12 \times 13`, `84/2`,
            `3!`) is no answer; where it is another expression,
            the answer must be written alike, but for the order of terms and factors. `expression`: any
            expression that is equal, decided exactly for polynomials, quotients and square roots, and where
            `math-verify` is installed by that for the rest, in a process with limits.

    Numbers are compared exactly: 0.333 is not 1/3, and 0.333... is. A unit of the truth must be the answer's,
    under any of its names, and is not converted; where the truth has none, the answer may have one that
    leaves the number as it is (18 and $18, not 18 % or 18 million). `5 m` is both five meters and five times
    m. `i` is the imaginary unit. Unicode's characters are read as what they show. What is no mathematics is
    compared word for word, without case.

    Raises ConfigurationError for an `expected` that is none of these; RewardTimeout where math-verify did not
    get to an answer for want of processor time, and ChildProcessError where something else ended its process:
    rewards ask again then, and never take it for a no.
    """
    if form not in get_args(Form):
        raise ConfigurationError(f"form must be value or expression, got {form!r:.60}")
    truth = _truth(_frozen(expected))
    text = given.strip()
    if not text or len(text) > MAX_ANSWER:
        return False
    answer = _read(text, thousands=not truth.is_list)
    if not truth.is_list:
        return any(_same(answer, wording, form) for wording in truth.items[0])
    return _same_members(_members(answer), truth.items, form)


def _frozen(expected: object) -> Any:
    """Hashable, so that a truth is read once; a number by its digits, so that 1 and 1.0 and True differ."""
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return tuple(_frozen(item) for item in expected)
    is_number = isinstance(expected, int | float | Fraction) and not isinstance(expected, bool)
    if is_number and math.isfinite(expected):  # type: ignore[arg-type]  # it is a number
        return str(expected)
    if isinstance(expected, str) and expected.strip() and len(expected) <= _MAX_TRUTH:
        return expected
    raise ConfigurationError(
        'context["answer"] must be a number, a text of at most '
        f"{_MAX_TRUTH} characters or a list of these, got {expected!r:.60}"
    )


def check_truth(expected: object, *, form: Form = "value", where: str = 'context["answer"]') -> None:
    """Raises ConfigurationError for a truth by which its own text would be wrong: one not evaluated."""
    if not _is_own_answer(_frozen(expected), form):
        raise ConfigurationError(
            f"{where}: its own answer {expected!r:.60} would be wrong: write it evaluated, in at most "
            f"{MAX_ANSWER} characters, or set form: expression"
        )


@lru_cache(maxsize=4096)
def _is_own_answer(expected: Any, form: Form) -> bool:
    if isinstance(expected, str) and len(expected.strip()) > MAX_ANSWER:
        return False
    wordings = [wording for item in _truth(expected).items for wording in item]
    return all(_same(wording, wording, form) for wording in wordings)


@lru_cache(maxsize=4096)
def _truth(expected: Any) -> _Truth:
    if isinstance(expected, tuple):
        if not expected:
            raise ConfigurationError('context["answer"] is an empty list: leave it out, or give the answer')
        return _Truth(tuple(_wordings(item) for item in expected), is_list=True)
    whole = _read(expected.strip(), thousands=True)
    items = _members(whole)
    is_list = len(items) > 1 or (isinstance(whole, Group) and whole.kind == "set")
    return _Truth(tuple((item,) for item in items), is_list=is_list)


def _wordings(item: Any) -> tuple[_Read, ...]:
    texts = item if isinstance(item, tuple) else (item,)
    if not texts or any(isinstance(text, tuple) for text in texts):
        raise ConfigurationError(
            f'an item of context["answer"] must be a value or its wordings, got {item!r:.60}'
        )
    return tuple(_read(text.strip(), thousands=True) for text in texts)


def _read(text: str, *, thousands: bool) -> _Read:
    text = without_wrapping(plain_text(text))
    try:
        return read(text, thousands=thousands)
    except Unreadable:
        text = " ".join(_WORD.sub(_folded, text).split()).rstrip(" !").lstrip(" .!")
        return text if text.endswith("..") else text.rstrip(" .!")


_WORD = re.compile(r"[^\W\d_]+")


def _folded(word: re.Match[str]) -> str:
    """Return the word without case, but where that would make another unit or another variable of it."""
    lower = word[0].casefold()
    is_symbol = len(lower) == 1 and not word.string.replace(" ", "").isalpha()
    return word[0] if is_symbol or (len(lower) < 4 and unit_name(lower) != unit_name(word[0])) else lower


def _members(answer: _Read) -> list[_Read]:
    """The values of an answer that stands for several: a list, a set, `3 \\pm 1`."""
    if isinstance(answer, Group) and answer.kind in ("list", "set"):
        return [member for item in answer.items for member in _members(item)]
    if isinstance(answer, Apply) and answer.name == "=" and _is_name(answer.args[0]):
        return [Apply("=", (answer.args[0], member)) for member in _members(answer.args[1])]  # type: ignore[arg-type]  # a tree's members are trees
    if isinstance(answer, Apply) and answer.name == "pm":
        middle, distance = answer.args
        minus = Apply("neg", (distance,))
        if middle == Number(Fraction(0)):
            return [distance, minus]
        return [Apply("+", (middle, distance)), Apply("+", (middle, minus))]
    return [answer]


def _is_name(node: Node) -> bool:
    """`x`, or `f(x)`, which reads as a product."""
    if isinstance(node, Apply) and node.name == "*":
        return all(isinstance(factor, Symbol) for factor in node.args)
    return isinstance(node, Symbol)


def _same_members(answers: Sequence[_Read], truths: Sequence[Sequence[_Read]], form: Form) -> bool:
    """True where each true value, in any of its wordings, has one given value of its own, in any order."""
    left = list(answers)
    if len(left) != len(truths):
        return False
    for wordings in truths:
        match = next((item for item in left if any(_same(item, word, form) for word in wordings)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same(answer: _Read, truth: _Read, form: Form) -> bool:
    if isinstance(answer, str) or isinstance(truth, str):
        return answer == truth and bool(truth)
    answer, truth = _without_names(answer, truth)
    if isinstance(answer, Ambiguous) or isinstance(truth, Ambiguous):
        return _same_ambiguous(answer, truth, form)
    answer, given_unit = _unit(answer)
    truth, true_unit = _unit(truth)
    is_same_unit = same_unit(given_unit, true_unit)
    if not is_same_unit and (true_unit or not is_neutral_unit(given_unit)):
        return False
    if isinstance(answer, Group) or isinstance(truth, Group):
        return _same_group(answer, truth, form)
    if isinstance(answer, Apply) and isinstance(truth, Apply) and _are_relations(answer.name, truth.name):
        return _same_relation(answer, truth, form)
    if form == "value":
        value = rational(truth)
        if value is not None:
            return evaluated(answer) == value
        return bool(_written(answer) == _written(truth))
    equal = are_equal(answer, truth)
    if equal is None and _written(answer) == _written(truth):
        return True
    return bool(symbolically_equal(answer, truth) if equal is None else equal)


def _same_ambiguous(answer: Node, truth: Node, form: Form) -> bool:
    """`5 m` is what `5 meters` is, and what `m * 5` is. Two that may be quantities are: mg is no gm."""
    if isinstance(answer, Ambiguous) and isinstance(truth, Ambiguous):
        return _same(answer.quantity, truth.quantity, form)
    if isinstance(truth, Ambiguous):
        return _same(answer, truth.quantity, form) or _same(answer, truth.product, form)
    assert isinstance(answer, Ambiguous)  # or the truth would be
    is_quantity = answer.is_spaced or bool(_unit(truth)[1])
    return (is_quantity and _same(answer.quantity, truth, form)) or _same(answer.product, truth, form)


def _without_names(answer: Node, truth: Node) -> tuple[Node, Node]:
    """`x = 3` against 3, and `x \\in [1, 2]` against the interval: the name is left out, unless they
    differ."""
    named = ("=", "in")
    sides = [
        node.args if isinstance(node, Apply) and node.name in named and _is_name(node.args[0]) else None
        for node in (answer, truth)
    ]
    if sides[0] is not None and sides[1] is not None and sides[0][0] != sides[1][0]:
        return answer, truth
    return (answer if sides[0] is None else sides[0][1]), (truth if sides[1] is None else sides[1][1])


def _are_relations(answer: str, truth: str) -> bool:
    """True for two operations of the same name that have sides and no value."""
    return answer == truth and (truth in ("=", "!=", "in", "union", "base") or truth.startswith("<"))


def _unit(node: Node) -> tuple[Node, str]:
    if isinstance(node, Apply) and node.name == "unit" and isinstance(node.args[1], Symbol):
        return node.args[0], node.args[1].name
    return node, ""


def _same_group(answer: Node, truth: Node, form: Form) -> bool:
    if not isinstance(answer, Group) or not isinstance(truth, Group):
        return False
    if answer.kind != truth.kind or len(answer.items) != len(truth.items):
        return False
    if truth.kind in ("set", "list"):
        return _same_members(answer.items, [(item,) for item in truth.items], form)
    return all(_same(one, other, form) for one, other in zip(answer.items, truth.items, strict=True))


def _same_relation(answer: Apply, truth: Apply, form: Form) -> bool:
    if len(answer.args) != len(truth.args):
        return False
    orders = [answer.args]
    if answer.name in ("=", "!=", "union"):
        orders.append(answer.args[::-1])
    return any(
        all(_same(one, other, form) for one, other in zip(order, truth.args, strict=True)) for order in orders
    )


def evaluated(node: Node) -> Fraction | None:
    """The value of a number that is written out: a sign, digits, a fraction bar that does not come out even,
    a mixed number; None for anything that is still to be computed."""
    if isinstance(node, Apply) and node.name in ("neg", "pos"):
        inner = _unsigned(node.args[0])
        return None if inner is None else (-inner if node.name == "neg" else inner)
    if isinstance(node, Apply) and node.name == "/":
        (above, signed_above), (below, signed_below) = (_without_minus(part) for part in node.args)
        if signed_above != signed_below:
            value = _unsigned(Apply("/", (above, below)))
            return None if value is None else -value
    return _unsigned(node)


def _without_minus(node: Node) -> tuple[Node, bool]:
    is_negative = isinstance(node, Apply) and node.name == "neg"
    return (node.args[0] if isinstance(node, Apply) and is_negative else node), is_negative


def _unsigned(node: Node) -> Fraction | None:
    if isinstance(node, Number):
        return node.value
    if not isinstance(node, Apply):
        return None
    if node.name == "scaled":
        size, factor = _unsigned(node.args[0]), node.args[1]
        return size * factor.value if size is not None and isinstance(factor, Number) else None
    if node.name == "^":
        exponent = power_of_ten(node)
        return Fraction(10) ** exponent if exponent not in (None, 0, 1) else None
    if node.name == "mixed":
        whole, part = node.args
        return whole.value + part.value if isinstance(whole, Number) and isinstance(part, Number) else None
    if node.name == "/":
        above, below = node.args
        if isinstance(above, Number) and isinstance(below, Number) and below.value:
            value = above.value / below.value
            is_whole = above.value.denominator == below.value.denominator == 1
            if is_whole and value.denominator != 1:  # one that comes out even is a division not done
                return value
    return None


def _written(node: Node) -> Any:
    """Return how an expression is written, but for the order of terms and factors: `1 + x` is as `x + 1`."""
    value = evaluated(node)
    if value is not None:
        return ("number", value)
    if isinstance(node, Symbol):
        return ("symbol", node.name)
    if isinstance(node, Group):
        return (node.kind, *(_written(item) for item in node.items))
    if isinstance(node, Ambiguous):
        return _written(node.product)
    assert isinstance(node, Apply)  # numbers are evaluated
    if node.name == "pos":
        return _written(node.args[0])
    if node.name == "+":
        return ("+", *sorted((_written(term) for term in node.args), key=repr))
    if node.name in ("*", "/", "neg", "pos"):
        number, above, below = _factors(node)
        return ("*", number, tuple(sorted(above, key=repr)), tuple(sorted(below, key=repr)))
    return (node.name, *(_written(argument) for argument in node.args))


def _factors(node: Node) -> tuple[Fraction, list[Any], list[Any]]:
    """Sign and number of a product, its factors, and those that it is divided by. Only one number is taken
    out of either side: others are a product that was not computed."""
    value = evaluated(node)
    if value is not None:
        return value, [], []
    if isinstance(node, Apply) and node.name in ("neg", "pos"):
        number, above, below = _factors(node.args[0])
        return (-number if node.name == "neg" else number), above, below
    if isinstance(node, Apply) and node.name in ("*", "/"):
        total, over, under = Fraction(1), list[Any](), list[Any]()
        for place, part in enumerate(node.args):
            number, above, below = _factors(part)
            is_divisor = node.name == "/" and place == 1
            if is_divisor:
                above, below = below, above
            if number == 0 or (
                abs(number) != 1 and abs(total) != 1 and not (is_divisor and number.denominator == 1)
            ):
                (under if is_divisor else over).append(("number", number))
            else:
                total = total / number if is_divisor else total * number
            over, under = over + above, under + below
        return total, over, under
    return Fraction(1), [_written(node)], []
