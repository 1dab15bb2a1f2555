"""Units of an answer under the one name by which they are compared: `m/s` is `meters per second`.

A table of our own. pint (3.3 MB, a third of a second to start) would convert, which graders of answers do not
do; it takes Mb for megabarns and `a` for years, and knows neither `sq ft` nor `kgs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from stateset_agents.runtime.yaml_files import read_yaml

_UNITS = read_yaml(Path(__file__).with_name("units.yaml"))
_SPELLED: Mapping[str, str] = _UNITS["spelled"]
_OF_DATA = ("bit", "byte")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_DIVISION = re.compile(r"\s*(?:/|\bper\b)\s*")
_BETWEEN = re.compile(r"[\s*\u00d7·]+|-(?=[^\W\d_])")
_FACTOR = re.compile(r"(?P<name>°?[^\W\d_]+|[°%$€£¥¢])\.?(?:\^?\{?(?P<exponent>[-+]?[1-9])\}?)?")
_POUND = re.compile(r"pound(?! [ms])")


def _tables() -> tuple[dict[str, str], dict[str, str]]:
    """Symbols, whose case counts, and names, whose case does not: each with the name it is compared by."""
    symbols: dict[str, str] = {}
    names: dict[str, str] = {}
    for symbol, others in _UNITS["with_prefixes"].items():
        spellings = others.split()
        is_data = spellings[0] in _OF_DATA
        names |= dict.fromkeys(spellings, spellings[0])
        for letters, prefix in _UNITS["prefixes"].items():
            if is_data or len(letters) == 1 or letters == "da":
                names |= {prefix + name: prefix + spellings[0] for name in spellings}
                if not is_data or letters[0] in "kKMGTP":
                    symbols[letters + symbol] = prefix + spellings[0]
    symbols |= {
        symbol: names.split()[0] for symbol, names in _UNITS["with_prefixes"].items() if symbol not in "bB"
    }
    for name, others in _UNITS["others"].items():
        symbols |= dict.fromkeys(others.split(), name)
        names |= {other: name for other in (name, *others.split()) if len(other) > 1 and other.islower()}
    return symbols, names


_SYMBOLS, _NAMES = _tables()
_KNOWN = frozenset((*_SYMBOLS.values(), *_NAMES.values()))


def unit_name(text: str) -> str:
    """The name that stands for all names of this unit.

    >>> unit_name("Hours"), unit_name("$"), unit_name("apples"), unit_name("km/h"), unit_name("sq ft")
    ('hour', 'dollar', 'apple', 'hour^-1*kilometer', 'foot^2')
    >>> unit_name("mW"), unit_name("MW")
    ('milliwatt', 'megawatt')
    """
    return _read(text)[0]


def is_known_unit(text: str) -> bool:
    """True where every word in it is a unit's."""
    return _read(text)[1]


def is_neutral_unit(name: str) -> bool:
    """True where a unit, by its `unit_name`, may stand behind a number whose true value has none. It
    does not change the number, as `percent` or `dozen` do; 5 pm may be a time."""
    parts = [part.partition("^")[0] for part in name.split("*")]
    return all(part in _KNOWN and part not in ("percent", "picometer") for part in parts)


def same_unit(given: str, truth: str) -> bool:
    """True where two units, by their `unit_name`, are the same; `pounds` may be of mass or of money."""
    meant = ([_POUND.sub(f"pound {kind}", name) for name in (given, truth)] for kind in ("mass", "sterling"))
    return any(left == right for left, right in meant)


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[str, bool]:
    """The name, and whether it is a known unit's."""
    text = " ".join(text.split())
    text = text.replace("²", "^2").replace("³", "^3").replace("per cent", "percent")
    factors = _factors(text)
    if factors is None or not all(name in _KNOWN for name, _ in factors):
        return " ".join(_plain(word) for word in text.replace("/", " per ").split()), False
    powers: dict[tuple[str, bool], int] = {}
    for name, power in factors:  # m/m stays what it is
        powers[name, power < 0] = powers.get((name, power < 0), 0) + power
    parts = [name if power == 1 else f"{name}^{power}" for (name, _), power in powers.items()]
    return "*".join(sorted(parts)), bool(parts)


def _plain(word: str) -> str:
    """A word of what is counted, in the singular; two letters may be a symbol, and keep their case."""
    if word in _SYMBOLS or len(word) <= 2:
        return _SYMBOLS.get(word, word)
    if word.endswith("s") and word[:-1] in _SYMBOLS:  # kgs
        return _SYMBOLS[word[:-1]]
    word = word.lower()
    for ending, singular in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss"), ("xes", "x")):
        if word.endswith(ending) and len(word) > 4:
            return word.removesuffix(ending) + singular
    singular = word if word.endswith("ss") else word.removesuffix("s")
    return _NAMES.get(word, _NAMES.get(singular, singular))


def _factors(text: str) -> list[tuple[str, int]] | None:
    """Names with their exponents; None for anything else, as J/kg K, where nobody knows what K divides."""
    names: list[tuple[str, int]] = []
    for place, part in enumerate(_DIVISION.split(text)):
        is_bracketed = place > 0 and part.startswith("(") and part.endswith(")")
        factors = _product(part[1:-1] if is_bracketed else part)
        if factors is None or (place and len(factors) != 1 and not (is_bracketed and factors)):
            return None
        names += [(name, -power if place else power) for name, power in factors]
    return names


def _product(text: str) -> list[tuple[str, int]] | None:
    words = [word for word in _BETWEEN.split(text) if word]
    names: list[tuple[str, int]] = []
    place, power = 0, 1
    while place < len(words):
        word, pair = words[place], " ".join(words[place : place + 2]).lower()
        place += 2 if pair in _SPELLED else 1
        spelled = _SPELLED.get(pair if pair in _SPELLED else word)
        match = _FACTOR.fullmatch(word)
        if word.rstrip(".").lower() in _POWERS:
            value = _POWERS[word.rstrip(".").lower()]
            if not word.lower().rstrip(".").endswith("ed"):
                power = value
            elif names:
                names[-1] = names[-1][0], names[-1][1] * value
            else:  # 40 squared is 1600
                return None
        elif spelled is not None:
            names += [(name, each * power) for name, each in _factors(spelled) or ()]
            power = 1
        elif match is None:
            return None
        else:
            names.append((_plain(match["name"]), power * int(match["exponent"] or 1)))
            power = 1
    return names if power == 1 else None
