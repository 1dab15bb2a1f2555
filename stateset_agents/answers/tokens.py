"""Cuts an answer, plain or LaTeX, into tokens. `expressions.py` reads them.

Nothing here or behind it is evaluated as code: what is no token of the few kinds below cannot be read.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.comparison import nfc

# Unicode characters of an answer as the ASCII or LaTeX that says the same. NFKC
# alone would change values: it makes `x2` of x² and `41/2` of 4½.

TIMES = "\u00d7"
"""The sign that tells typeset from `*`."""
GREEK = {
    chr(code): unicodedata.name(chr(code)).split()[-1].replace("LAMDA", "LAMBDA").lower()
    for code in range(0x3B1, 0x3CA)
    if code != 0x3C2  # final sigma
} | {"Δ": "Delta", "Ω": "Omega", "Σ": "Sigma", "Γ": "Gamma", "Φ": "Phi", "Θ": "Theta", "Λ": "Lambda"}
"""A letter -> the LaTeX command that writes it."""
NOTATION = read_yaml(Path(__file__).with_name("notation.yaml"))
_SIGNS: dict[str, str] = {sign: plain for plain, signs in NOTATION["signs"].items() for sign in signs}
_AS_LETTERS = ("<font>", "<wide>", "<narrow>", "<noBreak>", "<square>", "<compat>", "<small>")
"""Kinds of compatibility characters that are others, drawn differently: full-width digits, ㎞."""
_SCRIPT = re.compile(r"([\^_])\{([^{}]*)\}(?:\1\{([^{}]*)\})")
_OVERLINED = re.compile(r"(?:[0-9]\u0305)+")
_GROUPED = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:[\u00a0\u2009\u202f][0-9]{3})+(?![0-9])")
_ROOT = re.compile(r"(\\sqrt\[[34]\])([0-9]+|[a-z])")
_RANGE = re.compile(r"(?<=[0-9])\u2013(?=[0-9])")


@lru_cache(maxsize=4096)
def plain_text(text: str) -> str:
    r"""The text in NFC, with mathematical characters spelled out.

    >>> plain_text("10⁻³ µm²"), plain_text("４½"), plain_text("10\u202f000")
    ('10^{-3} μm^{2}', '4\\frac{1}{2}', '10,000')
    """
    if text.isascii():
        return text
    text = nfc(text)
    text = _OVERLINED.sub(lambda match: rf"\overline{{{match[0][::2]}}}", text)
    text = re.sub(r"([0-9])\u0307", r"\\dot{\1}", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", ",", match[0]), text)
    if not _RANGE.search(text):  # that is from 3 to 5, and no difference
        text = text.replace("\u2013", "-")
    text = "".join(map(_spelled, text))
    before = ""
    while before != text:  # ¹² is one exponent
        before, text = text, _SCRIPT.sub(r"\1{\2\3}", text)
    return nfc(_ROOT.sub(r"\1{\2}", text))


@lru_cache(maxsize=4096)
def _spelled(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    kind, *codes = unicodedata.decomposition(character).split() or [""]
    if not kind.startswith("<"):
        return character
    inner = "".join(_spelled(chr(int(code, 16))) for code in codes)
    match kind:
        case "<fraction>" if not inner.endswith("/"):
            above, _, below = inner.partition("/")
            return rf"\frac{{{above}}}{{{below}}}"
        case "<super>" if character != "ª":
            return f"^{{{inner}}}"
        case "<sub>":
            return f"_{{{inner}}}"
    is_plain = kind in _AS_LETTERS and not (kind == "<compat>" and any(map(str.isdigit, inner)))
    return inner if is_plain else character


class Unreadable(ValueError):
    """A text that is no mathematics as far as this grammar goes."""


@dataclass(frozen=True, slots=True)
class Token:
    """One piece of an answer."""

    kind: Literal["number", "word", "command", "text", "mark", "end"]
    text: str
    glued: bool
    """No white space stands before it."""


FUNCTIONS = frozenset(NOTATION["functions"].split())
GREEK_COMMANDS = frozenset(NOTATION["greek"].split())
_COMMANDS = {name: mark for mark, names in NOTATION["commands"].items() for name in names.split()}
_SPACES = frozenset((*",;:! ", *NOTATION["spaces"].split()))
_DOTS = frozenset(("dots", "ldots", "cdots"))
_TEXTS = frozenset(NOTATION["texts"].split())
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
    pieces: list[Token] = []
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
                pieces.append(Token("text", word, glued))
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
        pieces.append(Token(kind, value, glued))  # type: ignore[arg-type]  # the groups have the kinds' names
        glued = True
    return pieces


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
        if match and text.endswith("}") and closing_brace(text, match.end() - 1) == len(text) - 1:
            text = text[match.end() : -1]
    return text


def closing_brace(text: str, opening: int) -> int | None:
    """Return where the brace that opens there closes; None where it does not."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
    return None
