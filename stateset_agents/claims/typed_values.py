"""Values that stand in a text, by type: "It comes Friday for $40." has a weekday and an amount.

Two values of a type that differ rule each other out, which is how `fact_statuses` knows that "Monday or
Friday" tells neither. Numbers are compared as numbers, so "$40.00", "40 dollars" and "USD 40" are equal.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice

from stateset_agents.claims.english import ENGLISH, Patterns, word_table
from stateset_agents.claims.text_checks import FUNCTION_WORDS

MOST_VALUES = 400
"""Number of values that are read of one text: no answer has more."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value and where it stands in the text."""

    kind: str
    """`weekday`, `date`, `time`, `amount`, `duration`, `id`, `place`, `status`, `number:NOUN`, ..."""
    value: Hashable
    """The value in normal form; equal for "five days" and "5 days"."""
    start: int
    end: int


_ENGLISH = Patterns("typed_values")
_SMALL = [*ENGLISH.alternatives("ones"), *ENGLISH.alternatives("teens")]
_NUMBERS = {word: number for number, word in enumerate(_SMALL, 1)}
_NUMBERS |= {word: 10 * number for number, word in enumerate(ENGLISH.alternatives("tens"), 2)}
_WEEKDAYS, _MONTHS = ENGLISH.alternatives("weekdays"), ENGLISH.alternatives("months")
_CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "dollar": "usd", "buck": "usd", "euro": "eur"}
_CURRENCIES |= {"pound": "gbp", "usd": "usd", "eur": "eur", "gbp": "gbp", "us$": "usd"}
_STATUSES = {word: status for status, words in word_table("statuses").items() for word in words.split()}
PERIOD_WORDS = word_table("periods")
_VALUE = re.compile(
    "|".join(f"(?P<{kind}>{pattern.pattern})" for kind, pattern in ENGLISH.patterns("value_kinds").items())
)
_NO_NOUNS = FUNCTION_WORDS | {"each", "per", "only", "most", "off", "over", "such"}


def find_values(text: str, choices: Sequence[Sequence[str]] = ()) -> tuple[Value, ...]:
    """The typed values of a text, in order; each list of `choices` is one more type.

    "Room 12 is $40 for five days" -> number:room 12, amount (usd, 40), duration (5, day).
    """
    every = (value for match in _VALUE.finditer(text) for value in _read(match, text))
    values = list(islice(every, MOST_VALUES))
    return tuple(sorted([*_joined(values, text), *_chosen(text, choices)], key=lambda value: value.start))


def same_value(first: Value, second: Value) -> bool:
    """True where both are equal; for dates, where they can be the same day."""
    if first.kind != second.kind:
        return False
    if isinstance(first.value, frozenset) and isinstance(second.value, frozenset):
        return bool(first.value & second.value)
    return first.value == second.value


@lru_cache(maxsize=4096)
def stem(word: str) -> str:
    """Return a word without endings of plural and tense: "refunds", "refunded", "refunding" -> "refund"."""
    word = word.lower().replace("\u2019", "'").removesuffix("'s")
    for ending, shortest in (("ies", 5), ("ing", 6), ("ed", 5), ("ly", 5), ("es", 5), ("s", 4)):
        if len(word) >= shortest and word.endswith(ending) and not word.endswith("ss"):
            word = word[: -len(ending)] + ("y" if ending == "ies" else "")
            break
    if len(word) > 4 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word


def _read(match: re.Match[str], text: str) -> list[Value]:
    kind, phrase = str(match.lastgroup), match[0]
    low = phrase.lower()
    value: Hashable
    if kind in ("iso", "numeric"):
        parts = [int(part) for part in re.split(r"[-./]", phrase)]
        pairs = {(parts[1], parts[2])} if kind == "iso" else {(parts[0], parts[1]), (parts[1], parts[0])}
        kind, value = "date", frozenset(pair for pair in pairs if pair[0] <= 12)
    elif kind in ("month_day", "day_month", "day"):
        day = next(int(digits) for digits in re.findall(r"\d+", phrase) if len(digits) < 3)
        letters = _ENGLISH.month.search(low)
        months = [_month(letters[0])] if letters and kind != "day" else list(range(1, 13))
        kind, value = "date", frozenset((month, day) for month in months)
    elif kind == "time":
        kind, value = "time", _minutes(low)
    elif kind == "noon":
        kind, value = "time", 720 if low == "noon" else 0
    elif kind in ("money", "worth"):
        currency = next(_CURRENCIES[name] for name in _CURRENCIES if name in low)
        kind, value = "amount", (currency, _number(low))
    elif kind == "percent":
        value = _number(low)
    elif kind == "duration":
        value = (_number(low), stem(re.findall(r"[a-z]+", low)[-1]))
    elif kind == "measure":
        kind, value = f"number:{stem('degrees')}", _number(low)
    elif kind == "weekday":
        value = next(number for number, day in enumerate(_WEEKDAYS) if day.startswith(low[:3]))
    elif kind == "relative":
        value = low
    elif kind == "frequency":
        value = _frequency(low)
    elif kind == "hash":
        kind, value = "id", low.removeprefix("#")
    else:
        return _word(match, text)
    return [Value(kind, value, match.start(), match.end())]


def _word(match: re.Match[str], text: str) -> list[Value]:
    """Return what a word is by itself: an identifier, a number of something, a status, a place."""
    word, low, start, end = match[0], match[0].lower(), match.start(), match.end()
    if word.isdecimal():
        if len(word) >= 5:
            return [Value("id", word, start, end)]
        if (
            re.match(r"[.)]\s", text[end : end + 2])
            and not text[:start].rstrip(" \t\r").strip("\n")[-1:].strip()
        ):
            return []
        return [_number_of(float(word), text, start, end)]
    if low in _NUMBERS and low != "one":
        value = _number_of(float(_NUMBERS[low]), text, start, end)
        return [] if value.kind == "number:" else [value]
    if any(map(str.isdecimal, word)):
        return [Value("id", low, start, end)] if any(map(str.isalpha, word)) else []
    if low in _STATUSES:
        return [Value("status", _STATUSES[low], start, end)]
    if low in _MONTHS and word[0].isupper():
        return [Value("month", low, start, end)]
    before = text[max(0, start - 40) : start]
    if word[0].isupper() and not word.isupper() and _ENGLISH.preposition.search(before):
        return [Value("place", low, start, end)]
    if word[0].isupper() and not word.isupper() and before.rstrip()[-1:] not in ("", ".", "!", "?", ":"):
        return [Value("name", low, start, end)]
    return []


def _number_of(number: float, text: str, start: int, end: int) -> Value:
    """A number with what it counts or numbers: "85 degrees", "room 12"."""
    after = re.match(r"[ -]([^\W\d_]+)", text[end : end + 30])
    if after and after[1].lower() not in _NO_NOUNS:
        return Value(f"number:{stem(after[1])}", number, start, end + after.end())
    before = re.search(r"([^\W\d_]+) (?:number |no\. )?$", text[max(0, start - 40) : start])
    if before and before[1].lower() not in _NO_NOUNS:
        return Value(f"number:{stem(before[1])}", number, start - len(before[0]), end)
    return Value("number:", number, start, end)


def _joined(plain_values: Sequence[Value], text: str) -> list[Value]:
    """Bare numbers and names take the type of a neighbour that they are joined to: "$10, 20 or 40"."""
    values = list(plain_values)
    places = range(len(values))
    for order, step in ((places, -1), (reversed(places), 1)):
        for index in order:
            value = values[index]
            other = values[index + step] if 0 <= index + step < len(values) else None
            if other is None or not _takes_type(value, other):
                continue
            first, second = (other, value) if step < 0 else (value, other)
            if _ENGLISH.joiner.match(text[first.end : second.start][:24]) and not (
                value.kind == "name"
                and _is_apposition(text[first.end : second.start], text[second.end : second.end + 8])
            ):
                values[index] = replace(value, kind=other.kind, value=_like(value.value, other))
    return [value for value in values if value.kind != "name"]


def _is_apposition(between: str, after: str) -> bool:
    """ "Lyon, France" is no list, "Lyon, Paris and Nice" is."""
    return between.strip() == "," and not re.match(r"\s*(?:,|or\b|and\b|/|&)\s*(?:or |and )?[A-Z]", after)


def _takes_type(value: Value, other: Value) -> bool:
    if value.kind == "name":
        return other.kind == "place"
    bare = value.kind in ("number:", "number:room") or (
        value.kind.startswith("number:") and other.kind.startswith("number:")
    )
    return (bare and other.kind in ("amount", "percent", "duration", "time", "date")) or (
        value.kind == "number:" and other.kind.startswith("number:")
    )


def _like(value: Hashable, other: Value) -> Hashable:
    if not isinstance(value, float):
        return value
    if other.kind == "amount" and isinstance(other.value, tuple):
        return (other.value[0], value)
    if other.kind == "duration" and isinstance(other.value, tuple):
        return (value, other.value[1])
    if other.kind == "time":
        return int(value) * 60
    if other.kind == "date" and isinstance(other.value, frozenset):
        return frozenset((month, int(value)) for month, _ in other.value)
    return value


def _chosen(text: str, choices: Sequence[Sequence[str]]) -> list[Value]:
    values = []
    for number, options in enumerate(choices):
        ordered = sorted({option.lower() for option in options}, key=len, reverse=True)
        pattern = "|".join(r"\s+".join(map(re.escape, option.split())) for option in ordered)
        for match in re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", text, re.IGNORECASE):
            option = " ".join(match[0].lower().split())
            values.append(Value(f"choice:{number}", option, match.start(), match.end()))
    return values


def _month(letters: str) -> int:
    return next(number for number, name in enumerate(_MONTHS, 1) if name.startswith(letters[:3]))


def _minutes(low: str) -> int:
    hours, _, rest = re.split(r"[^\d:]", low)[0].partition(":")
    hour = int(hours) % 12 if re.search(r"[ap]\.?m", low) else int(hours)
    return (hour + (12 if re.search(r"p\.?m", low) else 0)) * 60 + int(rest or 0)


def _frequency(low: str) -> Hashable:
    """Return how often in which time: "twice a week" -> (2, week), "every other day" -> (1/2, day)."""
    period = PERIOD_WORDS.get(low, low.split()[-1])
    first = low.split()[0]
    times = {"once": 1.0, "twice": 2.0, "thrice": 3.0}.get(first) or (_number(low) if "times" in low else 1.0)
    return (times / 2 if "other" in low or "second" in low else times, period)


def _number(low: str) -> float:
    digits = _ENGLISH.digits.search(low)
    if digits is None:
        return float(
            sum(
                {**_NUMBERS, "hundred": 99 if "one" in low else 100}.get(word, 0)
                for word in re.findall(r"[a-z]+", low)
            )
        )
    plain = digits[0]
    if re.fullmatch(r"\d+,\d{1,2}", plain):
        plain = plain.replace(",", ".")
    return float(plain.replace(",", "")[:15])
