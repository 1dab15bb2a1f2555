"""Decides which facts an agent's replies tell, and which phrases a text claims.

A fact is told by an assertion that stands alone: a second value of its type takes it back, unless that one is
denied, past, about something else, or the user's (`value_roles.py`). Called by the ready rewards and the
rule-based user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from stateset_agents.claims.english import ENGLISH, Patterns, word_list, word_table
from stateset_agents.claims.mentions import (
    Mention,
    Replies,
    find_mentions,
    phrase_spans,
    read_values,
    wanted_value,
)
from stateset_agents.claims.statements import Statements, TextSpan, read_statements
from stateset_agents.claims.text_checks import FUNCTION_WORDS
from stateset_agents.claims.typed_values import MOST_VALUES, Value, same_value, stem
from stateset_agents.claims.value_phrases import (
    asked_limits,
    counted_nouns,
    is_altered,
    is_cited,
    is_indefinite,
)
from stateset_agents.claims.value_roles import (
    PERSON,
    find_counts,
    has_second_value,
    is_alternative,
    is_of_another,
    is_one_of_many,
)
from stateset_agents.types.comparison import composed

_ENGLISH = Patterns("fact_status")
_NOUNS = word_table("nouns")
_QUESTIONS = word_table("questions")
_ALL_NOUNS = frozenset(noun for nouns in _NOUNS.values() for noun in nouns.split())
_ANY = word_list("any")


def is_deferred(mention: Mention, replies: Replies) -> bool:
    """True where words after the mention say that what it would answer is still to come, or is not known.

    "The date will be announced", "how much you get is up to your bank": a value before such words was said of
    something else. What is put off is named by a noun of the value's type, by one of the question, or by a
    question word, so "the driver will tell you the hour" takes no day back.
    """
    kinds = {value.kind for value in mention.values} or {""}
    later = range(mention.reply, len(replies.statements))
    starts = {number: mention.end if number == mention.reply else 0 for number in later}
    return any(
        _puts_off(kind, start, replies.statements[number], replies)
        for number, start in starts.items()
        for kind in kinds
    )


def _puts_off(kind: str, start: int, statements: Statements, replies: Replies) -> bool:
    named = kind if kind in _NOUNS else "label"
    questions, mine = _QUESTIONS[named], frozenset(map(stem, _NOUNS[named].split()))
    if named == "label":
        mine &= replies.questions
    known_words = replies.topic | mine | _ANY
    asked_words = {word for word in replies.questions if word not in _ALL_NOUNS | FUNCTION_WORDS} | mine
    asks = re.compile(rf"\b(?:{questions}) (?:you|it|the|your|they|our|we|i|is (?:right|due|best))\b")
    for match in _ENGLISH.nothing.finditer(statements.low, start):
        words = " ".join(filter(None, match.groups()))
        if _is_said(match, statements) and known_words.issuperset(map(stem, _ENGLISH.about.findall(words))):
            return True
    for match in _ENGLISH.put_off.finditer(statements.low, start):
        words = match["subject"] or match["object"] or match["matter"] or match["unknown"] or ""
        if not _is_said(match, statements):
            continue
        head = _ENGLISH.asking.match(words) if match["subject"] else None
        is_asked = asks.match(words) if head else asks.search(words)  # "let you know when" puts nothing off
        if is_asked and not (match["object"] and questions == "when"):
            return True
        if match["object"] and _ENGLISH.instead.search(words):
            return True
        wide = match["firm"] or (match["subject"] and not match["passed"] and not match["shown"])
        if any(
            stem(noun) in (asked_words if wide else mine) and (not other or stem(other) in known_words)
            for noun, other in _ENGLISH.named.findall(head[0] if head else _ENGLISH.within.split(words)[0])
        ):
            return True
    return False


def _is_said(match: re.Match[str], statements: Statements) -> bool:
    """True where the match is no question and under no condition."""
    modality = statements.at(match.start())
    return not modality.asked and (not modality.supposed or "would" in match[0])


_MOST_MENTIONS = 100
"""A fact that stands there more often is stuffed in, not told; it bounds the work, too."""

_CHANGES = ("weekday", "date", "time", "amount", "percent", "duration", "number:")


class FactStatus(Enum):
    """Says what the replies do with a fact."""

    TOLD = "told"
    NAMED = "named"
    """The fact stands there, but as one of several values, denied, doubted, supposed, asked or taken back."""
    ABSENT = "absent"


def fact_statuses(
    facts: Mapping[str, Sequence[str]],
    replies: Sequence[str],
    *,
    sound: Iterable[int] | None = None,
    user_texts: Sequence[str] = (),
    shown_texts: Sequence[str] = (),
    choices: Sequence[Sequence[str]] = (),
) -> dict[str, FactStatus]:
    """Return how each fact (name -> accepted wordings) fares in the agent's `replies`.

    `sound`: which replies may tell a fact, all of them unless given; values in the others still count as
    second ones. `user_texts` is what the user said, `shown_texts` other texts whose values the agent may
    repeat, each list of `choices` a type of values of the user's own.

        fact_statuses({"day": ("Friday",)}, ["It comes Monday or Friday."])  ->  {"day": FactStatus.NAMED}
    """
    facts, replies, user_texts = composed(facts), composed(replies), composed(user_texts)
    types = tuple(tuple(options) for options in composed(choices))
    shown_texts = composed(shown_texts)
    known_values = [value for text in (*user_texts, *shown_texts) for value in read_values(text, types)]
    expected_values = [wanted_value(wording, types) for wordings in facts.values() for wording in wordings]
    conditions = frozenset(
        stem(word)
        for text in user_texts
        for clause in _ENGLISH.condition.findall(text.lower())
        for word in clause.split()
    )
    read = Replies(
        statements=[read_statements(text, conditions) for text in replies],
        values=[read_values(text, types) for text in replies],
        sound=frozenset(range(len(replies)) if sound is None else sound),
        expected=[value for value in expected_values if value is not None],
        known=frozenset((value.kind, value.value) for value in known_values),
        questions=frozenset(stem(word) for text in user_texts for word in _questions(text)),
        topic=frozenset(stem(word) for text in user_texts for word, _, _ in read_statements(text).words),
        limits=asked_limits(user_texts),
        counts=frozenset(count for text in user_texts for count in find_counts(text.lower())),
        counted=frozenset(noun for text in user_texts for noun in counted_nouns(text)),
        persons=_persons(user_texts, facts),
    )
    mentions = {
        name: find_mentions(wordings, read, types, most=_MOST_MENTIONS + 1)
        for name, wordings in facts.items()
    }
    covered = frozenset(
        (mention.reply, value.start)
        for group in mentions.values()
        for mention in group
        for value in mention.values
    )
    return {name: _fact_status(group, read, covered) for name, group in mentions.items()}


def _questions(text: str) -> Iterator[str]:
    """The words of the sentences that ask; of all where none does."""
    statements = read_statements(text)
    asking = [
        span for span in statements.sentences if statements.low[span.start : span.end].rstrip().endswith("?")
    ]
    for span in asking or statements.sentences:
        yield from re.findall(r"[\w']+", statements.low[span.start : span.end])


def _persons(user_texts: Iterable[str], facts: Mapping[str, Sequence[str]]) -> frozenset[str]:
    users = [name for text in user_texts for name in PERSON.findall(text.lower())]
    wordings = (wording.lower() for wordings in facts.values() for wording in wordings)
    return frozenset([*users, *(name for text in wordings for name in PERSON.findall(text))] if users else ())


def _fact_status(
    mentions: Sequence[Mention], replies: Replies, covered: frozenset[tuple[int, int]]
) -> FactStatus:
    if not mentions:
        return FactStatus.ABSENT
    if len(mentions) > _MOST_MENTIONS or any(len(values) >= MOST_VALUES for values in replies.values):
        return FactStatus.NAMED
    live = [mention for mention in mentions if _is_live(mention, replies)]
    if not live or _is_contradicted(mentions, live, replies) or has_second_value(live, replies, covered):
        return FactStatus.NAMED
    typed = any(mention.values for mention in live)
    return FactStatus.NAMED if not typed and is_one_of_many(live, replies) else FactStatus.TOLD


def _is_live(mention: Mention, replies: Replies) -> bool:
    """True where a sound reply asserts the mention, for itself, and does not take it back."""
    statements = replies.statements[mention.reply]
    return (
        mention.reply in replies.sound
        and mention.modality.asserted
        and not statements.is_denied_after(mention.end)
        and not _is_to_come(mention, statements)
        and not _is_another_value(mention, replies)
        and not is_alternative(mention, replies)
        and not _is_retracted(mention, replies)
        and not is_deferred(mention, replies)
        and not _is_over(mention, replies)
    )


def _is_another_value(mention: Mention, replies: Replies) -> bool:
    """True where an operator beside it makes another value of it, or it is said of something else."""
    statements = replies.statements[mention.reply]
    value = next(iter(mention.values), Value("", "", mention.start, mention.end))
    start, end = min(mention.start, value.start), max(mention.end, value.end)
    return (
        is_altered(mention.start, end, value.kind, statements, replies.limits)
        or is_cited(mention.start, end, value.kind, statements)
        or (value.kind == "weekday" and is_indefinite(mention.start, statements))
        or is_of_another(replace(value, start=start, end=end), mention.reply, replies)
    )


def _is_to_come(mention: Mention, statements: Statements) -> bool:
    """A status that is not reached yet: "it will be shipped", "waiting to be shipped"."""
    before = statements.low[max(0, mention.start - 30) : mention.start]
    reached = any(value.kind == "status" for value in mention.values) or (
        not mention.values and statements.low[mention.start : mention.end].endswith("ed")
    )
    return reached and bool(_ENGLISH.to_come.search(before))


def _is_over(mention: Mention, replies: Replies) -> bool:
    """True where it tells what was, and the user asks for what is: "the fee was $25 when you joined"."""
    timed = any(value.kind.startswith(_CHANGES) for value in mention.values)
    if not mention.modality.past or replies.questions & {"was", "wer", "did", "had"}:
        return False
    clause = replies.statements[mention.reply].clause(mention.start)
    return bool(
        _ENGLISH.was.search(clause) and (timed or _ENGLISH.once.search(clause))
    ) and not _ENGLISH.now.search(clause)


def _is_retracted(mention: Mention, replies: Replies) -> bool:
    """True where it is taken back later. "That was a lie" does it, "Thursday was a lie" not to Friday."""
    for number in range(mention.reply, len(replies.statements)):
        statements = replies.statements[number]
        for span in statements.retractions:
            same = number == mention.reply
            if same and (mention.start >= span.start or statements.is_of_earlier(span)):
                continue
            if not _names_another(span, number, mention, replies):
                return True
    return False


def _names_another(span: TextSpan, number: int, mention: Mention, replies: Replies) -> bool:
    """True where the sentence that takes something back names another value of the fact's type."""
    start = replies.statements[number].sentence(span.start).start
    return any(
        start <= value.start < span.end and value.kind == inside.kind and not same_value(value, inside)
        for value in replies.values[number]
        for inside in mention.values
    )


def _is_contradicted(mentions: Sequence[Mention], live: Sequence[Mention], replies: Replies) -> bool:
    """True where it is denied as well: anywhere for a word, after the last assertion for a typed value."""
    denied = [
        mention
        for mention in mentions
        if (mention.modality.denials or replies.statements[mention.reply].is_denied_after(mention.end))
        and not (
            mention.modality.asked
            or mention.modality.supposed
            or mention.modality.planned
            or mention.modality.past
        )
    ]
    if not any(mention.values for mention in live):
        return bool(denied)
    last = max((mention.reply, mention.start) for mention in live)
    return any((mention.reply, mention.start) > last for mention in denied)


# Phrases that a text must not claim, in these words or in others that say the same.

_MEANINGS = ENGLISH.patterns("meanings")
"""Words of a shop's promises, and other words for them."""

_TOGETHER = 40
"""Characters between the words of a phrase that is said in another order."""


def claims_phrase(wordings: Iterable[str], text: str) -> bool:
    """True where the text claims one of the phrases, in these words or in others that say the same.

    "A refund in full" claims "full refund". Doubt ("maybe") does not undo a claim; denial, question,
    condition and restriction ("only for orders over $50") do, and a denial of a denial does not.
    """
    statements = read_statements(text)
    for wording in wordings:
        for start, end in _spans(wording, statements):
            last = statements.low.rfind(" ", start, end) + 1  # "shipping is not free"
            modality = max(statements.at(start), statements.at(max(start, last)))
            denials = modality.denials + statements.is_denied_after(end)
            withheld = modality.planned or modality.asked or (modality.supposed and not denials)
            if denials % 2 == 0 and not withheld and not _ENGLISH.restricted.search(statements.clause(start)):
                return True
    return False


def _spans(wording: str, statements: Statements) -> Iterator[TextSpan]:
    """Yield where the phrase is said: its words, its value, or its words' meanings close together."""
    yield from phrase_spans(wording, statements, plural=True)
    value = wanted_value(wording)
    if value is not None:
        if value.kind not in ("number:", "status"):
            text_values = read_values(statements.text)
            yield from (TextSpan(other.start, other.end) for other in text_values if same_value(other, value))
        return
    parts = re.findall(r"[\w'$€£%]+", wording.lower())
    if len(parts) < 2 or not FUNCTION_WORDS.isdisjoint(parts):
        return
    places = [_meant(part, statements) for part in parts]
    near = [0] * len(parts)
    """For each part, the first place that is not too far before the first part's: each moves on only."""
    for first in places[0]:
        together = [first]
        for number, others in enumerate(places[1:], 1):
            while near[number] < len(others) and others[near[number]].start < first.start - _TOGETHER:
                near[number] += 1
            candidates = others[near[number] : near[number] + _TOGETHER]
            other = next((span for span in candidates if _is_together(first, span, statements)), None)
            if other is None:
                break
            together.append(other)
        else:
            yield TextSpan(min(together).start, max(span.end for span in together))


def _meant(part: str, statements: Statements) -> list[TextSpan]:
    """Return where words of the part's meaning stand."""
    meaning = next((pattern for pattern in _MEANINGS.values() if pattern.fullmatch(part)), None)
    if meaning is not None:
        return [TextSpan(*match.span()) for match in meaning.finditer(statements.low)]
    part_stem = stem(part)
    return [TextSpan(start, end) for word, start, end in statements.words if stem(word) == part_stem]


def _is_together(first: TextSpan, second: TextSpan, statements: Statements) -> bool:
    """True where both stand in one clause, or with a comma between them: "a refund, in full"."""
    before, after = sorted((first, second))
    if after.start - before.end > _TOGETHER:
        return False
    clauses = statements.clause_number(after.start) - statements.clause_number(before.start)
    between = statements.low[before.end : after.start]
    joined = len(between) <= 12 and not re.search(r"[.!?;:\n]|\b(?:and|but|so|because)\b", between)
    return clauses == 0 or joined
