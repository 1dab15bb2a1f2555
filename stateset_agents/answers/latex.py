"""Writes an expression tree as LaTeX again, for math-verify: the tree's few kinds of nodes, never an agent's
text."""

from __future__ import annotations

import math

from stateset_agents.answers.exact import MAX_PRODUCTS, rational
from stateset_agents.answers.tokens import FUNCTIONS
from stateset_agents.answers.tree import Ambiguous, Apply, Node, Number, Symbol

_MAX_POWER = 100
_MAX_FACTORIAL = 50


def latex_of(node: Node) -> str | None:
    """The expression; None where it holds what is no single value, or what may be too large to compute.

    A power of numbers has an exponent up to 100 that is a number by itself, a factorial an argument up to 50;
    multiplied out, nothing has more than 10,000 terms.
    """
    if isinstance(node, Number):
        above, below = node.value.numerator, node.value.denominator
        return str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"
    if isinstance(node, Symbol):
        letter, _, index = node.name.partition("_")
        name = letter if len(letter) == 1 else {"oo": r"\infty"}.get(letter, f"\\{letter}")
        return f"{name}_{{{index}}}" if index else name
    if isinstance(node, Ambiguous):
        return latex_of(node.product)
    if not isinstance(node, Apply) or not _is_small(node):
        return None
    parts = [latex_of(part) for part in node.args]
    written = [part for part in parts if part is not None]
    if len(written) < len(parts):
        return None
    return _operation(node.name, written)


def _operation(name: str, parts: list[str]) -> str | None:
    first = parts[0]
    match name:
        case "+" | "mixed":
            return "+".join(f"({part})" for part in parts)
        case "*" | "scaled":
            return r" \cdot ".join(f"({part})" for part in parts)
        case "/":
            return rf"\frac{{{first}}}{{{parts[1]}}}"
        case "neg":
            return f"-({first})"
        case "pos":
            return first
        case "^":
            return f"({first})^{{{parts[1]}}}"
        case "!":
            return f"({first})!"
        case "sqrt":
            return rf"\sqrt{{{first}}}"
        case "root":
            return rf"\sqrt[{parts[1]}]{{{first}}}"
        case "abs":
            return f"|{first}|"
        case "exp":
            return f"e^{{{first}}}"
        case "log" if len(parts) == 2:
            return rf"\log_{{{parts[1]}}}({first})"
    return f"\\{name}({first})" if name in FUNCTIONS and len(parts) == 1 else None


def _is_small(node: Apply) -> bool:
    if _num_terms(node) > MAX_PRODUCTS:
        return False
    if node.name == "^":
        exponent = rational(node.args[1])
        return not _holds_number(node.args[1]) if exponent is None else abs(exponent) <= _MAX_POWER
    if node.name == "!":
        value = rational(node.args[0])
        return value is not None and 0 <= value <= _MAX_FACTORIAL
    return True


def _num_terms(node: Node) -> int:
    """How many terms it has at most, multiplied out; beyond the bound one more than that."""
    if isinstance(node, Ambiguous):
        return _num_terms(node.product)
    if not isinstance(node, Apply):
        return 1
    counts = [_num_terms(part) for part in node.args]
    match node.name:
        case "+" | "mixed":
            number = sum(counts)
        case "*" | "/" | "scaled" | "neg" | "pos":
            number = math.prod(counts)
        case "^":
            exponent = rational(node.args[1])
            power = 1 if exponent is None else int(abs(exponent))
            number = math.comb(counts[0] + power - 1, power) if power <= _MAX_POWER else 1
        case _:
            number = 1
    return min(number, MAX_PRODUCTS + 1)


def _holds_number(node: Node) -> bool:
    """Is a large number in it, so that a power of it could be? 2x + 1 is none, 999 x is."""
    if isinstance(node, Number):
        return abs(node.value) > _MAX_POWER
    if isinstance(node, Apply):
        return node.name in ("^", "!") or any(_holds_number(part) for part in node.args)
    return False
