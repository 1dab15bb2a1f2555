"""Cuts an answer, plain or LaTeX, into tokens. `expressions.py` reads them.

Nothing here or behind it is evaluated as code: what is no token of the few kinds below cannot be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stateset_agents.answers.characters import GREEK, TIMES, plain_text


class Unreadable(ValueError):
    """A text that is no mathematics as far as this grammar goes."""


@dataclass(frozen=True, slots=True)
class Token:
    """One piece of an answer."""

    kind: Literal["number", "word", "command", "text", "mark"]
    text: str
    glued: bool
    """No white space stands before it."""


FUNCTIONS = frozenset(
    ("sin", "cos", "tan",
     "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln",
     "exp")
)  # fmt: skip
_COMMANDS = {
    "cdot": TIMES, "times": TIMES, "ast": "*", "div": "/", "pm": "±", "mp": "±",
    "le": "≤", "leq": "≤", "leqslant": "≤",
    "ge": "≥", "geq": "≥", "geqslant": "≥", "lt": "<", "gt": ">", "ne": "≠", "neq": "≠", "cup": "\u222a",
    "%": "%", "$": "$",
    "{": "\\{", "}": "\\}", "lbrace": "\\{", "rbrace": "\\}", "colon": ":", "degree": "°",
}  # fmt: skip
_SPACES = frozenset(
    (",", ";", ":", "!", " ", "quad", "qquad", "left", "right", "big", "Big", "bigl", "bigr",
     "displaystyle", "limits")
)  # fmt: skip
_DOTS = frozenset(("dots", "ldots", "cdots"))
_TEXTS = frozenset(
    ("text", "textbf", "textit", "textrm", "mathrm", "mathbf", "mbox", "operatorname", "mathit")
)
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z.]))?|\.[0-9]+"
_TOKEN = re.compile(
    rf"(?P<space>\s+)|(?P<thousands>[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])(?:\.[0-9]+)?)|(?P<number>{_NUMBER})"
    r"|\\(?P<command>[A-Za-z]+|.)|(?P<word>[A-Za-z]+)|(?P<greek>[\u0391-ω])|(?P<tie>(?<=[\w)}\]$%°])~(?=\S))"
    r"|(?P<mark>\.\.\.|[-+*\u00d7·/^_()\[\]{},;=!|<>%$€£¥¢°:±≤≥≠\u222a&])",
    re.DOTALL,
)
_THIN = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!]|,\\!)(?=[0-9]{3})")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_DOTTED = re.compile(r"\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?")
_TIMES = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*(?:\^|\*\*))")
_BRACED = re.compile(r"\s*\{((?:[^{}\\$]|\\[,;:! ]|\\(?:cdot|mu)(?![A-Za-z])|\{[-+]?[0-9]\})*)\}")
_IN_TEXT = ((re.compile(r"\\[,;:! ]|~"), " "), (re.compile(r"\\cdot\s*"), "*"), (re.compile(r"\\mu\s*"), "µ"))


def tokens(text: str, *, thousands: bool) -> list[Token]:
    """The tokens of an answer; raises Unreadable where something else stands in it.

    With `thousands` "1,250" is one number where it stands in no brackets; without, a comma always divides.
    """
    text = _DEGREE.sub("°", _THIN.sub(",", plain_text(text)))
    text = _TIMES.sub(TIMES, _DOTTED.sub(_overlined, text))
    found: list[Token] = []
    position, depth, glued = 0, 0, True
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            raise Unreadable(f"{text[position : position + 10]!r} is no mathematics")
        kind, value = match.lastgroup, match[match.lastgroup]
        if kind == "thousands" and (depth or not thousands):
            match = re.compile(_NUMBER).match(text, position)
            assert match is not None  # it begins with a digit
            kind, value = "number", match[0]
        position = match.end()
        if kind in ("space", "tie") or (kind == "command" and value in _SPACES):
            glued = False
            continue
        if kind == "greek":
            kind, value = "command", GREEK.get(value, value)
        if kind == "command" and value in _TEXTS:
            braced = _BRACED.match(text, position)
            if braced is None:
                raise Unreadable(f"\\{value} without a text in braces")
            position, value = braced.end(), braced[1]
            for pattern, plain in _IN_TEXT:
                value = pattern.sub(plain, value)
            for word in value.split():
                found.append(Token("text", word, glued))
                glued = False
            continue
        if kind == "command" and value in _COMMANDS:
            kind, value = "mark", _COMMANDS[value]
        elif kind == "command" and value in _DOTS:
            kind, value = "mark", "..."
        elif value == "·":
            value = TIMES
        if kind == "thousands":
            kind, value = "number", value.replace(",", "")
        depth += (value in ("(", "[", "{", "\\{")) - (value in (")", "]", "}", "\\}"))
        found.append(Token(kind, value, glued))  # type: ignore[arg-type]  # the groups have the kinds' names
        glued = True
    return found


def _overlined(match: re.Match[str]) -> str:
    return rf"\overline{{{''.join(filter(None, match.groups()))}}}"


_WRAPPED = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")


def without_wrapping(text: str) -> str:
    r"""The answer without what only marks it as one: dollar signs, `\boxed{}`, bold face, a full stop.

    >>> without_wrapping(r"$\boxed{\frac12}$.")
    '\\frac12'
    """
    before = None
    while before != text:
        before = text
        text = text.strip()
        if text.endswith(".") and not text.endswith(".."):  # an ellipsis says that digits are missing
            text = text[:-1].rstrip()
        for opens, closes in _WRAPPED:
            inner = text[len(opens) : -len(closes)]
            if len(text) > len(opens + closes) and text == f"{opens}{inner}{closes}" and opens not in inner:
                text = inner
        match = _TEXT.fullmatch(text)
        text = match[1] if match else text
        match = _BOXED.match(text)
        if match and text.endswith("}") and _is_one_group(text[match.end() - 1 :]):
            text = text[match.end() : -1]
    return text


def _is_one_group(text: str) -> bool:
    """Does the brace that opens the text close at its end?"""
    depth = 0
    for position, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return position == len(text) - 1
    return False
