"""Exact arithmetic on what `expressions.read` gave: is one expression equal to another?

An expression becomes a quotient of two polynomials with rational coefficients. Its atoms are symbols, pi,
square roots of primes and i, that of -1 (which are linearly independent over the rationals, so that the form
is unique), and functions of such expressions. Sizes are bounded before anything is computed: towers of powers
and huge factorials are undecided, never tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

from stateset_agents.answers.tree import Ambiguous, Apply, Node, Number, Symbol

MAX_TERMS = 200
MAX_PRODUCTS = 10_000
"""Number of products of terms in one multiplication."""
MAX_POWER = 40
MAX_DIGITS = 400
"""Number of digits of a coefficient."""
MAX_FACTORIAL = 30
MAX_RADICAND = 10**10
"""Largest number whose root is split into primes."""


class Undecided(ArithmeticError):
    """Beyond these means: too large, undefined, or of a kind that is not known here."""


class Undefined(Undecided):
    """The expression has no value, so it is equal to nothing."""


Atom = tuple[str, str]
"""Kind and name: ("symbol", "x"), ("root", "2"), ("function", "...")."""
Monomial = tuple[tuple[Atom, int], ...]
Polynomial = Mapping[Monomial, Fraction]

_ONE: Polynomial = {(): Fraction(1)}


@dataclass(frozen=True, slots=True)
class Quotient:
    """above / below; below is not 0."""

    above: Polynomial
    below: Polynomial

    @property
    def is_conclusive(self) -> bool:
        """True where different polynomials mean different values. Functions hold identities that are not
        known here."""
        atoms = (atom for side in (self.above, self.below) for monomial in side for atom, _ in monomial)
        return all(kind != "function" for kind, _ in atoms)


def are_equal(left: Node, right: Node) -> bool | None:
    """True where two expressions are equal wherever both are defined; None where that is not decided here."""
    try:
        one, other = quotient_of(left), quotient_of(right)
        same = _times(one.above, other.below) == _times(other.above, one.below)
    except Undefined:
        return False
    except Undecided:
        return None
    return True if same else (False if one.is_conclusive and other.is_conclusive else None)


def rational(node: Node) -> Fraction | None:
    """The value of an expression that is a rational number; None for any other, or one too large."""
    try:
        return _constant(quotient_of(node))
    except Undecided:
        return None


def quotient_of(node: Node) -> Quotient:
    """The expression as a quotient of polynomials; raises Undecided."""
    if isinstance(node, Number):
        return _number(node.value)
    if isinstance(node, Symbol):
        if node.name == "oo":
            raise Undecided("infinity is no number")
        return _atom(("root", "-1") if node.name == "i" else ("symbol", node.name))
    if isinstance(node, Ambiguous):
        return quotient_of(node.product)
    if not isinstance(node, Apply):
        raise Undecided("several values")
    match node.name:
        case "^":
            return _power(quotient_of(node.args[0]), _exponent(node.args[1]))
        case "!":
            return _number(_factorial(rational(node.args[0])))
        case "sqrt":
            return _root(quotient_of(node.args[0]), 2)
        case "root":
            degree = rational(node.args[1])
            if degree is None or degree.denominator != 1 or not 2 <= degree <= MAX_POWER:
                raise Undecided("the degree of a root")
            return _root(quotient_of(node.args[0]), int(degree))
    arguments = [quotient_of(argument) for argument in node.args]
    match node.name:
        case "+" | "mixed":
            return reduce(_sum, arguments)
        case "neg":
            return _product(_number(Fraction(-1)), arguments[0])
        case "pos":
            return arguments[0]
        case "*" | "scaled":
            return reduce(_product, arguments)
        case "/":
            return _product(arguments[0], _inverse(arguments[1]))
        case "abs":
            inner = _constant(arguments[0])
            if inner is not None:
                return _number(abs(inner))
            return _function("abs", arguments)
        case name if name in ("=", "!=", "in", "union", "pm", "unit", "base") or name.startswith("<"):
            raise Undecided(f"{name} has no single value")
        case name:
            return _function(name, arguments)


def _number(value: Fraction) -> Quotient:
    if _digits(value) > MAX_DIGITS:
        raise Undecided("a number with too many digits")
    return Quotient({(): value} if value else {}, _ONE)


def _digits(value: Fraction) -> float:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) * math.log10(2)


def _atom(atom: Atom) -> Quotient:
    return Quotient({((atom, 1),): Fraction(1)}, _ONE)


def _function(name: str, arguments: list[Quotient]) -> Quotient:
    """An atom by its arguments' normal forms: equal forms are the same value, others may be."""
    inside = []
    for argument in arguments:
        divisor = _only_constant(argument.below)
        if divisor is None:
            raise Undecided("a function of a quotient")
        inside.append(
            sorted((repr(monomial), factor / divisor) for monomial, factor in argument.above.items())
        )
    return _atom(("function", f"{name} {inside}"))


def _constant(quotient: Quotient) -> Fraction | None:
    above, below = _only_constant(quotient.above), _only_constant(quotient.below)
    return None if above is None or below is None else above / below


def _only_constant(polynomial: Polynomial) -> Fraction | None:
    if not polynomial:
        return Fraction(0)
    return polynomial.get(()) if len(polynomial) == 1 else None


def _sum(left: Quotient, right: Quotient) -> Quotient:
    if left.below == right.below:
        return Quotient(_plus(left.above, right.above), left.below)
    above = _plus(_times(left.above, right.below), _times(right.above, left.below))
    return Quotient(above, _times(left.below, right.below))


def _product(left: Quotient, right: Quotient) -> Quotient:
    return Quotient(_times(left.above, right.above), _times(left.below, right.below))


def _inverse(quotient: Quotient) -> Quotient:
    if not quotient.above:
        raise Undefined("division by 0")
    return Quotient(quotient.below, quotient.above)


def _plus(left: Polynomial, right: Polynomial) -> Polynomial:
    total = dict(left)
    for monomial, factor in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + factor
    return _bounded(total)


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(left) * len(right) > MAX_PRODUCTS:
        raise Undecided("too many terms")
    total: dict[Monomial, Fraction] = {}
    for one, factor in left.items():
        for other, second in right.items():
            monomial, extra = _joined(one, other)
            total[monomial] = total.get(monomial, Fraction(0)) + factor * second * extra
    return _bounded(total)


def _bounded(polynomial: Mapping[Monomial, Fraction]) -> Polynomial:
    terms = {monomial: factor for monomial, factor in polynomial.items() if factor}
    if len(terms) > MAX_TERMS or any(_digits(factor) > MAX_DIGITS for factor in terms.values()):
        raise Undecided("too many terms or digits")
    return terms


def _joined(left: Monomial, right: Monomial) -> tuple[Monomial, Fraction]:
    """The product of two monomials, and the number that roots of primes multiply to."""
    powers = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    extra = Fraction(1)
    for atom, power in powers.items():
        if atom[0] == "root" and power > 1:
            extra *= Fraction(int(atom[1])) ** (power // 2)
            powers[atom] = power % 2
    return tuple(sorted((atom, power) for atom, power in powers.items() if power)), extra


def _exponent(node: Node) -> Fraction:
    """Only small whole numbers and halves; asked before the base is looked at, so that no tower is built."""
    value = rational(node)
    if value is None or abs(value) > MAX_POWER or value.denominator not in (1, 2):
        raise Undecided("an exponent that is no small number")
    return value


def _power(base: Quotient, exponent: Fraction) -> Quotient:
    if exponent < 0:
        base, exponent = _inverse(base), -exponent
    if exponent == 0 and not base.above:
        raise Undefined("0 to the power of 0")
    constant = _constant(base)
    if constant is not None and _digits(constant) * exponent > MAX_DIGITS:
        raise Undecided("a power with too many digits")
    value = _number(Fraction(1))
    for _ in range(int(exponent)):
        value = _product(value, base)
    return _product(value, _root(base, 2)) if exponent.denominator == 2 else value


def _root(base: Quotient, degree: int) -> Quotient:
    """Return the principal root of a number, which is not negative but under a square root."""
    value = _constant(base)
    if value is not None and value < 0 and degree == 2:
        return _product(_atom(("root", "-1")), _root(_number(-value), 2))
    if value is None or value < 0:
        raise Undecided("a root of something that is no positive number")
    whole = value.numerator * value.denominator ** (degree - 1)  # root(p / q) = root(p q^(n-1)) / q
    if whole > MAX_RADICAND:
        raise Undecided("a root of a large number")
    outside, inside = Fraction(1, value.denominator), 1
    atoms: dict[Atom, int] = {}
    for prime, power in _factors(whole).items():
        outside *= prime ** (power // degree)
        if power % degree and degree == 2:
            atoms[("root", str(prime))] = 1
        inside *= prime ** (power % degree)
    if not whole:
        return _number(Fraction(0))
    if inside > 1 and degree != 2:
        atoms[("function", f"root {degree} {inside}")] = 1
    return Quotient({tuple(sorted(atoms.items())): outside}, _ONE)


def _factors(number: int) -> dict[int, int]:
    powers: dict[int, int] = {}
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            powers[divisor] = powers.get(divisor, 0) + 1
            number //= divisor
        divisor += 1
    if number > 1:
        powers[number] = powers.get(number, 0) + 1
    return powers


def _factorial(value: Fraction | None) -> Fraction:
    if value is None or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise Undecided("a factorial of no small number")
    return Fraction(math.factorial(int(value)))
