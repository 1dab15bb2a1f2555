"""Second values: what stands beside a fact and takes it back, and what does not.

"Monday or Friday" tells no day. "It was due Monday, it comes Friday" tells Friday, since Monday is past; so
it is where the other value is denied, supposed, corrected, the user's own, or about something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stateset_agents.claims.mentions import Mention, Replies, denied_after
from stateset_agents.claims.statements import NEARBY, Modality, Statements
from stateset_agents.claims.typed_values import Value, same_value
from stateset_agents.claims.value_phrases import is_altered, rate_unit
from stateset_agents.claims.value_roles import (
    DAYS,
    PARTS,
    asked_attributes,
    contents,
    differs,
    is_of_another,
    own_subject,
    said_of,
    shape,
)
from stateset_agents.claims.value_sums import adds_up

_MOST_OTHERS = 3
"""Values about something else that may stand beside a fact."""
_MOST_WITHDRAWN = 1
"""Values that may be said first and corrected afterwards; more are guesses."""

_RANKS: Mapping[object, int] = {
    "pending": 0,
    "resolved": 2,
    "shipped": 1,
    "delivered": 2,
    "cancelled": 2,
    "lost": 2,
}
_STATED = re.compile(
    r"(?:\b(?:is|was|are|were|has|have|had|been|got|status|state)|'s)\W+(?:(?!be\b|to\b|being\b"
    r"|not\b)\w+\W+){0,2}$"
)

_DASH = "\u2013\u2014-"
_JOINED = re.compile(
    rf"\W*(?:(?:,|and|or|either|/|to|till|until|through|on|by|in|at|the|maybe|perhaps|even|possibly|else)\b"
    rf"|[/,|&{_DASH}]|\s)+[$€£]?\s*"
)
_OR = re.compile(rf"\b(?:or|either|to|till|until|through)\b|[/|{_DASH}]")
_EITHER = re.compile(r"\b(?:or|either)\b|/")
_OR_BEFORE = re.compile(
    r"(?:\b(?:or|either)\s+(?:(?:on|in|at|by|the|a|an|for|even|maybe|perhaps)\s+){0,3}|[^\W\d]\s?/\s?)$"
)
_OR_OTHER = re.compile(
    r"\s?,?\s?or\s+(?:on |in |by |at )?(?:the (?:day|week|next|one|following|other)|some|another|any|other"
    r"|whenever|whatever|whichever|wherever|somewhere|maybe|perhaps|possibly|not|something|anything|else"
    r"|thereabouts|later)\b"
)
_OR_CLAUSE = re.compile(r"\W*or\b")
_NO_ITEM = (
    r"(?!(?:you|we|i|they|he|she|it|if|call|contact|please|let|just|simply|earlier|sooner|less|so|more"
    r"|better|fewer|below|above|have|get|use|ask|write|reply|visit|come|whether|rather|before|after)\b)"
)
_OR_WORD = re.compile(rf"\s?/\s?[^\W\d]|\s+or\s+{_NO_ITEM}\w")
_OR_ITEM = re.compile(rf"\s?,?\s?or\s+(?:the |a |in |at |on |by )?{_NO_ITEM}[\w'-]+\s?(?:[.,;:!?)]|$)")
_ITEM = r"(?:[\w'-]{1,30} ){0,2}[\w'-]{1,30}"
_LIST_AFTER = re.compile(
    rf"(?:\s?,\s?{_ITEM}){{1,8}}\s?,?\s+(?:and|or)\s+[\w'-]|\s?,\s?[\w'-]+\s?,\s?[\w'-]+\s?(?:[.,;!?]|$)"
)
_LIST_BEFORE = re.compile(rf"[\w'-]\s?,\s?{_ITEM}\s?,?\s+(?:and|or)\s+(?:(?:the|a|an)\s+)?$")

_CORRECTION = re.compile(
    rf"[\s,.;:{_DASH}]*(?:sorry|i mean|i meant|no|correction|rather|actually|make that|scratch that|oops"
    rf"|pardon|well|wait)\b[\s,.;:{_DASH}]*(?:[\w']+[\s,.;:{_DASH}]+){{0,4}}"
)
_PART = re.compile(r" (?:out )?of (?:the |your |those |these )?[$€£\d]")
_WHOLE = re.compile(r"(?:[\d%] |^\W*(?:and |so |but )?)(?:out )?of (?:the |your |those |these )?$")
_DEALT = re.compile(
    r"\b(?:one (?!(?:is|has|costs?|comes?)\b)\w|the (?:next|last|other|first|second)|others|some(?:one"
    r"|body)?)\b"
)
"""Values dealt out to whoever takes them: "one gets $30, the next $40"."""
_REST = re.compile(r"\b(?:the|all|your|our) (?:other|remaining) (?!half\b|one\b)[^\W\d]")
_ADDED = re.compile(r"\b(?:another|a further|an extra|an additional) $")
_OFFER = re.compile(
    r"\bif (?:that|this|it|they|you) (?:do|does|is|are|ca|can|wo|will)(?:n't| ?not)\b|"
    r"\b(?:if|should|in case|in the event) (?:that|this|it|you|the \w+)(?: (?:do|does|is|are|can|will"
    r"|would))?(?:n't| not)? "
    r"(?:\w+ )?(?:suit|work|fit|okay?|convenient|prefer|rather|like|miss)"
)
"""An alternative that is offered: "if that doesn't suit you, Saturday"."""
_SAYS = re.compile(r" (?:is|was|has|will)\b")
_WORD = re.compile(r"[\w']+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fact:
    """How a fact is told, as far as second values are compared with it."""

    kind: str
    values: frozenset[Value]
    attributes: frozenset[str]
    """What it is said of: as the user asked, or else as the agent says."""
    past: bool
    units: frozenset[str | None]
    """What it is the price of, as in "$20 per ticket"."""
    days: frozenset[str]
    clauses: frozenset[tuple[int, int]]
    """Reply and clause of each mention."""
    contents: frozenset[frozenset[str]]
    """Content words beside each mention."""
    places: tuple[tuple[int, int, int], ...]
    """Reply, start and end of each mention."""
    last: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Second:
    """A value of the fact's type that differs."""

    value: Value
    reply: int
    statements: Statements
    modality: Modality


def has_second_value(live: Sequence[Mention], replies: Replies, covered: frozenset[tuple[int, int]]) -> bool:
    """Does a value of the fact's type stand beside it that nothing excuses?

    `covered`: where the values of the facts themselves stand.
    """
    for kind in {value.kind for mention in live for value in mention.values}:
        fact = _how_told(kind, live, replies)
        seconds = [
            _Second(value, number, statements, statements.at(value.start))
            for number, (statements, values) in enumerate(
                zip(replies.statements, replies.values, strict=True)
            )
            for value in values
            if value.kind == kind
            and (number, value.start) not in covered
            and not any(same_value(value, other) for other in (*fact.values, *replies.expected))
            and _rules_out(value, fact, statements)
        ]
        if _take_back(seconds, fact, live, replies):
            return True
    return False


def _take_back(seconds: Sequence[_Second], fact: _Fact, live: Sequence[Mention], replies: Replies) -> bool:
    denied = {
        second.value.value: (second.reply, second.value.start)
        for second in seconds
        if second.modality.denials
    }
    others: set[object] = set()
    withdrawn: set[object] = set()
    for second in seconds:
        if _is_excused(second, fact, replies) or _is_part(second, fact, replies):
            continue
        position = (second.reply, second.value.start)
        if denied.get(second.value.value, (-1, 0)) > position or _is_corrected(
            second, live, replies, fact.last
        ):
            withdrawn.add(second.value.value)
        elif _is_other(second, fact, replies):
            others.add(second.value.value)
        else:
            return True
    return len(others) > _MOST_OTHERS or len(withdrawn) > _MOST_WITHDRAWN


def _how_told(kind: str, live: Sequence[Mention], replies: Replies) -> _Fact:
    mentions = [(mention, replies.statements[mention.reply]) for mention in live]
    values = [
        (value, statements)
        for mention, statements in mentions
        for value in mention.values
        if value.kind == kind
    ]
    asked = asked_attributes(kind, replies)
    stated = frozenset(name for value, statements in values for name in said_of(value, statements))
    attributes = asked & stated or (asked - PARTS if asked - PARTS else asked) or stated
    return _Fact(
        kind=kind,
        values=frozenset(value for value, _ in values),
        attributes=attributes,
        past=all(mention.modality.past for mention in live),
        units=frozenset(rate_unit(value.start, value.end, statements) for value, statements in values),
        days=frozenset(
            day for mention, statements in mentions for day in DAYS.findall(statements.clause(mention.start))
        ),
        clauses=frozenset((m.reply, statements.clause_number(m.start)) for m, statements in mentions),
        contents=frozenset(contents(m.start, m.end, statements) for m, statements in mentions),
        places=tuple((mention.reply, mention.start, mention.end) for mention in live),
        last=max((mention.reply, mention.start) for mention in live),
    )


def _rules_out(value: Value, fact: _Fact, statements: Statements) -> bool:
    """Can both not be true? Identifiers of another shape may, and earlier stages of an order."""
    if fact.kind == "id":
        return any(shape(value.value) == shape(other.value) for other in fact.values)
    if fact.kind == "status":
        if not _STATED.search(statements.low[max(0, value.start - 40) : value.start]):
            return False
        rank = _RANKS.get(value.value, 0)
        return any(rank == 0 or rank >= _RANKS.get(other.value, 0) for other in fact.values)
    return True


def _is_excused(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """Is it denied, asked, supposed, past, or the user's?"""
    value, statements, modality = second.value, second.statements, second.modality
    if modality.denials or modality.supposed or denied_after(statements, value.end):
        return True
    sentence = statements.sentence(value.start)
    if _OFFER.search(statements.low, max(sentence.start, value.start - NEARBY), value.start):
        return True
    if (
        modality.asked
        and not _is_fragment(value, statements)
        and not _OR_CLAUSE.match(statements.clause(value.start))
    ):
        return True
    stated = said_of(value, statements)
    is_different = differs(stated, fact.attributes)
    if modality.past and (is_different or not fact.past):
        return True
    if (value.kind, value.value) not in replies.known:
        return False
    if is_different:
        return True
    return (not stated or fact.kind == "id") and not _is_parallel(second, fact)


def _is_other(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """Is it about something else: a bound, another attribute, another day or another thing?"""
    value, statements = second.value, second.statements
    if _is_about_another(second, fact, replies):
        return True
    if second.modality.doubted:
        return False
    if differs(said_of(value, statements), fact.attributes) or is_of_another(value, second.reply, replies):
        return True
    before, _ = statements.around(value.start, value.end)
    if _ADDED.search(before) or is_altered(value.start, value.end, value.kind, statements, replies.limits):
        return True
    if _is_part_or_whole(value, statements) or rate_unit(value.start, value.end, statements) not in {
        None,
        *fact.units,
    }:
        return True
    if fact.kind == "time":
        days = set(DAYS.findall(statements.clause(value.start)))
        if days and fact.days and not days & fact.days:
            return True
    return False


def _is_about_another(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """Is its clause about a thing that neither the question nor a clause of the fact names?"""
    value, statements = second.value, second.statements
    if value.kind.startswith("choice:"):  # of these an answer may name one, whatever it says of the others
        return False
    before, _ = statements.around(value.start, value.end)
    if _REST.search(before):
        return True
    around = "".join(statements.around(value.start, value.end))
    subject = own_subject(value.start, value.end, fact.attributes, statements)
    if not subject or subject in replies.questions.union(*fact.contents) or _DEALT.search(around):
        return False
    return not any(_is_in_a_row(second, place) for place in fact.places)


def _is_in_a_row(second: _Second, place: tuple[int, int, int]) -> bool:
    """Is it listed with the fact: "Monday and Friday"?"""
    (reply, start, end), value, low = place, second.value, second.statements.low
    gap = low[value.end : start] if value.end <= start else low[end : value.start]
    if "." in gap and _SAYS.match(low, max(value.end, end)):  # "It is K27. K28 is the chair."
        return False
    return reply == second.reply and len(gap) <= NEARBY and bool(_JOINED.fullmatch(gap))


def _is_part_or_whole(value: Value, statements: Statements) -> bool:
    """ "$15 of the $95" """
    before, after = statements.around(value.start, value.end)
    return bool(_PART.match(after) or _WHOLE.search(before))


def _is_part(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """Is it a term of a sum or product with the fact, and not said as the fact: "$20 each, $40 for both"?"""
    stands_alone = not contents(second.value.start, second.value.end, second.statements)
    return (stands_alone or not _is_parallel(second, fact)) and any(
        adds_up(value, second.value, replies) for value in fact.values
    )


def _is_fragment(value: Value, statements: Statements) -> bool:
    """ "Monday?" """
    before, after = statements.around(value.start, value.end)
    return len(_WORD.findall(before + after)) <= 1


def _is_parallel(second: _Second, fact: _Fact) -> bool:
    """Does its clause say of it what another clause says of the fact?"""
    clause = (second.reply, second.statements.clause_number(second.value.start))
    if clause in fact.clauses:
        return False
    here = contents(second.value.start, second.value.end, second.statements)
    return any(2 * len(here & there) >= len(here | there) for there in fact.contents)


def _is_corrected(second: _Second, live: Sequence[Mention], replies: Replies, last: tuple[int, int]) -> bool:
    """Is it taken back before the fact is told: "Thursday, sorry, Friday"?"""
    end = second.value.end
    for reply in range(second.reply, last[0] + 1):
        for span in replies.statements[reply].retractions:
            if (second.reply, second.value.start) <= (reply, span.end) and (reply, span.start) <= last:
                return True
    following = [m.start for m in live if m.reply == second.reply and end <= m.start <= end + 60]
    return bool(following) and bool(_CORRECTION.fullmatch(second.statements.low, end, following[0]))


def is_alternative(mention: Mention, replies: Replies) -> bool:
    """Is the fact joined to another value by "or", a slash, a dash or "to"?"""
    statements = replies.statements[mention.reply]
    low = statements.low
    before, after = low[max(0, mention.start - 60) : mention.start], low[mention.end : mention.end + 60]
    if _OR_BEFORE.search(before) or _OR_OTHER.match(after) or _OR_ITEM.match(after):
        return True
    if not mention.values:
        return bool(_OR_WORD.match(after) or _LIST_AFTER.match(after) or _LIST_BEFORE.search(before))
    kinds = {value.kind for value in mention.values}
    for value in _neighbours(mention, replies.values[mention.reply]):
        gap = low[value.end : mention.start] if value.end <= mention.start else low[mention.end : value.start]
        joins = _OR.search(gap) if value.kind in kinds else _EITHER.search(gap)
        if len(gap) <= 30 and joins and _JOINED.fullmatch(gap):
            modality = statements.at(value.start)
            expected = any(same_value(value, other) for other in replies.expected)
            if not (expected or modality.denials or modality.past):
                return True
    return False


def _neighbours(mention: Mention, values: Sequence[Value]) -> list[Value]:
    """The last value before the mention and the first after it."""
    before = [value for value in values if value.end <= mention.start][-1:]
    return before + [value for value in values if value.start >= mention.end][:1]


_FRAME_WORDS = 12
"""Longer clauses are no frame that somebody fills over and over; it bounds the work, too."""
_MANY = 2
_FILLERS = frozenset(
    ("a", "an", "the", "and", "or", "but", "also", "even", "then", "in", "on", "at", "by", "for")
)


def is_one_of_many(live: Sequence[Mention], replies: Replies) -> bool:
    """Does a fact of no type fill a frame that two other words fill, too?

    "It is free. It is dear. It is cheap." names everything to hit something: ("it", "is", "free") is the
    frame (("it", "is"), ()) filled by ("free",).
    """
    clauses = {
        clause
        for statements in replies.statements
        for span in statements.clauses
        if (clause := _frame_words(statements.low[span.start : span.end]))
    }
    phrases = {tuple(_WORD.findall(replies.statements[m.reply].low[m.start : m.end])) for m in live}
    expected = phrases | {tuple(str(value.value).split()) for value in replies.expected}
    longest = max(map(len, phrases))
    frames: dict[tuple[tuple[str, ...], tuple[str, ...]], set[tuple[str, ...]]] = {}
    for clause in clauses:
        for length in range(1, longest + 1) if len(clause) <= _FRAME_WORDS + longest else ():
            for start in range(len(clause) - length + 1):
                end = start + length
                frames.setdefault((clause[:start], clause[end:]), set()).add(clause[start:end])
    return any(fillings & phrases and len(fillings - expected) >= _MANY for fillings in frames.values())


def _frame_words(clause: str) -> tuple[str, ...]:
    found = _WORD.findall(clause[:400])
    while found and found[0] in _FILLERS:
        found.pop(0)
    return tuple(found)
