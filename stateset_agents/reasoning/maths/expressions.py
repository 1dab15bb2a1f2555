r"""Reads an answer into a tree: numbers, symbols, operations, sets, tuples and intervals.

>>> read(r"2\frac{1}{2}")
Apply(name='mixed', args=(Number(value=Fraction(2, 1)), Number(value=Fraction(1, 2))))

A grammar of its own, by recursive descent: no text of an agent gets to a general parser (sympy's is Python's
`eval`). The tree is never evaluated beyond what `exact.py` bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from stateset_agents.reasoning.maths.tokens import FUNCTIONS, Token, Unreadable, tokens
from stateset_agents.reasoning.maths.units import unit_name

__all__ = ["Apply", "Group", "Node", "Number", "Symbol", "read"]

MAX_DEPTH = 25
"""Of brackets, roots and fractions in one another."""


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
    """An operation: + * / ^ neg pos pm sqrt root mixed abs ! = < <= != union base unit, or a function."""

    name: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Several values: `list` (no brackets), `set`, `ratio`, `matrix`, `row`, or by their brackets, as
    `[)`."""

    kind: str
    items: tuple[Node, ...]


Node = Number | Symbol | Apply | Group

_GREEK = frozenset(
    ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "nu", "phi", "psi", "rho",
     "sigma", "tau", "omega", "Delta", "Omega", "Sigma", "pi")
)  # fmt: skip
_FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
_BEFORE_LETTERS = (")", "}", "{", "+", "-", "*", "/", "^")
_UNION = "\u222a"
_CURRENCIES = ("$", "€", "£")
_RELATIONS = {"=": "=", "<": "<", ">": "<", "≤": "<=", "≥": "<=", "≠": "!="}
_MATRIX = re.compile(r"[bpvBV]?matrix")


def read(text: str, *, thousands: bool = True) -> Node:
    """The tree of a whole text; raises Unreadable for anything that is not one.

    Values between commas, semicolons, "and" or "or" are a `list`.
    """
    reader = _Reader(tokens(text, thousands=thousands))
    items = [reader.relation()]
    while reader.at < len(reader.tokens):
        divided = reader.accepts(",", ";")
        divided = reader.accepts_word("and", "or") or divided
        if not divided:
            raise Unreadable(f"{reader.tokens[reader.at].text!r} stands behind the answer")
        items.append(reader.relation())
    return items[0] if len(items) == 1 else Group("list", tuple(items))


class _Reader:
    def __init__(self, found: list[Token]) -> None:
        self.tokens = found
        self.at = 0
        self.depth = 0

    def peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def accepts(self, *marks: str) -> str | None:
        """Go past one of these marks if it comes next."""
        token = self.peek()
        if token is not None and token.kind == "mark" and token.text in marks:
            self.at += 1
            return token.text
        return None

    def accepts_word(self, *words: str) -> str | None:
        token = self.peek()
        if token is not None and token.kind in ("word", "text") and token.text.lower() in words:
            self.at += 1
            return token.text
        return None

    def expect(self, *marks: str) -> str:
        found = self.accepts(*marks)
        if found is None:
            raise Unreadable(f"{' or '.join(marks)} is missing")
        return found

    def relation(self) -> Node:
        left = self.ratio()
        if self._accepts_command("in"):
            return Apply("in", (left, self.ratio()))
        sign = self.accepts(*_RELATIONS)
        if sign is None:
            return left
        right = self.ratio()
        sides = (right, left) if sign in (">", "≥") else (left, right)
        return Apply(_RELATIONS[sign], sides)

    def ratio(self) -> Node:
        """Sums between colons, and unions."""
        items = [self.quantity()]
        if self.accepts(_UNION):
            items.append(self.quantity())
            while self.accepts(_UNION):
                items.append(self.quantity())
            return Apply("union", tuple(items))
        while self.accepts(":"):
            items.append(self.quantity())
        return items[0] if len(items) == 1 else Group("ratio", tuple(items))

    def quantity(self) -> Node:
        """A sum with the unit before or behind it."""
        start = self.at
        sign = self.accepts("-", "+")
        currency = self.accepts(*_CURRENCIES)
        if currency is None:
            self.at = start
        value = self.sum()
        if currency is not None:
            value = Apply("neg", (value,)) if sign == "-" else value
            return Apply("unit", (value, Symbol(unit_name(currency))))
        unit = self._unit()
        return value if not unit else Apply("unit", (value, Symbol(unit_name(unit))))

    def _unit(self) -> str:
        """`cm^2`, `km/h`, `square feet`: the words behind a value."""
        if self.accepts("%"):
            return "%"
        parts: list[str] = []
        while (token := self.peek()) is not None:
            if token.kind in ("word", "text") and token.text.lower() not in ("and", "or"):
                parts.append(token.text if not parts or parts[-1] in ("/", "^") else f" {token.text}")
            elif token.kind == "number" and parts[-1:] != ["^"]:
                break
            elif token.kind == "number" or token.text in (("/", "^") if parts else ("°", *_CURRENCIES)):
                parts.append(token.text)
            else:
                break
            self.at += 1
        if parts and parts[-1] in ("/", "^"):
            raise Unreadable("a unit breaks off")
        return "".join(parts)

    def sum(self) -> Node:
        sign = self.accepts("-", "+", "±")
        first = self.product()
        if sign == "±":
            first = Apply("pm", (Number(Fraction(0)), first))
        elif sign is not None:
            first = Apply("neg" if sign == "-" else "pos", (first,))
        terms = [first]
        while (sign := self.accepts("-", "+", "±")) is not None:
            term = self.product()
            if sign == "±":
                terms = [Apply("pm", (_joined("+", terms), term))]
            else:
                terms.append(Apply("neg", (term,)) if sign == "-" else term)
        return _joined("+", terms)

    def product(self) -> Node:
        value = self.signed()
        while True:
            sign = self.accepts("*", "/")
            if sign is not None:
                right = self.signed()
                value = _mixed(value, right) if sign == "/" else _joined("*", [value, right])
            elif self._begins_factor():
                is_fraction = self._touches_fraction()
                right = self.power()
                value = _implicit(value, right, is_fraction)
            elif isinstance(value, Apply) and value.name == "beside":
                raise Unreadable("two numbers stand side by side")
            else:
                return value

    def _begins_factor(self) -> bool:
        """May what comes next be multiplied without a sign?"""
        token = self.peek()
        if token is None:
            return False
        if token.kind == "word":
            return len(token.text) == 1 or self._is_name(token) or self._is_letters(token)
        if token.kind == "command":
            return token.text not in ("in", "end", "\\")
        if token.kind == "number":  # of "1 1/2"; anything else is refused there
            return True
        return token.kind == "mark" and token.text in ("(", "{")

    def _touches_fraction(self) -> bool:
        r"""Does `\frac` stand right behind digits, as in a mixed number?"""
        before, token = self.tokens[self.at - 1], self.peek()
        is_fraction = token is not None and token.kind == "command" and token.text in _FRACTIONS
        return before.kind == "number" and is_fraction

    def _is_name(self, token: Token) -> bool:
        return token.text.lower() in FUNCTIONS or token.text in ("pi", "sqrt", "oo")

    def _is_letters(self, token: Token) -> bool:
        """Is it a product of letters, as in `2ab`? Words alone or with white space before them are words."""
        before = self.tokens[self.at - 1] if self.at else None
        touches = before is not None and (before.kind == "number" or before.text in _BEFORE_LETTERS)
        is_unit = unit_name(token.text) != token.text or token.text in ("cm", "mm", "km", "kg", "mph")
        return token.glued and touches and len(token.text) <= 3 and not is_unit

    def signed(self) -> Node:
        """A factor behind a sign of multiplication may have a sign of its own."""
        sign = self.accepts("-", "+")
        if sign is None:
            return self.power()
        return Apply("neg" if sign == "-" else "pos", (self.power(),))

    def power(self) -> Node:
        base = self.postfix()
        if not self.accepts("^") and not self._accepts_stars():
            return base
        if self._accepts_degree():
            return Apply("unit", (base, Symbol("degree")))
        self._deeper()
        exponent = self.group() if self.accepts("{") else self.signed()
        self.depth -= 1
        return Apply("^", (base, exponent))

    def _accepts_stars(self) -> bool:
        """Python's `**`."""
        stars = self.tokens[self.at : self.at + 2]
        found = len(stars) == 2 and all(star.text == "*" for star in stars) and stars[1].glued
        self.at += 2 * found
        return found

    def _accepts_degree(self) -> bool:
        start = self.at
        in_braces = self.accepts("{") is not None
        if self._accepts_command("circ") and (not in_braces or self.accepts("}")):
            return True
        self.at = start
        return False

    def _accepts_command(self, *names: str) -> str | None:
        token = self.peek()
        if token is not None and token.kind == "command" and token.text in names:
            self.at += 1
            return token.text
        return None

    def postfix(self) -> Node:
        value = self.primary()
        while self.accepts("!"):
            value = Apply("!", (value,))
        if isinstance(value, Number) and self.accepts("_"):
            value = Apply("base", (value, self._index()))
        return value

    def _index(self) -> Node:
        return self.group() if self.accepts("{") else self.primary()

    def group(self) -> Node:
        """What stands between braces that LaTeX wants; the first is read."""
        self._deeper()
        value = self.ratio()
        if self.accepts(","):
            items = [value, *self._items()]
            self.expect("}")
            self.depth -= 1
            return Group("set", tuple(items))
        self.expect("}")
        self.depth -= 1
        return value

    def _deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"more than {MAX_DEPTH} levels of brackets")

    def _items(self) -> list[Node]:
        items = [self.relation()]
        while self.accepts(",", ";"):
            items.append(self.relation())
        return items

    def primary(self) -> Node:
        token = self.peek()
        if token is None:
            raise Unreadable("something is missing at the end")
        self.at += 1
        self._deeper()
        try:
            match token.kind:
                case "number":
                    return Number(self._number(token.text))
                case "word":
                    return self._word(token)
                case "command":
                    return self._command(token.text)
                case "mark":
                    return self._bracketed(token.text)
                case _:
                    if len(token.text) == 1 and token.text.isalpha():
                        return Symbol(token.text)
                    raise Unreadable(f"{token.text!r} is no number")
        finally:
            self.depth -= 1

    def _number(self, digits: str) -> Fraction:
        value = Fraction(digits.removesuffix("."))
        if "." not in digits or not self._accepts_command("overline"):
            return value
        self.expect("{")
        token = self.peek()
        if token is None or not token.text.isdecimal():
            raise Unreadable("what repeats is no digits")
        self.at += 1
        self.expect("}")
        decimals = len(digits.partition(".")[2])
        return value + Fraction(int(token.text), (10 ** len(token.text) - 1) * 10**decimals)

    def _word(self, token: Token) -> Node:
        name = token.text
        if name == "sqrt":
            return Apply("sqrt", (self.primary(),))
        if name.lower() in FUNCTIONS:
            return self._function(name.lower())
        if name in ("oo", "inf", "infinity"):
            return Symbol("oo")
        if name == "pi":
            return Symbol("pi")
        if len(name) == 1:
            return self._symbol(name)
        self.at -= 1
        is_product = self._is_letters(token)
        self.at += 1
        if is_product:
            return _joined("*", [Symbol(letter) for letter in name])
        raise Unreadable(f"{name!r} is no number")

    def _symbol(self, name: str) -> Node:
        if not self.accepts("_"):
            return Symbol(name)
        index = self._index()
        if isinstance(index, Number | Symbol):
            return Symbol(f"{name}_{index.value if isinstance(index, Number) else index.name}")
        raise Unreadable("an index that is no number or letter")

    def _function(self, name: str) -> Node:
        exponent = None
        base = None
        if self.accepts("_"):
            base = self._index()
        if self.accepts("^"):
            exponent = self.group() if self.accepts("{") else self.primary()
        argument = self.power()
        value: Node = Apply(name, (argument,) if base is None else (argument, base))
        return value if exponent is None else Apply("^", (value, exponent))

    def _command(self, name: str) -> Node:
        if name in _FRACTIONS:
            return Apply("/", (self._argument(), self._argument()))
        if name == "sqrt":
            if self.accepts("["):
                degree = self.ratio()
                self.expect("]")
                return Apply("root", (self._argument(), degree))
            return Apply("sqrt", (self._argument(),))
        if name in ("boxed", "fbox"):
            return self._argument()
        if name in FUNCTIONS:
            return self._function(name)
        if name == "infty":
            return Symbol("oo")
        if name in ("emptyset", "varnothing"):
            return Group("set", ())
        if name in _GREEK:
            return self._symbol(name)
        if name == "begin":
            return self._matrix()
        raise Unreadable(f"\\{name} is not known")

    def _argument(self) -> Node:
        r"""`{x}`, or without braces the next sign alone: `\frac12` is 1/2."""
        if self.accepts("{"):
            return self.group()
        token = self.peek()
        if token is not None and token.kind == "number" and len(token.text) > 1:
            rest = Token("number", token.text[1:], True)
            if not (token.text.isdecimal()):
                raise Unreadable("braces are missing around a number")
            self.tokens[self.at : self.at + 1] = [Token("number", token.text[0], token.glued), rest]
        return self.primary()

    def _bracketed(self, opens: str) -> Node:
        if opens == "{":
            return self.group()
        if opens == "\\{":
            items = [] if self.accepts("\\}") else self._items()
            if items:
                self.expect("\\}")
            return Group("set", tuple(items))
        if opens == "|":
            inner = self.sum()
            self.expect("|")
            return Apply("abs", (inner,))
        if opens not in ("(", "["):
            raise Unreadable(f"{opens!r} begins no value")
        items = self._items()
        closes = self.expect(")", "]")
        if len(items) > 1:
            return Group(opens + closes, tuple(items))
        if opens + closes in ("()", "[]"):
            return items[0]
        raise Unreadable("brackets of one value that differ")

    def _matrix(self) -> Node:
        name = self._environment()
        if not _MATRIX.fullmatch(name):
            raise Unreadable(f"{name!r} is no matrix")
        rows: list[Node] = []
        cells: list[Node] = []
        while True:
            cells.append(self.relation())
            if self.accepts("&"):
                continue
            rows.append(Group("row", tuple(cells)))
            cells = []
            if self._accepts_command("\\"):
                continue
            if self._accepts_command("end") and self._environment() == name:
                return Group("matrix", tuple(rows))
            raise Unreadable("the matrix does not end")

    def _environment(self) -> str:
        self.expect("{")
        token = self.peek()
        self.at += 1
        self.expect("}")
        return token.text if token is not None else ""


def _joined(name: str, parts: list[Node]) -> Node:
    """The operation over all parts; one inside of it of the same name is taken apart."""
    flat: list[Node] = []
    for part in parts:
        flat += part.args if isinstance(part, Apply) and part.name == name else (part,)
    return flat[0] if len(flat) == 1 else Apply(name, tuple(flat))


def _is_whole(node: Node) -> bool:
    return isinstance(node, Number) and node.value.denominator == 1


def _proper(node: Node) -> Fraction | None:
    """The value of a fraction of two whole numbers that is below 1."""
    if not isinstance(node, Apply) or node.name != "/":
        return None
    above, below = node.args
    if isinstance(above, Number) and isinstance(below, Number) and _is_whole(above) and _is_whole(below):
        return above.value / below.value if 0 < above.value < below.value else None
    return None


def _implicit(left: Node, right: Node, is_fraction: bool) -> Node:
    r"""A product without a sign. `2\frac12` is a mixed number; two numbers side by side are one of "1
    1/2"."""
    last = left.args[-1] if isinstance(left, Apply) and left.name == "*" else left
    if isinstance(right, Number):
        if _is_whole(last) and _is_whole(right) and left is last:
            return Apply("beside", (left, right))  # until "/" comes
        raise Unreadable("two numbers stand side by side")
    proper = _proper(right) if is_fraction else None
    if proper is not None and _is_whole(left):
        return Apply("mixed", (left, Number(proper)))
    return _joined("*", [left, right])


def _mixed(left: Node, right: Node) -> Node:
    """A quotient, or the mixed number that "1 1/2" is."""
    if isinstance(left, Apply) and left.name == "beside":
        whole, above = left.args
        proper = _proper(Apply("/", (above, right)))
        if proper is None:
            raise Unreadable("two numbers stand side by side")
        return Apply("mixed", (whole, Number(proper)))
    return Apply("/", (left, right))
