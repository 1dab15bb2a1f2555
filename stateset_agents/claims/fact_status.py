"""Which facts an agent's replies tell.

A fact is told by an assertion that stands alone: a second value of its type takes it back, unless that one is
denied, past, about something else, or the user's (`second_values.py`). Called by the ready rewards and the
rule-based user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from stateset_agents.claims.deferrals import is_deferred
from stateset_agents.claims.mentions import (
    Mention,
    Replies,
    denied_after,
    find_mentions,
    read_values,
    wanted_value,
)
from stateset_agents.claims.second_values import has_second_value, is_alternative, is_one_of_many
from stateset_agents.claims.statements import Statements, TextSpan, read_statements
from stateset_agents.claims.typed_values import MOST_VALUES, Value, same_value, stem
from stateset_agents.claims.value_phrases import (
    asked_limits,
    counted_nouns,
    is_altered,
    is_cited,
    is_indefinite,
)
from stateset_agents.claims.value_roles import PERSON, is_of_another
from stateset_agents.claims.value_sums import find_counts
from stateset_agents.types.comparison import composed

_MOST_MENTIONS = 100
"""A fact that stands there more often is stuffed in, not told; it bounds the work, too."""
_TO_COME = re.compile(
    r"\b(?:(?:to|will|can|shall|must|may|'ll) be|(?:will|would|may|might) have|being|gets?|not yet)"
    r"(?: \w+)? $"
)

_IF = re.compile(r"\b(?:if|when|in case|unless) ([^.,;:?!]+)")
_CHANGES = ("weekday", "date", "time", "amount", "percent", "duration", "number:")
_WAS = re.compile(r"\b(?:(?:was|were)(?! \w+ed\b)|had|stood|thought|took|went|paid|when you)\b")
_ONCE = re.compile(r"\b(?:yesterday|last (?:week|month|year|time))\b")
_NOW = re.compile(
    r"\b(?:have|has|just|today|now|this|is|are|will|can|comes?|gets?|costs|takes|arrives)\b|'(?:ve|ll|re)\b"
)


class FactStatus(Enum):
    """What the replies do with a fact."""

    TOLD = "told"
    NAMED = "named"
    """It stands there, but as one of several values, denied, doubted, supposed, asked or taken back."""
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
    """How each fact (name -> accepted wordings) fares in the agent's `replies`.

    `sound`: which replies may tell a fact, all of them unless given; values in the others still count as
    second ones. `user_texts` is what the user said, `shown_texts` other texts whose values the agent may
    repeat, each list of `choices` a type of values of the user's own.

        fact_statuses({"day": ("Friday",)}, ["It comes Monday or Friday."])  ->  {"day": FactStatus.NAMED}
    """
    facts, replies, user_texts = composed(facts), composed(replies), composed(user_texts)
    types = tuple(tuple(options) for options in composed(choices))
    shown_texts = composed(shown_texts)
    known = [value for text in (*user_texts, *shown_texts) for value in read_values(text, types)]
    wanted = [wanted_value(wording, types) for wordings in facts.values() for wording in wordings]
    conditions = frozenset(
        stem(word) for text in user_texts for clause in _IF.findall(text.lower()) for word in clause.split()
    )
    read = Replies(
        statements=[read_statements(text, conditions) for text in replies],
        values=[read_values(text, types) for text in replies],
        sound=frozenset(range(len(replies)) if sound is None else sound),
        expected=[value for value in wanted if value is not None],
        known=frozenset((value.kind, value.value) for value in known),
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
        for found in mentions.values()
        for mention in found
        for value in mention.values
    )
    return {name: _fact_status(found, read, covered) for name, found in mentions.items()}


def states_fact(wordings: Iterable[str], text: str) -> bool:
    """True when the text by itself tells a fact that has these wordings.

    "The refund takes 5 days" tells "5 days"; "it is not 5 days", "is it 5 days?" and "5 or 6 days" do not.
    """
    return fact_statuses({"": tuple(wordings)}, [text])[""] is FactStatus.TOLD


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
    """Is it asserted by a sound reply, for itself, and not taken back?"""
    statements = replies.statements[mention.reply]
    return (
        mention.reply in replies.sound
        and mention.modality.asserted
        and not denied_after(statements, mention.end)
        and not _is_to_come(mention, statements)
        and not _is_another_value(mention, replies)
        and not is_alternative(mention, replies)
        and not _is_retracted(mention, replies)
        and not is_deferred(mention, replies)
        and not _is_over(mention, replies)
    )


def _is_another_value(mention: Mention, replies: Replies) -> bool:
    """Does an operator beside it make another value of it, or is it said of something else?"""
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
    return reached and bool(_TO_COME.search(before))


def _is_over(mention: Mention, replies: Replies) -> bool:
    """Is it what was, where the user asks for what is: "the fee was $25 when you joined"?"""
    timed = any(value.kind.startswith(_CHANGES) for value in mention.values)
    if not mention.modality.past or replies.questions & {"was", "wer", "did", "had"}:
        return False
    clause = replies.statements[mention.reply].clause(mention.start)
    return bool(_WAS.search(clause) and (timed or _ONCE.search(clause))) and not _NOW.search(clause)


def _is_retracted(mention: Mention, replies: Replies) -> bool:
    """Is it taken back later? "That was a lie" does it, "Thursday was a lie" not to Friday."""
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
    """Is there another value of the fact's type in the sentence that takes something back?"""
    start = replies.statements[number].sentence(span.start).start
    return any(
        start <= value.start < span.end and value.kind == inside.kind and not same_value(value, inside)
        for value in replies.values[number]
        for inside in mention.values
    )


def _is_contradicted(mentions: Sequence[Mention], live: Sequence[Mention], replies: Replies) -> bool:
    """Is it denied as well: anywhere for a word, after the last assertion for a typed value?"""
    denied = [
        mention
        for mention in mentions
        if (mention.modality.denials or denied_after(replies.statements[mention.reply], mention.end))
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
