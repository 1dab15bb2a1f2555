"""Operators beside a value that make another value of it: "at least $40", "half of $40", "$40 plus tax".

A bound is told only where it is what was asked for ("How long do I have?": "up to 30 days"), or a deadline
("by Friday", "within 5 days"). `is_altered` is called for facts and for the values beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

from stateset_agents.claims.english import Patterns
from stateset_agents.claims.statements import Statements
from stateset_agents.claims.typed_values import PERIOD_WORDS, stem


class Limit(Enum):
    """A bound that a question asks for."""

    LEAST = "least"
    """ "From when on can I check in?" """
    MOST = "most"
    """ "How many days do I have?" """
    DIFFERENCE = "difference"
    """ "By how much is it reduced?" """


_ENGLISH = Patterns("value_phrases")
_ASKS = {limit: getattr(_ENGLISH, f"asks_{limit.value}") for limit in Limit}
_TIMES = ("weekday", "date", "time", "relative", "month")
PERIODS = frozenset(map(stem, ("hour", "day", "night", "week", "month", "year")))
_OPEN_QUOTE = re.compile(r"[\"\u201c\u00ab][^\"\u201c\u201d\u00ab\u00bb]*$")
_CLOSE_QUOTE = re.compile(r"[^\"\u201c\u201d\u00ab\u00bb]*[\"\u201d\u00bb]")


def asked_limits(texts: Iterable[str]) -> frozenset[Limit]:
    """The bounds that questions ask for: "How many days do I have?" -> {MOST}."""
    return frozenset(limit for text in texts for limit, asks in _ASKS.items() if asks.search(text.lower()))


def is_altered(start: int, end: int, kind: str, statements: Statements, limits: frozenset[Limit]) -> bool:
    """True where an operator beside the value there makes it another value.

    `kind` is the value's, "" for words that no type knows; `limits` are the bounds that may stand for it.
    """
    sentence = statements.sentence(start)
    low = statements.low
    before = low[max(sentence.start, start - 80) : start]
    after = low[end : min(sentence.end, end + 40)]
    if _ENGLISH.near.search(before):
        return True
    is_label = kind in ("", "id", "place", "status") or kind.startswith(("number:", "choice:"))
    if is_label and not low[start : start + 1].isdigit():
        return bool(_ENGLISH.compared.search(before))
    if _ENGLISH.exact.search(before):
        return False
    other = _ENGLISH.other_after.match(after)
    if other and not (Limit.DIFFERENCE in limits and other[0].endswith(" than")):
        return True
    if _ENGLISH.other_before.search(before) or _ENGLISH.fraction_after.match(after):
        return True
    is_time = kind in _TIMES
    if kind == "weekday" and _ENGLISH.day_after.match(after):
        return True
    if (
        not is_time
        and kind != "duration"
        and (
            _ENGLISH.plus_after.match(after)
            or (Limit.DIFFERENCE not in limits and _ENGLISH.difference.search(before))
        )
    ):
        return True
    if kind != "percent" and _ENGLISH.off_after.match(after):
        return True
    if kind == "duration" and Limit.MOST in limits and _ENGLISH.more_time.search(before):
        return True
    bound = _bound(before, after, kind)
    if bound is Limit.MOST and _ENGLISH.fewer.search(before):
        return True
    if bound is None or bound in limits:
        return False
    is_deadline = bound is Limit.MOST and (
        (is_time and not _ENGLISH.less_time.search(before) and not _ENGLISH.less_before.search(before))
        or (kind == "duration" and not re.search(r"\b(?:less|fewer|shorter|under|below)\b[^.]*$", before))
    )
    return not is_deadline


def is_indefinite(start: int, statements: Statements) -> bool:
    """True for no certain day ("on a Friday", "every Friday"), and for a name ("Black Friday")."""
    return bool(_ENGLISH.indefinite.search(statements.low, max(0, start - 30), start))


def _bound(before: str, after: str, kind: str) -> Limit | None:
    """Return the bound that words beside a value make; "not more than" is the other than "more than"."""
    is_time = kind in _TIMES
    timed = is_time or kind == "duration"
    for limit, bounds in (
        (Limit.LEAST, (_ENGLISH.more_before, *((_ENGLISH.more_time,) if is_time else ()))),
        (Limit.MOST, (_ENGLISH.less_before, *((_ENGLISH.less_time,) if is_time else ()))),
    ):
        for pattern in bounds:
            if match := pattern.search(before):
                earlier = before[: match.start()].removesuffix("until ").removesuffix("till ")
                negated = earlier == before[: match.start()] and bool(_ENGLISH.negated.search(earlier))
                return (Limit.MOST if limit is Limit.LEAST else Limit.LEAST) if negated else limit
    if match := None if is_time else _ENGLISH.subject_bound.search(before):
        return Limit.LEAST if match[1] else Limit.MOST
    if not is_time and _ENGLISH.from_on.search(before):
        return Limit.LEAST
    if _ENGLISH.more_after.match(after):
        return Limit.LEAST
    if _ENGLISH.less_after.match(after) or (timed and _ENGLISH.deadline.search(before)):
        return Limit.MOST
    return None


def counted_nouns(text: str) -> frozenset[str]:
    """Stems of what a text counts: "two tickets" -> {"ticket"}."""
    return frozenset(stem(noun) for nouns in _ENGLISH.counted.findall(text.lower()) for noun in nouns)


def is_cited(start: int, end: int, kind: str, statements: Statements) -> bool:
    """True for a part of a title or name, or a word spoken of: "Black Friday", 'the word "Friday"'."""
    sentence = statements.sentence(start)
    before = statements.text[max(sentence.start, start - 80) : start]
    after = statements.text[end : min(sentence.end, end + 80)]
    quoted = _OPEN_QUOTE.search(before)
    if quoted and (closed := _CLOSE_QUOTE.match(after)):
        if _ENGLISH.medium.search(before) or _ENGLISH.words_of.match(after):
            return True
        if (
            re.search(r"\w", quoted[0])
            and re.search(r"\w", closed[0] + quoted[0])
            and not _ENGLISH.shown.search(before)
        ):
            return True
    if _ENGLISH.titled.search(before.lower()):
        return True
    return kind in ("weekday", "amount") and bool(
        _ENGLISH.name_after.match(after) or (kind == "weekday" and _ENGLISH.name_before.search(before))
    )


def rate_unit(start: int, end: int, statements: Statements) -> str | None:
    """Stem of the unit that a price is for: "$20 per ticket" -> "ticket", "$20 each" -> "each"."""
    sentence = statements.sentence(start)
    match = _ENGLISH.rate.match(statements.low, end, min(sentence.end, end + 40))
    match = match or _ENGLISH.rate_before.search(statements.low, max(sentence.start, start - 40), start)
    if match is None:
        return None
    word = next(group for group in match.groups() if group)
    return stem(PERIOD_WORDS.get(word, word))
