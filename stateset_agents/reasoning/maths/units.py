"""Units of an answer under the one name by which they are compared."""

from __future__ import annotations

__all__ = ["KNOWN_UNITS", "unit_name"]

_NAMES = {
    "$": "dollar", "usd": "dollar", "€": "euro", "eur": "euro", "£": "pound", "gbp": "pound",
    "%": "percent", "per cent": "percent", "pct": "percent",
    "°": "degree", "deg": "degree",
    "min": "minute", "mins": "minute", "h": "hour", "hr": "hour", "hrs": "hour", "s": "second",
    "sec": "second", "secs": "second", "kilometre": "km", "kilometer": "km", "metre": "m", "meter": "m",
    "centimetre": "cm", "centimeter": "cm", "millimetre": "mm", "millimeter": "mm",
    "kilogram": "kg", "gram": "g", "litre": "l", "liter": "l", "ft": "foot", "feet": "foot",
    "inches": "inch", "yd": "yard",
}  # fmt: skip
"""Other names of a unit -> the one it is compared by; a plural s goes first."""
KNOWN_UNITS = frozenset(_NAMES.values()) - {"percent"} | {"cent", "day", "week", "month", "year", "mile"}
"""Units that may stand behind a number whose true value has none: they do not change the number, as
`percent`, `million` or `dozen` do."""


def unit_name(name: str) -> str:
    """The name that stands for all names of this unit.

    >>> unit_name("Hours"), unit_name("$"), unit_name("apples")
    ('hour', 'dollar', 'apple')
    """
    name = " ".join(name.lower().split())
    if name in _NAMES:
        return _NAMES[name]
    singular = name[:-1] if len(name) > 2 and name.endswith("s") else name
    return _NAMES.get(singular, singular)
