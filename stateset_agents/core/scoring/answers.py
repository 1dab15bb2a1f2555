"""Is an answer the right one? Numbers with units, texts and lists, compared as values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from stateset_agents.answers.units import same_unit, unit_name
from stateset_agents.claims.text_checks import words
from stateset_agents.types.comparison import composed, nfc
from stateset_agents.types.errors import ConfigurationError

_NUMBER = re.compile(
    r"(?P<before>[$€£])?\s*(?P<sign>[-+\u2212])?\s*(?P<also>[$€£])?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<power>e[-+]?\d+)?"
    r"(?:\s*/\s*(?P<below>\d+))?\s*(?P<unit>[%°]?[a-zµ²³/ ]*|[€£$])",
    re.IGNORECASE,
)
_CHANGING = ("percent", "k", "hundred", "thousand", "million", "billion", "trillion", "dozen")
"""Words behind a number that make another of it."""
_BETWEEN_ITEMS = re.compile(r";|,(?!\d{3}(?!\d))|\band\b", re.IGNORECASE)


def parse_number(text: str) -> tuple[float, str] | None:
    """Value and unit of a text that is one number and nothing else; None for any other.

    >>> parse_number("$1,250.50")
    (1250.5, 'dollar')
    >>> parse_number("3/4 hours")
    (0.75, 'hour')
    >>> parse_number("3 or 4") is None
    True
    """
    text = text.strip(" \t*`_")
    found = _NUMBER.fullmatch(text.rstrip(" .!"))
    if found is None or text.endswith(("..", "…")):  # digits are missing
        return None
    units = [unit for unit in (found["before"], found["also"], found["unit"].strip()) if unit]
    if len(units) > 1:
        return None
    value = float(found["digits"].replace(",", "") + (found["power"] or ""))
    if found["below"] is not None:
        if int(found["below"]) == 0:
            return None
        value = float(Fraction(value) / int(found["below"]))
    if not math.isfinite(value):
        return None
    return (-value if found["sign"] in ("-", "\u2212") else value), unit_name(units[0] if units else "")


def agreement(answer: str, expected: object, *, tolerance: float = 1e-6) -> float:
    """1 where the answer given is the one expected, else 0; for a list the share that both have in common.

    - A number agrees within `tolerance`, relative to it. Where the expected answer has a unit the given one
      must have the same, under any of its names; units are not converted. Where it has none, any will do that
      leaves the number as it is: not % and not million.
    - Texts are compared word by word, without case, marks and articles.
    - A list is answered by items between commas, semicolons or "and", in any order: items in common over
      items in either, so that naming everything pays little. A list inside it holds wordings of one item.

    Raises ConfigurationError for an expected answer that is neither number, text nor list of these.
    """
    answer, expected = nfc(answer), composed(expected)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        items = [_wordings(item) for item in expected]
        if not items:
            raise ConfigurationError('context["answer"] is an empty list: leave it out, or give the answer')
        parts = [part for part in _BETWEEN_ITEMS.split(answer) if part.strip(" .")]
        left = list(parts)
        for item in items:
            right = [part for part in left if any(_agrees(part, wording, tolerance) for wording in item)]
            if right:
                left.remove(right[0])  # each part answers one item
        in_common = len(parts) - len(left)
        return in_common / (len(items) + len(parts) - in_common)
    return float(any(_agrees(answer, wording, tolerance) for wording in _wordings(expected)))


def _wordings(expected: object) -> Sequence[str | float]:
    if isinstance(expected, str) and words(expected):
        return [expected]
    if isinstance(expected, int | float) and not isinstance(expected, bool) and math.isfinite(expected):
        return [expected]
    if isinstance(expected, Sequence) and not isinstance(expected, str) and expected:
        return [wording for item in expected for wording in _wordings(item)]
    raise ConfigurationError(
        f'context["answer"] must be a number, a text or a list of these, got {expected!r:.60}'
    )


def _agrees(answer: str, expected: str | float, tolerance: float) -> bool:
    wanted = parse_number(expected) if isinstance(expected, str) else (float(expected), "")
    if wanted is None:
        return _plain(answer) == _plain(str(expected))
    found = parse_number(answer)
    if found is None:
        return False
    fits = same_unit(found[1], wanted[1]) or (not wanted[1] and found[1] not in _CHANGING)
    return fits and math.isclose(found[0], wanted[0], rel_tol=tolerance, abs_tol=1e-12)


def _plain(text: str) -> list[str]:
    return [word for word in words(text) if word not in ("a", "an", "the")]
