r"""Reads an answer into a tree: numbers, symbols, operations, sets, tuples and intervals.

>>> read(r"2\frac{1}{2}")
Apply(name='mixed', args=(Number(value=Fraction(2, 1)), Number(value=Fraction(1, 2))))

A grammar of its own, by recursive descent: no text of an agent gets to a general parser (sympy's is Python's
`eval`). The tree is never evaluated beyond what `exact.py` bounds.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

from stateset_agents.answers.tokens import FUNCTIONS, GREEK_COMMANDS, TIMES, Token, Unreadable, tokens
from stateset_agents.answers.tree import (
    Ambiguous,
    Apply,
    Group,
    Node,
    Number,
    Symbol,
    holds_letter,
    inside_unit,
    power_of_ten,
)
from stateset_agents.answers.units import is_known_unit, unit_name

MAX_DEPTH = 25
"""Depth of brackets, roots and fractions in one another."""


_FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
_BEFORE_LETTERS = (")", "}", "{", "+", "-", "*", TIMES, "/", "^")
_BEHIND_LETTERS = ("+", "-", "*", TIMES, "/", "^")
_UNION = "\u222a"
_CURRENCIES = ("$", "€", "£", "¥", "¢")
_RELATIONS = {"=": "=", "<": "<", ">": "<", "≤": "<=", "≥": "<=", "≠": "!="}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNIT_COMMANDS = {"mu": "µ", "Omega": "Ω"}
_SPACED_LETTERS = frozenset("mgshlLJNWV")
_BRACKETS_OF = {"vmatrix": "determinant", "Vmatrix": "norm"}
_MATRIX = re.compile(r"[bpvBV]?matrix")


def read(text: str, *, thousands: bool = True) -> Node:
    """The tree of a whole text; raises Unreadable for anything that is not one.

    Values between commas, semicolons, "and" or "or" are a `list`.
    """
    reader = _Reader(tokens(text, thousands=thousands))
    items = [reader.relation()]
    while reader.at < len(reader.tokens):
        if not any([reader.accepts(",", ";"), reader.accepts_word("and", "or")]):  # or both: "1, and 2"
            raise Unreadable(f"{reader.tokens[reader.at].text!r} stands behind the answer")
        items.append(reader.relation())
    return items[0] if len(items) == 1 else Group("list", tuple(items))


_NOTHING = Token("end", "", False)


class _Reader:
    def __init__(self, found: list[Token]) -> None:
        self.tokens = found
        self.at = 0
        self.depth = 0

    def peek(self, ahead: int = 0) -> Token:
        """The next token, or the one `ahead` of it; `_NOTHING` before the first one and behind the last."""
        place = self.at + ahead
        return self.tokens[place] if 0 <= place < len(self.tokens) else _NOTHING

    def accepts(self, *texts: str, kind: str = "mark") -> str | None:
        """Go past one of these marks, or tokens of another kind, if it comes next."""
        token = self.peek()
        if token.kind == kind and token.text in texts:
            self.at += 1
            return token.text
        return None

    def accepts_word(self, *words: str) -> str | None:
        token = self.peek()
        if token.kind in ("word", "text") and token.text.lower() in words:
            self.at += 1
            return token.text
        return None

    def expect(self, *marks: str) -> str:
        mark = self.accepts(*marks)
        if mark is None:
            raise Unreadable(f"{' or '.join(marks)} is missing")
        return mark

    def relation(self) -> Node:
        left = self.ratio()
        if self.accepts("in", kind="command"):
            return Apply("in", (left, self.ratio()))
        sides, signs = [left], list[str]()
        while (sign := self.accepts(*_RELATIONS)) is not None:
            signs.append(sign)
            sides.append(self.ratio())
        if not signs:
            return left
        if len(signs) > 1 and not (set(signs) <= {"<", "≤"} or set(signs) <= {">", "≥"}):
            raise Unreadable(f"{signs[1]!r} stands behind a relation")
        if signs[0] in (">", "≥"):
            sides.reverse()
            signs.reverse()
        return Apply(" ".join(_RELATIONS[sign] for sign in signs), tuple(sides))

    def ratio(self) -> Node:
        """Sums between colons, and unions."""
        items = [self.quantity()]
        sign = self.accepts(_UNION, ":")
        if sign is None:
            return items[0]
        items.append(self.quantity())
        while self.accepts(sign):
            items.append(self.quantity())
        return Apply("union", tuple(items)) if sign == _UNION else Group("ratio", tuple(items))

    def quantity(self) -> Node:
        """A sum with the unit before or behind it."""
        start = self.at
        sign = self.accepts("-", "+")
        currency = self.accepts(*_CURRENCIES)
        if currency is None:
            self.at = start
        value = self.sum()
        scale = self.accepts_word(*_SCALES)
        if scale is not None:
            value = _scaled(value, _SCALES[scale.lower()])
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
        end, length = self.at, 0
        while True:
            if word := self._unit_word():
                parts.append(word if parts[-1:] == ["-"] else f" {word}")
                if "(" not in parts:
                    end, length = self.at, len(parts)
            elif "(" in parts and parts[-1] != "(" and self.accepts(")"):
                end, length = self.at, len(parts) + 1
                parts.append(")")
            elif parts and (sign := self.accepts("/", "*", TIMES, *("-" * self._is_hyphen()))):
                parts.append(sign)
            elif parts[-1:] == ["/"] and self.accepts("("):
                parts.append("(")
            else:
                break
        self.at = end
        return "".join(parts[:length]).strip()

    def _unit_word(self) -> str:
        """A word with its exponent, a fraction of two; empty, and nothing gone past, where there is none."""
        start = self.at
        token = self.peek()
        if token.text.lower() in ("and", "or"):
            return ""
        self.at += 1
        following = self.peek()
        if token.kind in ("word", "text") or token.text in _CURRENCIES:
            word = token.text
            if following.glued and following.text in _UNIT_COMMANDS:
                word, self.at = word + _UNIT_COMMANDS[following.text], self.at + 1  # kΩ
        elif token.kind == "command" and token.text in _UNIT_COMMANDS:
            word = _UNIT_COMMANDS[token.text]
            if following.kind in ("word", "text"):
                word, self.at = word + following.text, self.at + 1
        elif token.text == "°":
            is_scale = following.text in ("C", "F")
            word = token.text + following.text * is_scale
            self.at += is_scale
        elif token.kind == "command" and token.text in _FRACTIONS:
            above, below = self._braced_unit(), self._braced_unit()
            word = f"{above}/({below})" if above and below else ""
        else:
            word = ""
        exponent = self._unit_exponent() if word else None
        if exponent is None:
            self.at = start
            return ""
        return word + exponent

    def _is_hyphen(self) -> bool:
        """True for a hyphen as in newton-meters."""
        return self.peek().glued and self.peek(1).glued and self.peek(1).kind == "word"

    def _braced_unit(self) -> str:
        unit = self._unit() if self.accepts("{") else ""
        return unit if unit and self.accepts("}") else ""

    def _unit_exponent(self) -> str | None:
        """Return the exponent of a unit; None where what is raised to a power is no unit."""
        token = self.peek()
        if token.kind == "number" and token.glued and token.text in ("2", "3"):
            self.at += 1  # cm2
            return f"^{token.text}"
        if not self.accepts("^"):
            return ""
        closes = "}" if self.accepts("{") else None
        sign = self.accepts("-", "+") or ""
        token = self.peek()
        if not token.text.isdecimal():
            return None
        self.at += 1
        return f"^{sign}{token.text}" if closes is None or self.accepts(closes) else None

    def sum(self) -> Node:
        sign = self.accepts("-", "+", "±")
        first = self.product()
        if sign == "±":
            first = Apply("pm", (Number(Fraction(0)), first))
        elif sign is not None:
            name = "neg" if sign == "-" else "pos"
            first = inside_unit(first, lambda value: Apply(name, (value,)))
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
        quantity: Ambiguous | None = None
        end, depth = -1, self.depth
        try:
            while True:
                sign = self.accepts("*", TIMES, "/")
                if sign is not None:
                    right = self.signed()
                    value = (
                        _mixed(value, right)
                        if sign == "/"
                        else _times(value, right, is_typeset=sign == TIMES)
                    )
                elif self._begins_factor():
                    if quantity is None:
                        quantity, end = self._quantity(value)
                    token, is_fraction = self.peek(), self._touches_fraction()
                    right = self.power()
                    is_bracketed = token.text == "("
                    value = _implicit(value, right, is_fraction=is_fraction, is_bracketed=is_bracketed)
                elif isinstance(value, Apply) and value.name == "beside":
                    raise Unreadable("two numbers stand side by side")
                else:
                    break
        except Unreadable:  # 5 J/kg is no product of letters
            if quantity is None:
                raise
            self.at, self.depth = min(self.at, end), depth
        if quantity is None or self.at > end:
            return value
        if self.at < end:
            self.at = end
            return quantity.quantity
        return replace(quantity, product=value)

    def _quantity(self, value: Node) -> tuple[Ambiguous | None, int]:
        """The value with the unit that its letters may be, and where it ends; nothing is gone past."""
        start, token = self.at, self.peek()
        if not (len(token.text) == 1 or token.kind == "command") or holds_letter(value):
            return None, -1
        unit = self._unit()
        end, self.at = self.at, start
        if not unit or not is_known_unit(unit):
            return None, -1
        is_spaced = not token.glued and (len(unit) > 1 or unit in _SPACED_LETTERS)
        return Ambiguous(value, Apply("unit", (value, Symbol(unit_name(unit)))), is_spaced), end

    def _begins_factor(self) -> bool:
        """True where what comes next may be multiplied without a sign."""
        token = self.peek()
        if token.kind == "word":
            return len(token.text) == 1 or self._is_name(token) or self._is_letters(token)
        if token.kind == "command":
            return token.text not in ("in", "end", "\\")
        if token.kind == "number":  # of "1 1/2"; anything else is refused there
            return True
        return token.kind == "mark" and token.text in ("(", "{")

    def _touches_fraction(self) -> bool:
        r"""True where `\frac` stands right behind digits, as in a mixed number."""
        token = self.peek()
        is_fraction = token.kind == "command" and token.text in _FRACTIONS
        return is_fraction and self.peek(-1).kind == "number"

    def _is_name(self, token: Token) -> bool:
        is_second = token.text == "sec" and self.at + 1 == len(self.tokens)
        is_name = token.text.lower() in FUNCTIONS or token.text in ("pi", "sqrt", "oo")
        return is_name and not is_second

    def _is_letters(self, token: Token) -> bool:
        """True for a product of letters, as in `2ab`. Words alone or behind white space are words."""
        before, behind = self.peek(-1), self.peek(1)
        touches = before.kind == "number" or before.text in _BEFORE_LETTERS
        begins = before is _NOTHING and behind.glued and behind.text in _BEHIND_LETTERS
        is_letters = token.glued and len(token.text) <= 3 and (touches or begins)
        is_unit = before.kind == "number" and is_known_unit(token.text)
        return is_letters and not is_unit

    def signed(self) -> Node:
        """A factor behind a sign of multiplication may have a sign of its own."""
        sign = self.accepts("-", "+")
        if sign is None:
            return self.power()
        return Apply("neg" if sign == "-" else "pos", (self.power(),))

    def power(self) -> Node:
        base = self.postfix()
        if self._accepts_degree():
            return Apply("unit", (base, Symbol("degree")))
        if not self.accepts("^") and not self._accepts_stars():
            return base
        self._deeper()
        exponent = self.group() if self.accepts("{") else self.signed()
        self.depth -= 1
        return Apply("^", (base, exponent))

    def _accepts_stars(self) -> bool:
        """Python's `**`."""
        is_power = self.peek().text == self.peek(1).text == "*" and self.peek(1).glued
        self.at += 2 * is_power
        return is_power

    def _accepts_degree(self) -> bool:
        """Go past the degree sign of an angle; 20 °C has its unit behind it."""
        behind = self.peek(1)
        is_scale = behind.kind in ("word", "text") and behind.text in ("C", "F")
        return not is_scale and self.accepts("°") is not None

    def postfix(self) -> Node:
        value = self.primary()
        while self.accepts("!"):
            value = Apply("!", (value,))
        if isinstance(value, Number) and self.accepts("_"):
            value = Apply("base", (value, self._index()))
        return value

    def _index(self) -> Node:
        """Read what stands behind `_`, or behind the `^` of a function: braces, or one sign."""
        return self.group() if self.accepts("{") else self.primary()

    def group(self) -> Node:
        """Read what stands between braces that LaTeX wants; the first is read already."""
        self._deeper()
        value = self.ratio()
        if self.accepts(","):
            value = Group("set", (value, *self._items()))
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
        if token is _NOTHING:
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
        r"""Read a number with the digits that repeat: `0.1\overline{6}`, `0.1(6)`, `0.1666...`."""
        value = Fraction(digits.removesuffix("."))
        whole, point, decimals = digits.partition(".")
        if self.accepts("..."):
            return _repeating(whole, decimals)
        start, token = self.at, self.peek()
        if not point or not ((token.text == "(" and token.glued) or token.text == "overline"):
            return value
        self.at += 1
        closes = ")" if token.text == "(" else "}"
        if closes == "}":
            self.expect("{")
        block = self.peek()
        if not block.text.isdecimal() or not block.glued:
            self.at = start
            return value
        self.at += 1
        self.expect(closes)
        return value + Fraction(int(block.text), (10 ** len(block.text) - 1) * 10 ** len(decimals))

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
        base = self._index() if self.accepts("_") else None
        exponent = self._index() if self.accepts("^") else None
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
        if name in GREEK_COMMANDS:
            return self._symbol(name)
        if name == "begin":
            return self._matrix()
        if name == "mathbb":
            return Symbol(f"mathbb {self._environment()}")
        raise Unreadable(f"\\{name} is not known")

    def _argument(self) -> Node:
        r"""`{x}`, or without braces the next character alone: `\frac12` is 1/2."""
        if self.accepts("{"):
            return self.group()
        token = self.peek()
        if token.kind == "number" and len(token.text) > 1:
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
            if self.accepts("\\", kind="command"):
                continue
            if self.accepts("end", kind="command") and self._environment() == name:
                return Group(_BRACKETS_OF.get(name, "matrix"), tuple(rows))
            raise Unreadable("the matrix does not end")

    def _environment(self) -> str:
        self.expect("{")
        token = self.peek()
        self.at += 1
        self.expect("}")
        return token.text


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


def _implicit(left: Node, right: Node, *, is_fraction: bool, is_bracketed: bool) -> Node:
    r"""A product without a sign. `2\frac12` is a mixed number; two numbers side by side are one of "1 1/2",
    unless the right one stands in brackets."""
    last = left.args[-1] if isinstance(left, Apply) and left.name == "*" else left
    if isinstance(right, Number) and not (is_bracketed and not holds_letter(left)):
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


def _times(left: Node, right: Node, *, is_typeset: bool) -> Node:
    """A product, or the value that a number in scientific notation is. 4.2*10^1 is a product not computed."""
    exponent = power_of_ten(right)
    if isinstance(left, Number) and exponent is not None and (is_typeset or exponent not in (0, 1)):
        return Apply("scaled", (left, Number(Fraction(10) ** exponent)))
    return _joined("*", [left, right])


def _scaled(value: Node, factor: int) -> Node:
    """3 million; of -3 million the sign stays outside."""
    if isinstance(value, Apply) and value.name in ("neg", "pos"):
        return Apply(value.name, (_scaled(value.args[0], factor),))
    return Apply("scaled", (value, Number(Fraction(factor))))


def _repeating(whole: str, decimals: str) -> Fraction:
    """0.1666... is 1/6: a digit that stands there three times, or digits that stand there twice.
    41.999... may be rounded as well."""
    for size in range(1, len(decimals) // 2 + 1):
        block = decimals[-size:]
        if block.strip("0") and block.strip("9") and decimals.endswith(block * (3 if size == 1 else 2)):
            return Fraction(f"{whole or 0}.{decimals}") + Fraction(
                int(block), (10**size - 1) * 10 ** len(decimals)
            )
    raise Unreadable("nobody knows how these digits go on")
