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

from stateset_agents.claims.text_checks import FUNCTION_WORDS

MOST_VALUES = 400
"""More values of one text are not read: no answer has as many."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value and where it stands in the text."""

    kind: str
    """`weekday`, `date`, `time`, `amount`, `duration`, `id`, `place`, `status`, `number:NOUN`, ..."""
    value: Hashable
    """In normal form; equal for "five days" and "5 days"."""
    start: int
    end: int


_SMALL = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""
_LARGE = "twenty thirty forty fifty sixty seventy eighty ninety"
_UNITS = {word: number for number, word in enumerate(_SMALL.split(), 1)}
_TENS = {word: 10 * number for number, word in enumerate(_LARGE.split(), 2)}
_COUNTS = {word: float(number) for word, number in {**_UNITS, **_TENS}.items() if number > 1}
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTH_NAMES = "january february march april may june july august september october november december"
_MONTHS = _MONTH_NAMES.split()
_CURRENCIES = {"$": "usd", "€": "eur", "£": "gbp", "dollar": "usd", "buck": "usd", "euro": "eur"}
_CURRENCIES |= {"pound": "gbp", "usd": "usd", "eur": "eur", "gbp": "gbp", "us$": "usd"}

_DIGITS = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d{1,2})?(?![\d])|\d+"
_SPELT = rf"(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(list(_UNITS)[:9])})\b)?|(?:{'|'.join(_UNITS)})(?!\w)"
_NUMBER = rf"(?:{_DIGITS}|(?i:{_SPELT}|(?:a|one) hundred))"
_MONTH = rf"(?:{'|'.join(_MONTHS)}|(?:jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\.?)"
_TH = r"(?:st|nd|rd|th)?"

_APOSTROPHES = "'\u2019"
_PERIOD = "hour|day|week|month|year"

_VALUE = re.compile(
    "|".join(
        rf"(?P<{kind}>{pattern})"
        for kind, pattern in (
            ("iso", r"\b\d{4}-\d\d-\d\d\b"),
            ("numeric", r"\b\d{1,2}[./]\d{1,2}[./](?:\d{4}|\d\d)\b"),
            ("month_day", rf"\b(?i:{_MONTH}) (?:the )?\d{{1,2}}(?i:{_TH})\b(?!:)(?:,? \d{{4}}\b)?"),
            ("day_month", rf"\b(?i:\d{{1,2}}{_TH}(?: of)? {_MONTH})(?!\w)(?:,? \d{{4}}\b)?"),
            ("day", r"\b(?i:\d{1,2}(?:st|nd|rd|th))\b"),
            ("time", r"\b\d{1,2}(?::\d\d)? ?(?i:[ap]\.?m\b\.?|o'clock\b)|\b\d{1,2}:\d\d\b"),
            ("noon", r"\b(?i:noon|midnight)\b"),
            ("money", rf"(?:(?i:\bUS)?[$€£]|\b(?i:usd|eur|gbp)) ?(?:{_DIGITS})"),
            ("worth", rf"(?<!\w){_NUMBER}(?: ?[$€£]| ?(?i:dollars?|bucks?|euros?|pounds?|usd|eur|gbp)\b)"),
            ("percent", rf"(?<!\w){_NUMBER}(?: ?%| ?(?i:percent|per cent)\b)"),
            (
                "duration",
                rf"(?<!\w){_NUMBER}[- ](?i:(?:business |working |calendar |full )?"
                r"(?:second|minute|hour|day|night|week|month|year)s?)\b",
            ),
            ("measure", r"\b(?:\d+(?:\.\d+)?) ?(?:°(?: ?[CF]\b)?)"),
            (
                "weekday",
                rf"\b(?i:{'|'.join(_WEEKDAYS)})\b|\b(?:Mon|Tues?|Wed|Thu(?:rs?)?|Fri|Sat|Sun)\b",
            ),
            ("relative", r"\b(?i:today|tonight|tomorrow|yesterday)\b"),
            (
                "frequency",
                rf"\b(?i:once|twice|thrice|{_NUMBER} times) (?i:(?:a|per|each|every) (?:{_PERIOD}))\b"
                rf"|\b(?i:every (?:other |second )?(?:{_PERIOD})|daily|weekly|monthly|yearly)\b",
            ),
            ("hash", r"#\w+"),
            ("word", rf"[^\W\d_][^\W_]*(?:[{_APOSTROPHES}-][^\W_]+)*|\d+(?:[^\W\d_][^\W_]*(?:-[^\W_]+)*)?"),
        )
    )
)
_STATUSES = {
    **dict.fromkeys(("pending", "backordered", "unshipped", "unresolved"), "pending"),
    **dict.fromkeys(("shipped", "dispatched", "despatched"), "shipped"),
    **dict.fromkeys(("delivered", "arrived"), "delivered"),
    **dict.fromkeys(("cancelled", "canceled"), "cancelled"),
    **dict.fromkeys(("lost",), "lost"),
    **dict.fromkeys(("resolved", "solved", "closed", "settled"), "resolved"),
}
_PREPOSITION = re.compile(r"\b(?:in|at|via|near|through|into)\s+(?:(?:the|our|your|this)\s+)?(?:[a-z]+\s+)?$")
_JOINER = re.compile(
    r"(?:[\u2013\u2014/,&+|-]|\b(?:or|and|to|as well as|plus|then|even|also|in|on)\b|\s)*[$€£]?\s*$",
    re.IGNORECASE,
)

_NO_NOUNS = FUNCTION_WORDS | {"each", "per", "only", "most", "off", "over", "such"}


def find_values(text: str, choices: Sequence[Sequence[str]] = ()) -> tuple[Value, ...]:
    """The typed values of a text, in order; each list of `choices` is one more type.

    "Room 12 is $40 for five days" -> number:room 12, amount (usd, 40), duration (5, day).
    """
    every = (value for match in _VALUE.finditer(text) for value in _read(match, text))
    found = list(islice(every, MOST_VALUES))
    return tuple(sorted([*_joined(found, text), *_chosen(text, choices)], key=lambda value: value.start))


def same_value(first: Value, second: Value) -> bool:
    """Are they equal; dates where they can be the same day?"""
    if first.kind != second.kind:
        return False
    if isinstance(first.value, frozenset) and isinstance(second.value, frozenset):
        return bool(first.value & second.value)
    return first.value == second.value


@lru_cache(maxsize=4096)
def stem(word: str) -> str:
    """Without the endings of plural and tense: "refunds", "refunded", "refunding" -> "refund"."""
    word = word.lower().replace("\u2019", "'").removesuffix("'s")
    for ending, shortest in (("ies", 5), ("ing", 6), ("ed", 5), ("ly", 5), ("es", 5), ("s", 4)):
        if len(word) >= shortest and word.endswith(ending) and not word.endswith("ss"):
            word = word[: -len(ending)] + ("y" if ending == "ies" else "")
            break
    if len(word) > 4 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word


def _read(match: re.Match[str], text: str) -> list[Value]:
    kind, found = str(match.lastgroup), match[0]
    low = found.lower()
    value: Hashable
    if kind in ("iso", "numeric"):
        parts = [int(part) for part in re.split(r"[-./]", found)]
        pairs = {(parts[1], parts[2])} if kind == "iso" else {(parts[0], parts[1]), (parts[1], parts[0])}
        kind, value = "date", frozenset(pair for pair in pairs if pair[0] <= 12)
    elif kind in ("month_day", "day_month", "day"):
        day = next(int(digits) for digits in re.findall(r"\d+", found) if len(digits) < 3)
        letters = re.search(rf"\b{_MONTH}", low)
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
    """What a word may be by itself: an identifier, a number of something, a status, a place."""
    found, low, start, end = match[0], match[0].lower(), match.start(), match.end()
    if found.isdecimal():
        if len(found) >= 5:
            return [Value("id", found, start, end)]
        if (
            re.match(r"[.)]\s", text[end : end + 2])
            and not text[:start].rstrip(" \t\r").strip("\n")[-1:].strip()
        ):
            return []
        return [_number_of(float(found), text, start, end)]
    if low in _COUNTS:
        return [value for value in (_number_of(_COUNTS[low], text, start, end),) if value.kind != "number:"]
    if any(map(str.isdecimal, found)):
        return [Value("id", low, start, end)] if any(map(str.isalpha, found)) else []
    if low in _STATUSES:
        return [Value("status", _STATUSES[low], start, end)]
    if low in _MONTHS and found[0].isupper():
        return [Value("month", low, start, end)]
    before = text[max(0, start - 40) : start]
    if found[0].isupper() and not found.isupper() and _PREPOSITION.search(before):
        return [Value("place", low, start, end)]
    if found[0].isupper() and not found.isupper() and before.rstrip()[-1:] not in ("", ".", "!", "?", ":"):
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


def _joined(found: Sequence[Value], text: str) -> list[Value]:
    """Bare numbers and names take the type of a neighbour that they are joined to: "$10, 20 or 40"."""
    values = list(found)
    places = range(len(values))
    for order, step in ((places, -1), (reversed(places), 1)):
        for index in order:
            value = values[index]
            other = values[index + step] if 0 <= index + step < len(values) else None
            if other is None or not _takes_type(value, other):
                continue
            first, second = (other, value) if step < 0 else (value, other)
            if _JOINER.match(text[first.end : second.start][:24]) and not (
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
    """How often in which time: "twice a week" -> (2, week), "every other day" -> (1/2, day)."""
    period = {"daily": "day", "weekly": "week", "monthly": "month", "yearly": "year"}.get(
        low, low.split()[-1]
    )
    first = low.split()[0]
    times = {"once": 1.0, "twice": 2.0, "thrice": 3.0}.get(first) or (_number(low) if "times" in low else 1.0)
    return (times / 2 if "other" in low or "second" in low else times, period)


def _number(low: str) -> float:
    digits = re.search(_DIGITS, low)
    if digits is None:
        return float(
            sum(
                {**_UNITS, **_TENS, "hundred": 99 if "one" in low else 100}.get(word, 0)
                for word in re.findall(r"[a-z]+", low)
            )
        )
    plain = digits[0]
    if re.fullmatch(r"\d+,\d{1,2}", plain):
        plain = plain.replace(",", ".")
    return float(plain.replace(",", "")[:15])
