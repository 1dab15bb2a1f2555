"""The values that a program claims to have computed, and whether it is what was expected. The grader alone
compares.

Nothing of a claim is believed: it is parsed as JSON of a few forms, and compared from the expected value's
side, so that a claim decides neither how long a comparison takes nor which `==` it uses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from stateset_agents.sandbox.child import encoded
from stateset_agents.types.comparison import nfc

Ending = Literal["finished", "ended early", "cpu limit", "wall limit", "output limit", "malformed"]
READY = b'"ready"\n'
"""The first line, written before the program's first."""
_MOST_DEPTH = 60
_DIGITS = 40
"""Most digits of a JSON number; larger integers come as text in base 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The program's output, as it reported it."""

    claimed: Mapping[int, Any]
    """Case -> the claim about its value, as it was sent: for `agrees`. Cases without one are missing."""
    raised: Mapping[int, str]
    """Case -> what it raised; -1: what kept the program from its cases."""
    ending: Ending
    level: str
    """Name of the walls behind which it ran: one of `levels.LEVELS`, or the executor's address."""
    cpu_seconds: float = 0.0
    """Processor time of the process, its start included; 0 where another machine ran it."""

    def agree(self, case: int, expected: object, *, tolerance: float = 0.0) -> bool:
        """True if the claim for this case is the expected value; see `agrees`."""
        return case in self.claimed and agrees(self.claimed[case], expected, tolerance=tolerance)


def why_broken(first_line: bytes) -> str | None:
    """The reason that a child gave before the program ran; None where it gave none."""
    try:
        report = json.loads(first_line)
    except (ValueError, RecursionError):
        return None
    is_reason = isinstance(report, list) and len(report) == 2 and report[0] == "broken"
    return str(report[1]) if is_reason else None


def read_claims(lines: bytes, *, num_cases: int) -> tuple[dict[int, Any], dict[int, str]] | None:
    """Claims and errors by case; None where anything else was written, or two lines are of one case: whoever
    says several things of one value has said nothing."""
    claimed: dict[int, Any] = {}
    raised: dict[int, str] = {}
    *whole, cut = lines.split(b"\n")
    if cut:
        return None
    for line in whole:
        try:
            claim = json.loads(line, parse_int=_short_int)
        except (ValueError, RecursionError):
            return None
        if not isinstance(claim, list) or len(claim) != 3 or type(claim[0]) is not int:
            return None
        case, kind, value = claim
        if case in claimed or case in raised or not -1 <= case < num_cases:
            return None
        if kind == "value" and case >= 0:
            claimed[case] = value
        elif kind == "raised" and isinstance(value, str):
            raised[case] = value
        else:
            return None
    return claimed, raised


def _short_int(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a number of so many digits is written in base 16")
    return int(digits)


def agrees(claim: Any, expected: object, *, tolerance: float = 0.0) -> bool:
    """True if the claim is the expected value, of exactly its type.

    >>> agrees(["list", [1, True]], [1, True])
    True
    >>> agrees(1, True), agrees(1, 1.0), agrees(["tuple", [1]], [1])
    (False, False, False)

    Floats agree within `tolerance`, relative or absolute; NaN agrees with nothing. The keys of a dict and the
    items of a set must be the same without tolerance, in any order.
    """
    kind = type(expected)
    if isinstance(expected, str):
        return type(claim) is str and nfc(claim) == nfc(expected)
    if expected is None or kind is bool:
        return type(claim) is kind and bool(claim == expected)
    if isinstance(expected, int):
        return _int(claim) == expected
    if isinstance(expected, float):
        value = _floats(claim, "float", 1)
        return value is not None and _close(value[0], expected, tolerance)
    if isinstance(expected, complex):
        parts = _floats(claim, "complex", 2)
        return (
            parts is not None
            and _close(parts[0], expected.real, tolerance)
            and _close(parts[1], expected.imag, tolerance)
        )
    if isinstance(expected, bytes):
        return _tagged(claim, "bytes") and bool(claim[1] == expected.hex())
    items = claim[1] if _tagged(claim, kind.__name__) and isinstance(claim[1], list) else None
    if items is None or not isinstance(expected, list | tuple | set | frozenset | dict):
        return False
    if len(items) != len(expected):
        return False
    if isinstance(expected, list | tuple):
        return all(
            agrees(item, part, tolerance=tolerance) for item, part in zip(items, expected, strict=True)
        )
    if isinstance(expected, dict):
        return _same_dict(items, expected, tolerance)
    return _same_items(items, expected)


def _same_dict(pairs: Sequence[Any], expected: Mapping[Any, Any], tolerance: float) -> bool:
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return False
    try:
        claimed = sorted(((_canonical(key), value) for key, value in pairs), key=itemgetter(0))
        expected_pairs = sorted(
            ((_canonical(_claim_of(key)), value) for key, value in expected.items()), key=itemgetter(0)
        )
    except _IncomparableError:
        return False
    return all(
        key == expected_key and agrees(value, expected_value, tolerance=tolerance)
        for (key, value), (expected_key, expected_value) in zip(claimed, expected_pairs, strict=True)
    )


def _same_items(items: Sequence[Any], expected: Iterable[object]) -> bool:
    try:
        return sorted(map(_canonical, items)) == sorted(_canonical(_claim_of(value)) for value in expected)
    except _IncomparableError:
        return False


class _IncomparableError(Exception):
    """A claim that equals nothing."""


def _claim_of(value: object) -> Any:
    return json.loads(encoded(value))


def _canonical(claim: Any, depth: int = 0) -> str:
    """A text for what may be in a set. Texts are sorted: hashes could be made to collide, and be slow.

    >>> _canonical(["frozenset", [2, 1]])
    'frozenset[int 1,int 2]'
    """
    if depth > _MOST_DEPTH:
        raise _IncomparableError
    if claim is None or type(claim) in (bool, str):
        return json.dumps(nfc(claim) if isinstance(claim, str) else claim)
    number = _int(claim)
    if number is not None:
        return f"int {number:x}"
    for kind, count in (("float", 1), ("complex", 2)):
        parts = _floats(claim, kind, count)
        if parts is not None and not any(math.isnan(part) for part in parts):
            return " ".join([kind, *((part + 0.0).hex() for part in parts)])  # -0.0 is 0.0
    if _tagged(claim, "bytes") and isinstance(claim[1], str):
        return f"bytes {json.dumps(claim[1])}"
    for kind in ("tuple", "frozenset"):
        if _tagged(claim, kind) and isinstance(claim[1], list):
            texts = [_canonical(item, depth + 1) for item in claim[1]]
            return f"{kind}[{','.join(texts if kind == 'tuple' else sorted(texts))}]"
    raise _IncomparableError


def _tagged(claim: Any, kind: str) -> bool:
    return isinstance(claim, list) and len(claim) == 2 and claim[0] == kind


def _int(claim: Any) -> int | None:
    if type(claim) is int:
        return claim
    if _tagged(claim, "int") and isinstance(claim[1], str):
        try:
            return int(claim[1], 16)  # takes time in proportion to its length
        except ValueError:
            return None
    return None


def _floats(claim: Any, kind: str, count: int) -> list[float] | None:
    if not isinstance(claim, list) or len(claim) != count + 1 or claim[0] != kind:
        return None
    try:
        return [float.fromhex(part) for part in claim[1:]]
    except (TypeError, ValueError, OverflowError):
        return None


def _close(value: float, expected: float, tolerance: float) -> bool:
    return value == expected or (
        math.isfinite(value) and math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    )
