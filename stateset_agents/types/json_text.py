"""Reads JSON texts whose numbers are all finite: of run folders, and of requests to our servers."""

from __future__ import annotations

import json
import math
from typing import Any


def finite_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises ValueError as `json.loads` does, and for NaN, Infinity, and numbers larger than a float, whichever
    way they are written.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_integer)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]!r} is too large")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 308:  # larger than any float
        raise ValueError(f"the number {digits[:20]}... is too large")
    return int(digits)
