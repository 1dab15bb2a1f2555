"""The tree that an answer is read into: numbers, symbols, operations, sets, tuples and intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    """Digits, with or without a decimal point."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """A letter, a Greek one by its name, `pi`, `oo`; with its index: `x_1`."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation: + * / ^ neg pos pm sqrt root mixed scaled abs ! = < <= != union base unit, or a function.

    `scaled` is a number times a power of ten, or 3 million; `< <=` is 1 < x ≤ 3.
    """

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Several values: `list` (no brackets), `set`, `ratio`, `matrix`, `determinant`, `norm`, `row`, or by
    their brackets, as `[)`."""

    kind: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """`5 m`: five times m, or five meters. Inside of an expression it is the product."""

    product: Node
    quantity: Node
    is_spaced: bool
    """`42 m` is a number with its unit, where `42m` or `42 K` may also be 42 million, or 42 thousand."""


Node = Number | Symbol | Apply | Group | Ambiguous


def power_of_ten(node: Node) -> int | None:
    """The exponent of 10^-3; None for anything else, and beyond three digits."""
    if not isinstance(node, Apply) or node.name != "^" or node.args[0] != Number(Fraction(10)):
        return None
    exponent, sign = node.args[1], 1
    if isinstance(exponent, Apply) and exponent.name in ("neg", "pos"):
        sign = -1 if exponent.name == "neg" else 1
        exponent = exponent.args[0]
    if not isinstance(exponent, Number) or exponent.value.denominator != 1 or exponent.value >= 1000:
        return None
    return sign * int(exponent.value)


def holds_letter(node: Node) -> bool:
    """True where a letter is in it that is no pi."""
    if isinstance(node, Symbol):
        return node.name not in ("pi", "oo")
    if isinstance(node, Apply):
        return any(map(holds_letter, node.args))
    return not isinstance(node, Number)


def inside_unit(node: Node, change: Callable[[Node], Node]) -> Node:
    """The change done to the number: of -5 m the sign is the 5's."""
    if isinstance(node, Ambiguous):
        return replace(node, product=change(node.product), quantity=inside_unit(node.quantity, change))
    if isinstance(node, Apply) and node.name == "unit":
        return Apply("unit", (change(node.args[0]), node.args[1]))
    return change(node)
