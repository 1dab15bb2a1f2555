"""Decides what a value is said of, and what other values of its type do to it.

A value is of the arrival or the dispatch, the user's order or somebody else's. "Monday or Friday" tells no
day. "It was due Monday, it comes Friday" tells Friday, since Monday is past; so it is where the other value
is denied, supposed, corrected, the user's own, a term of a sum, or about something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from stateset_agents.claims.english import Patterns, word_list, word_table
from stateset_agents.claims.mentions import Mention, Replies
from stateset_agents.claims.statements import NEARBY, Modality, Statements
from stateset_agents.claims.text_checks import FUNCTION_WORDS
from stateset_agents.claims.typed_values import Value, same_value, stem
from stateset_agents.claims.value_phrases import PERIODS, is_altered, rate_unit

_ENGLISH = Patterns("value_roles")
DAYS, PERSON = _ENGLISH.days, _ENGLISH.person


def _key(word: str) -> str:
    """Return a word's key: its stem, but an order is not what was ordered, nor a place what was placed."""
    return word if word in ("ordered", "placed") else stem(word)


_ATTRIBUTES = {name: frozenset(map(_key, words.split())) for name, words in word_table("attributes").items()}
"""Things that a value can be said of in a shop, and the words that show them."""
_OF_KIND = {kind: frozenset(names.split()) for kind, names in word_table("attributes_of_kind").items()}
_RATED = ("amount", "duration", "number:")
_VAGUE = frozenset(("arrival", "refund", "again"))
"""Attributes whose words are said of much else: "the money is there in 5 days"."""
_SUMS = word_list("sums")
"""A sum is no part: in "$32 plus $8 of tax makes $40" the tax is not $40."""
PARTS = frozenset(("fee", "minimum", "holiday"))
"""Attributes that show by themselves that an amount is not the one asked for."""
_COMMON = frozenset(map(stem, word_list("common")))
"""Words that any answer has: they do not say what a value is of."""
_POSSESSIVE = re.compile(r"^.*\w's (?=\w)")
_WORD = re.compile(r"[\w']+")
_PEOPLE = frozenset(map(stem, word_list("people")))
_GENERIC = frozenset(map(stem, word_list("generic")))
"""Words whose clause may be about any thing that was bought."""


def contents(start: int, end: int, statements: Statements) -> frozenset[str]:
    """Stems of the clause's content words beside the value."""
    before, after = statements.around(start, end)
    return frozenset(
        stem(word) for word in _WORD.findall(before) + _WORD.findall(after) if word not in FUNCTION_WORDS
    )


def asked_attributes(kind: str, replies: Replies) -> frozenset[str]:
    """Return what the user asked of a value of the kind: "When does it arrive?" -> arrival."""
    return frozenset(name for name in _OF_KIND.get(kind, ()) if _ATTRIBUTES[name] & replies.questions)


def said_of(value: Value, statements: Statements) -> frozenset[str]:
    """Return what the value is said of, by the nearest telling word of its clause: arrival, fee, ..."""
    names = _OF_KIND.get(value.kind, frozenset())
    before, after = (
        _ENGLISH.check_in.sub(r"check\1", text) for text in statements.around(value.start, value.end)
    )
    before, after = _ENGLISH.payout.sub("", before), _ENGLISH.payout.sub("", after)
    words = _WORD.findall(_POSSESSIVE.sub("", _ENGLISH.telling.sub("", before)))
    if not _ENGLISH.copula.search(before):  # the subject of "is" comes first, else the nearest verb counts
        words.reverse()
    for word in (*words, *_WORD.findall(after)):
        attributes = frozenset(name for name in names if _key(word) in _ATTRIBUTES[name])
        if attributes or (word in _SUMS and value.kind == "amount"):
            return attributes
    return frozenset()


def is_of_another(value: Value, reply: int, replies: Replies) -> bool:
    """True where it is surely said of something else: "another customer gets $40", "the label is $40"."""
    statements = replies.statements[reply]
    topics, stated = asked_attributes(value.kind, replies), said_of(value, statements)
    if "fee" in topics:  # "an overdraft costs $25"
        topics |= {"purchase"}
    if topics - {"again"} and stated and not stated & (topics | _VAGUE):
        return True
    unit = rate_unit(value.start, value.end, statements) if value.kind.startswith(_RATED) else None
    if _has_another_unit(unit, replies, is_price=value.kind == "amount"):
        return True
    clause = " ".join(statements.around(value.start, value.end))
    if "refund" in topics and _ENGLISH.you_owe.search(clause):
        return True
    others, somebody = (
        {stem(word) for words in pattern.findall(clause) for word in words if word not in FUNCTION_WORDS}
        for pattern in (_ENGLISH.others, _ENGLISH.somebody)
    )
    if others & (replies.topic | _PEOPLE) or somebody & (_PEOPLE - replies.topic):
        return True
    receivers = [*_ENGLISH.groups.findall(clause), *_ENGLISH.for_a_kind.findall(clause)]
    receivers += [word for words in _ENGLISH.only_for.findall(clause) for word in words if word]
    if any(stem(word) not in replies.topic for word in receivers):
        return True
    plurals = [word for words in _ENGLISH.all_of_a_kind.findall(clause) for word in words if word]
    if any(stem(word) in replies.topic and word not in replies.topic for word in plurals):
        return True
    return _has_another_key(value, reply, clause, replies) or _is_contrasted(value, reply, replies)


def _is_contrasted(value: Value, reply: int, replies: Replies) -> bool:
    """True where the thing asked about is named only later: "Your sofa has K27. For the desk I will ask"."""
    statements = replies.statements[reply]
    before, after = statements.around(value.start, value.end)
    subject = own_subject(value.start, value.end, asked_attributes(value.kind, replies), statements)
    if not subject or subject in _GENERIC or _ENGLISH.pronoun.search(before + after):
        return False
    topic = replies.topic - _COMMON - FUNCTION_WORDS
    end = statements.sentence(value.start).end
    later = [
        _ENGLISH.topic.match(statements.low, span.start) for span in statements.sentences if span.start >= end
    ]
    named = [match for match in later if match]
    if any(match[1] for match in named):
        return True
    if topic & {stem(word) for word, start, _ in statements.words if start < end}:
        return False
    return any(topic & set(map(stem, match[2].split())) for match in named)


def _has_another_unit(unit: str | None, replies: Replies, *, is_price: bool) -> bool:
    """True for the price of another unit than the user asked about: "$12 a day" of the price a month."""
    if unit in (None, "tim") or unit in replies.topic - replies.counted:
        return False
    if unit in PERIODS:
        return is_price and bool(replies.topic & PERIODS)
    return unit != "each" or bool(replies.counted)


def _has_another_key(value: Value, reply: int, clause: str, replies: Replies) -> bool:
    """True where the clause names another order, person or day than the user did."""
    titled = set(PERSON.findall(clause))
    if titled and replies.persons and not titled & replies.persons:
        return True
    if value.kind == "time":
        days = {stem(day) for day in DAYS.findall(clause)}
        topic_days = {stem(day) for day in DAYS.findall(" ".join(replies.topic))}
        return bool(days and topic_days) and not days & topic_days
    if any(hour not in replies.topic for hour in _ENGLISH.the_hour.findall(clause)):
        return True
    if value.kind == "id":
        return False
    span = replies.statements[reply].clauses[replies.statements[reply].clause_number(value.start)]
    ids = {
        other.value
        for other in replies.values[reply]
        if other.kind == "id" and span.start <= other.start < span.end
    }
    users = {named for kind, named in replies.known if kind == "id"}
    ids -= {other.value for other in replies.expected}
    return (
        bool(ids)
        and not ids & users
        and bool({shape(named) for named in ids} & {shape(named) for named in users})
    )


def shape(name: object) -> str:
    """Return the shape of an identifier: "K27" -> "a9"."""
    return re.sub(r"\d+", "9", re.sub(r"[^\W\d_]", "a", str(name)))


def differs(stated: frozenset[str], attributes: frozenset[str]) -> bool:
    """True where a value is said of something else than the attributes of a fact."""
    is_known = attributes or stated <= PARTS
    return bool(stated and is_known) and not stated & attributes


def own_subject(start: int, end: int, attributes: frozenset[str], statements: Statements) -> str:
    """Stem of the first word of a clause that says what a value is of: "the shirt on Monday" -> shirt; or "".

    Of a relative clause it stands before it: "the brake set, which is $25".
    """
    before, after = statements.around(start, end)
    if _ENGLISH.which.match(before):
        clause = statements.clauses[statements.clause_number(start)].start
        before = statements.low[max(statements.sentence(start).start, clause - 40) : clause]
    elif (number := statements.clause_number(start)) and _ENGLISH.ellipsis.match(
        before
    ):  # "and arrives on Monday"
        before = statements.low[
            max(statements.sentence(start).start, statements.clauses[number - 1].start) : start
        ]
    common = _COMMON.union(*(_ATTRIBUTES[name] for name in attributes))
    for words in (_WORD.findall(before), _WORD.findall(after)):
        candidates = [
            word for word in words if word not in FUNCTION_WORDS and not _ENGLISH.no_subject.fullmatch(word)
        ]
        if candidates:  # "order 48112 is sorted": what comes after is not what the value is of
            return next((stem(word) for word in candidates if stem(word) not in common), "")
    return ""


# Sums and products that values make: "$30 for the shirt and $10 for shipping, $40 in total".

_MOST_TERMS = 8
"""Number of values that a sum may have: nobody tells a longer one, and it bounds the work."""
_MOST_FACTORS = 4
_WORDS = {word: float(number) for number, words in word_table("counts").items() for word in words.split()}
_COUNT = re.compile(rf"(?<![\w.,$€£])\d+(?:\.\d+)?(?=\s?%)?|\b(?:{'|'.join(_WORDS)})s?\b")


def adds_up(fact: Value, second: Value, replies: Replies) -> bool:
    """True where values of the fact's type make an equation with the fact and the second in it.

    A sum ("$30 and $10", $40), a difference ("$55 less $15", $40), a multiple ("$20 each", $40 for two) or a
    percentage ("80% of $50", $40). Some word has to say that there is a sum.
    """
    total, part = _number(fact), _number(second)
    texts = [statements.low for statements in replies.statements]
    if total is None or part is None or not any(map(_tells_a_sum, texts)):
        return False
    factors = replies.counts.union(*map(find_counts, texts)) - {1.0}
    for value in (value for values in replies.values for value in values if value.kind == "percent"):
        if (percent := _number(value)) is not None:
            factors |= {percent / 100, 1 - percent / 100, 1 + percent / 100}
    if any(_equal(total, part * factor) or _equal(part, total * factor) for factor in factors):
        return True
    terms = [
        value for values in replies.values for value in values if value.kind == fact.kind and value != second
    ]
    others = [number for term in terms if (number := _number(term)) is not None and not _equal(number, total)]
    if len(others) > _MOST_TERMS:
        return False
    if any(
        _equal(2 * max(total, part, *rest), total + part + sum(rest))
        for size in range(1, len(others) + 1)
        for rest in combinations(others, size)
    ):
        return True
    times = [1.0, *sorted(factors)][:_MOST_FACTORS]
    terms_of = [part, *others][:_MOST_FACTORS]
    return len(terms_of) > 1 and any(
        _equal(total, sum(factor * term for factor, term in zip(multipliers, terms_of, strict=True)))
        for multipliers in product(times, repeat=len(terms_of))
    )


@lru_cache(maxsize=512)
def _tells_a_sum(text: str) -> bool:
    return bool(_ENGLISH.marker.search(text))


def _number(value: Value) -> float | None:
    """The number in a value; None where it has none."""
    number = value.value
    if isinstance(number, tuple):
        number = next((item for item in number if isinstance(item, float)), None)
    return number if isinstance(number, float) else None


@lru_cache(maxsize=512)  # asked for each second value
def find_counts(text: str) -> frozenset[float]:
    """The numbers of a text in lower case that may count something: "two tickets" -> {2.0}."""
    return frozenset(_WORDS.get(word.removesuffix("s")) or float(word) for word in _COUNT.findall(text))


def _equal(first: float, second: float) -> bool:
    return abs(first - second) < 0.005


# Second values: what stands beside a fact and takes it back, and what does not.

_MOST_OTHERS = 3
"""Values about something else that may stand beside a fact."""
_MOST_WITHDRAWN = 1
"""Values that may be said first and corrected afterwards; more are guesses."""

_RANKS: Mapping[object, int] = {
    "shipped": 1,
    **dict.fromkeys(("resolved", "delivered", "cancelled", "lost"), 2),
}
"""Status of an order -> how far it is; one that is not here has only begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fact:
    """A fact as it is told, as far as second values are compared with it."""

    kind: str
    values: frozenset[Value]
    attributes: frozenset[str]
    """Things that it is said of: as the user asked, or else as the agent says."""
    past: bool
    units: frozenset[str | None]
    """Units that it is the price of, as in "$20 per ticket"."""
    days: frozenset[str]
    clauses: frozenset[tuple[int, int]]
    """Reply and clause of each mention."""
    contents: frozenset[frozenset[str]]
    """Content words beside each mention."""
    live: Sequence[Mention]
    """The fact's mentions, in order."""


@dataclass(frozen=True, slots=True)
class _Second:
    """A value of the fact's type that differs."""

    value: Value
    reply: int
    statements: Statements
    modality: Modality


def has_second_value(live: Sequence[Mention], replies: Replies, covered: frozenset[tuple[int, int]]) -> bool:
    """True where a value of the fact's type stands beside it that nothing excuses.

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
        if _take_back(seconds, fact, replies):
            return True
    return False


def _take_back(seconds: Sequence[_Second], fact: _Fact, replies: Replies) -> bool:
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
        if denied.get(second.value.value, (-1, 0)) > position or _is_corrected(second, fact, replies):
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
    topics = asked_attributes(kind, replies)
    stated = frozenset(name for value, statements in values for name in said_of(value, statements))
    attributes = topics & stated or (topics - PARTS if topics - PARTS else topics) or stated
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
        live=live,
    )


def _rules_out(value: Value, fact: _Fact, statements: Statements) -> bool:
    """True where not both can be true. Identifiers of another shape can, and earlier stages of an order."""
    if fact.kind == "id":
        return any(shape(value.value) == shape(other.value) for other in fact.values)
    if fact.kind == "status":
        if not _ENGLISH.stated.search(statements.low[max(0, value.start - 40) : value.start]):
            return False
        rank = _RANKS.get(value.value, 0)
        return any(rank == 0 or rank >= _RANKS.get(other.value, 0) for other in fact.values)
    return True


def _is_excused(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """True where it is denied, asked, supposed, past, or the user's."""
    value, statements, modality = second.value, second.statements, second.modality
    if modality.denials or modality.supposed or statements.is_denied_after(value.end):
        return True
    sentence = statements.sentence(value.start)
    if _ENGLISH.offer.search(statements.low, max(sentence.start, value.start - NEARBY), value.start):
        return True
    if (
        modality.asked
        and not _is_fragment(value, statements)
        and not _ENGLISH.or_clause.match(statements.clause(value.start))
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
    """True where it is about something else: a bound, another attribute, another day or another thing."""
    value, statements = second.value, second.statements
    if _is_about_another(second, fact, replies):
        return True
    if second.modality.doubted:
        return False
    if differs(said_of(value, statements), fact.attributes) or is_of_another(value, second.reply, replies):
        return True
    before, after = statements.around(value.start, value.end)
    if _ENGLISH.added.search(before) or is_altered(
        value.start, value.end, value.kind, statements, replies.limits
    ):
        return True
    if _ENGLISH.part.match(after) or _ENGLISH.whole.search(before):  # "$15 of the $95"
        return True
    if rate_unit(value.start, value.end, statements) not in {None, *fact.units}:
        return True
    days = set(DAYS.findall(statements.clause(value.start))) if fact.kind == "time" else set()
    return bool(days and fact.days and not days & fact.days)


def _is_about_another(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """True where its clause is about a thing that neither the question nor a clause of the fact names."""
    value, statements = second.value, second.statements
    if value.kind.startswith("choice:"):  # of these an answer may name one, whatever it says of the others
        return False
    before, _ = statements.around(value.start, value.end)
    if _ENGLISH.rest.search(before):
        return True
    around = "".join(statements.around(value.start, value.end))
    subject = own_subject(value.start, value.end, fact.attributes, statements)
    if not subject or subject in replies.questions.union(*fact.contents) or _ENGLISH.dealt.search(around):
        return False
    return not any(_is_in_a_row(second, mention) for mention in fact.live)


def _is_in_a_row(second: _Second, mention: Mention) -> bool:
    """True where it is listed with the fact: "Monday and Friday"."""
    value, low = second.value, second.statements.low
    gap = _gap(value, mention, low)
    if "." in gap and _ENGLISH.says.match(low, max(value.end, mention.end)):  # "It is K27. K28 is the chair."
        return False
    return mention.reply == second.reply and len(gap) <= NEARBY and bool(_ENGLISH.joined.fullmatch(gap))


def _gap(value: Value, mention: Mention, low: str) -> str:
    """Return the text between a value and a mention."""
    return low[value.end : mention.start] if value.end <= mention.start else low[mention.end : value.start]


def _is_part(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """True for a term of a sum or product with the fact, not said as the fact: "$20 each, $40 for both"."""
    stands_alone = not contents(second.value.start, second.value.end, second.statements)
    return (stands_alone or not _is_parallel(second, fact)) and any(
        adds_up(value, second.value, replies) for value in fact.values
    )


def _is_fragment(value: Value, statements: Statements) -> bool:
    """ "Monday?" """
    before, after = statements.around(value.start, value.end)
    return len(_WORD.findall(before + after)) <= 1


def _is_parallel(second: _Second, fact: _Fact) -> bool:
    """True where its clause says of it what another clause says of the fact."""
    clause = (second.reply, second.statements.clause_number(second.value.start))
    if clause in fact.clauses:
        return False
    here = contents(second.value.start, second.value.end, second.statements)
    return any(2 * len(here & there) >= len(here | there) for there in fact.contents)


def _is_corrected(second: _Second, fact: _Fact, replies: Replies) -> bool:
    """True where it is taken back before the fact is told: "Thursday, sorry, Friday"."""
    end = second.value.end
    last = max((mention.reply, mention.start) for mention in fact.live)
    for reply in range(second.reply, last[0] + 1):
        for span in replies.statements[reply].retractions:
            if (second.reply, second.value.start) <= (reply, span.end) and (reply, span.start) <= last:
                return True
    following = [m.start for m in fact.live if m.reply == second.reply and end <= m.start <= end + 60]
    return bool(following) and bool(_ENGLISH.correction.fullmatch(second.statements.low, end, following[0]))


def is_alternative(mention: Mention, replies: Replies) -> bool:
    """True where the fact is joined to another value by "or", a slash, a dash or "to"."""
    statements = replies.statements[mention.reply]
    low = statements.low
    before, after = low[max(0, mention.start - 60) : mention.start], low[mention.end : mention.end + 60]
    if _ENGLISH.or_before.search(before) or _ENGLISH.or_other.match(after) or _ENGLISH.or_item.match(after):
        return True
    if not mention.values:
        return bool(
            _ENGLISH.or_word.match(after)
            or _ENGLISH.list_after.match(after)
            or _ENGLISH.list_before.search(before)
        )
    kinds = {value.kind for value in mention.values}
    for value in _neighbours(mention, replies.values[mention.reply]):
        gap = _gap(value, mention, low)
        joins = _ENGLISH.or_to.search(gap) if value.kind in kinds else _ENGLISH.either.search(gap)
        if len(gap) <= 30 and joins and _ENGLISH.joined.fullmatch(gap):
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
"""Number of words of a frame: nobody fills a longer one over and over, and it bounds the work."""
_MANY = 2
_FILLERS = word_list("fillers")


def is_one_of_many(live: Sequence[Mention], replies: Replies) -> bool:
    """True where a fact of no type fills a frame that two other words fill, too.

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
    words = _WORD.findall(clause[:400])
    while words and words[0] in _FILLERS:
        words.pop(0)
    return tuple(words)
