"""Finds where a fact stands in what an agent said, by its words or by its value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stateset_agents.claims.statements import (
    MOST_READ,
    Modality,
    Statements,
    TextSpan,
    read_statements,
)
from stateset_agents.claims.typed_values import Value, find_values, same_value
from stateset_agents.claims.value_phrases import Limit


@dataclass(frozen=True, slots=True)
class Mention:
    """A place where a fact's wording or value stands."""

    reply: int
    start: int
    end: int
    modality: Modality
    values: tuple[Value, ...]
    """The typed values in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """The agent's replies as they were read, and what their values are compared with."""

    statements: Sequence[Statements]
    values: Sequence[Sequence[Value]]
    """The typed values of each reply, in order."""
    sound: frozenset[int]
    """Numbers of the replies that may tell something."""
    expected: Sequence[Value]
    """The facts that are typed values."""
    known: frozenset[tuple[str, object]]
    """Kind and value of what the user said or the context holds."""
    questions: frozenset[str]
    """Stems of what the user asked."""
    topic: frozenset[str]
    """Stems of all that the user said."""
    limits: frozenset[Limit]
    """The bounds that the user asked for."""
    counts: frozenset[float]
    """Numbers in what the user said."""
    counted: frozenset[str]
    """Stems of the nouns that the user counted: of "two tickets"."""
    persons: frozenset[str]
    """Names with a title, of the user's and of the facts, if the user named one."""


_NEGATIVE = re.compile(r"(?:not|no|never|cannot) ", re.IGNORECASE)


@lru_cache(maxsize=512)  # a score reads the same reply for each fact
def read_values(text: str, choices: tuple[tuple[str, ...], ...] = ()) -> tuple[Value, ...]:
    """The typed values of the part of the text that is read."""
    return find_values(text[:MOST_READ], choices)


def wanted_value(wording: str, choices: tuple[tuple[str, ...], ...] = ()) -> Value | None:
    """The typed value that the wording is as a whole."""
    text = wording.strip()
    return next((value for value in read_values(text, choices) if value.end - value.start == len(text)), None)


def phrase_spans(wording: str, statements: Statements, *, plural: bool = False) -> Iterator[TextSpan]:
    """Yield where the words of the wording stand one after another; also in `plural`, if asked for."""
    parts = [word for word, _, _ in read_statements(wording).words]
    words = statements.words
    for first in range(len(words) - len(parts) + 1):
        if all(_same(words[first + number][0], part, plural) for number, part in enumerate(parts)):
            yield TextSpan(words[first][1], words[first + len(parts) - 1][2])


def _same(word: str, part: str, plural: bool) -> bool:
    """A price or percentage also counts as its bare number, so "20" is told by "$20"."""
    return part in (word, word.strip("$€£%"), word.removesuffix("'s")) or (plural and word == f"{part}s")


def find_mentions(
    wordings: Sequence[str], replies: Replies, choices: tuple[tuple[str, ...], ...], *, most: int
) -> list[Mention]:
    """The mentions of a fact in all replies, in order, up to `most` of each."""
    mentions = []
    fact_values = [value for wording in wordings if (value := wanted_value(wording, choices)) is not None]
    for number, (statements, values) in enumerate(zip(replies.statements, replies.values, strict=True)):
        spans = {span for wording in wordings for span in phrase_spans(wording, statements)}
        for value in values:
            if any(other.kind != "number:" and same_value(value, other) for other in fact_values):
                spans.add(TextSpan(value.start, value.end))
        spans = set(sorted(spans)[:most])
        places = {span: statements.at(span.start) for span in spans}
        for wording in wordings:
            places |= {
                span: modality
                for span, modality in _denials(wording, statements)
                if not any(other.start <= span.start and span.end <= other.end for other in spans)
            }
        for start, end in sorted(places)[:most]:
            inside = tuple(value for value in values if value.start < end and start < value.end)
            mentions.append(Mention(number, start, end, places[TextSpan(start, end)], inside))
    return mentions


def _denials(wording: str, statements: Statements) -> Iterator[tuple[TextSpan, Modality]]:
    """Yield the places of what a fact that is a denial ("not eligible") denies, and of the opposite.

    "You aren't eligible" tells it, and "you are eligible" denies it.
    """
    denied = _NEGATIVE.match(wording.strip())
    for span in phrase_spans(wording.strip()[denied.end() :], statements) if denied else ():
        modality = statements.at(span.start)
        yield span, modality._replace(denials=0 if modality.denials % 2 else 1)
