"""What a value is said of: the arrival or the dispatch, the user's order or somebody else's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from stateset_agents.claims.mentions import Replies
from stateset_agents.claims.statements import Statements
from stateset_agents.claims.text_checks import FUNCTION_WORDS
from stateset_agents.claims.typed_values import Value, stem
from stateset_agents.claims.value_phrases import PERIODS, rate_unit


def _key(word: str) -> str:
    """What stands for a word: its stem, but an order is not what was ordered, nor a place what was placed."""
    return word if word in ("ordered", "placed") else stem(word)


_ATTRIBUTES: Mapping[str, frozenset[str]] = {
    name: frozenset(map(_key, words.split()))
    for name, words in {
        "arrival": "arrive arrival deliver delivery come reach expect expected land receive door there"
        " eta visit",
        "dispatch": "ship shipped sent dispatch dispatched left leave out packed handed pickup departed"
        " warehouse depot",
        "purchase": "ordered bought buy purchase purchased paid pay placed price cost costs was spend spent",
        "wish": "need needed want wanted wish wished ask asked prefer preferred hoped",
        "fee": "fee fees label tax taxes vat postage deposit keep deduct stay handling surcharge"
        " shipping charge"
        " lose",
        "refund": "refund refunded back credit credited get receive money",
        "returning": "return returned send keep",
        "opening": "open opens opened opening start starts begin begins",
        "closing": "close closes closed closing end ends finish expire",
        "closing-time": "close closes closed closing end ends finish until",
        "again": "again retry back next",
        "tracking": "tracking track parcel package",
        "order": "order",
        "invoice": "invoice receipt bill",
        "ticket": "ticket case reference complaint",
        "talk": "tell inform call ring ask check look decide meeting meet review discuss talk reply"
        " investigate",
        "minimum": "minimum least",
        "discount": "off discount rebate save saving",
        "bonus": "bonus prize reward",
        "holiday": "holiday holidays weekend off away",
        "check-in": "checkin",
        "check-out": "checkout",
        "meals": "breakfast lunch dinner",
    }.items()
}
"""What a value can be said of in a shop, and the words that show it."""
_OF_KIND: Mapping[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "weekday": "arrival dispatch talk purchase wish opening closing again holiday",
        "date": "arrival dispatch talk purchase wish opening closing again holiday",
        "relative": "arrival dispatch purchase wish opening closing again",
        "time": "arrival dispatch opening closing-time check-in check-out meals",
        "amount": "purchase fee refund minimum discount bonus",
        "percent": "refund fee discount",
        "duration": "arrival refund returning dispatch opening",
        "id": "tracking order invoice ticket",
    }.items()
}
_RATED = ("amount", "duration", "number:")
_VAGUE = frozenset(("arrival", "refund", "again"))
"""Their words are said of much else: "the money is there in 5 days"."""
_SUMS = frozenset(("total", "altogether", "sum", "makes", "make", "equals", "leaves", "totals"))
"""A sum is no part: in "$32 plus $8 of tax makes $40" the tax is not $40."""
PARTS = frozenset(("fee", "minimum", "holiday"))
"""Said of an amount, they show by themselves that it is not the one asked for."""
DAYS = re.compile(
    r"\b(?:(?:mon|tues|wednes|thurs|fri|satur|sun)days?|weekdays?|weekends?|holidays?|every (?:other )?day"
    r"|other days)\b"
)
_ELLIPSIS = re.compile(
    r"\s*(?:and|but)(?: then| also)? (?!(?:the|an?|your|our|my|it|its|they|we|you|i|he|she|this"
    r"|that|on|in|at|by|for)\b)[a-z]+s\b"
)
_NO_SUBJECT = re.compile(rf"\w+ly|\w*\d\w*|{DAYS.pattern}")
_WHICH = re.compile(r"\s?(?:which|who|that)\b")
_COMMON_WORDS = """
    thank thanks sorry please asking happy glad tell say said call like day date week month time number
    amount even then right just possible well good better best want need think know believe mean guess
    really today sure much long money one other next last first second"""
_COMMON = frozenset(map(stem, _COMMON_WORDS.split()))
"""Words that any answer has: they do not say what a value is of."""
_YOU_OWE = re.compile(r"\byou(?: still| now| also)? owe\b")
_THE_HOUR = re.compile(r"\bthe (\d\d?:\d\d) (?:to|from|for|train|bus|flight)\b")
_COPULA = re.compile(r"\b(?:is|are|was|were|be|has|have)(?: (?:the|a|number|no|of|now|only|just|exactly))* $")
_TELLING = re.compile(
    r"^.*\b(?:tell|inform|ask|asked|check|checked|call|called|told)\b.*?\b(?:that|it|it's|your|to|the)\b"
)
_PAYOUT = re.compile(r"\b(?:be|being|is|are|we|we'll|will) (?:pay|paid)\b|\bpaid (?:out|back)\b")
_POSSESSIVE = re.compile(r"^.*\w's (?=\w)")
_CHECK_IN = re.compile(r"\bcheck[- ](in|out)\b")
_WORD = re.compile(r"[\w']+")
_OTHERS = re.compile(
    r"\b(?:other|another|different|wrong|(?:some|any|every)(?:one|body) else's) ([^\W\d_]+)(?: ([^\W\d_]+))?"
)
_SOMEBODY = re.compile(
    r"\b(?:an?|one|some|many|most|few|the (?:last|first|next"
    r"|previous)) (?:other )?([^\W\d_]+)(?: ([^\W\d_]+))?|\b(?:some|any|every)(?:one|body) (else)\b"
    r"|\b([a-z]+s) who\b"
)
_PEOPLE_WORDS = """
    else customer client buyer shopper person people user guest member subscriber pensioner senior adult child
    children kid student pupil teacher employee veteran neighbour neighbor friend brother sister mother
    father wife husband cousin lady gentleman man woman passenger traveller resident folk shop store seller
    company competitor maker brand manufacturer supplier airline hotel city country"""
_PEOPLE = frozenset(map(stem, _PEOPLE_WORDS.split()))
_GROUPS = re.compile(
    r"(?<!as a )(?<!as an )(?<!like )\b(members|subscribers|pensioners|seniors|adults|children|kids"
    r"|students|pupils|teachers|employees|veterans|residents|neighbou?rs?|friends?|brother|sister|mother"
    r"|father|wife|husband|cousin|partner|sons?|daughters?|competition|competitors?|lady|gentleman|man"
    r"|woman)(?:'s?)?\b(?! like you)"
)
_ONLY_FOR = re.compile(r"\bfor (?!you\b)([^\W\d_]+)(?: ([^\W\d_]+))? only\b")
_FOR_A_KIND = re.compile(r"^\W*(?:and |but )?for (?!thanks\b|this\b)([^\W\d_]+[^\Wsu_]s)\b")
_ALL_OF_A_KIND = re.compile(
    r"^\W*(?:and |but |so )?(?:(?=(?:all|most|many|some|several|other) )\w+ ([^\W\d_]+s)"
    r"|([^\W\d_]+s) (?:to|from"
    r"|for|over|above|under|in|with|without|of|by)) "
)
_TOPIC = re.compile(
    r"\W*(?:(?:and|but|while|whereas) )?(?:(?:as )?(?:for|about|on|to|with|of) )?(?:(yours\b(?! \w+ly)"
    r"|the one"
    r" (?:for|with|of|that))\b|(?:the|your|our|this) (?:own )?([a-z]+(?: [a-z]+)?))"
)
_PRONOUN = re.compile(r"\b(?:it|its|you|they|them|one|that|this|yours)\b")
_GENERIC_WORDS = "courier driver van truck carrier team order parcel package delivery shipment item refund"
_GENERIC = frozenset(map(stem, _GENERIC_WORDS.split()))
"""Their clause may be about any thing that was bought."""
PERSON = re.compile(r"\b(?:dr|mr|mrs|ms|miss|prof|professor|doctor)\.? ([a-z]+)")


def contents(start: int, end: int, statements: Statements) -> frozenset[str]:
    """Stems of the clause's content words beside the value."""
    before, after = statements.around(start, end)
    return frozenset(
        stem(word) for word in _WORD.findall(before) + _WORD.findall(after) if word not in FUNCTION_WORDS
    )


def asked_attributes(kind: str, replies: Replies) -> frozenset[str]:
    """What the user asked of a value of the kind: "When does it arrive?" -> arrival."""
    return frozenset(name for name in _OF_KIND.get(kind, ()) if _ATTRIBUTES[name] & replies.questions)


def said_of(value: Value, statements: Statements) -> frozenset[str]:
    """What the value is said of, by the nearest telling word of its clause: arrival, dispatch, fee, ..."""
    names = _OF_KIND.get(value.kind, frozenset())
    before, after = (_CHECK_IN.sub(r"check\1", text) for text in statements.around(value.start, value.end))
    before, after = _PAYOUT.sub("", before), _PAYOUT.sub("", after)
    spoken = _WORD.findall(_POSSESSIVE.sub("", _TELLING.sub("", before)))
    if not _COPULA.search(before):  # the subject of "is" comes first, else the nearest verb counts
        spoken.reverse()
    for word in (*spoken, *_WORD.findall(after)):
        found = frozenset(name for name in names if _key(word) in _ATTRIBUTES[name])
        if found or (word in _SUMS and value.kind == "amount"):
            return found
    return frozenset()


def is_of_another(value: Value, reply: int, replies: Replies) -> bool:
    """Is it surely said of something else than was asked: "another customer gets $40", "the label is $40"?"""
    statements = replies.statements[reply]
    asked, stated = asked_attributes(value.kind, replies), said_of(value, statements)
    if "fee" in asked:  # "an overdraft costs $25"
        asked |= {"purchase"}
    if asked - {"again"} and stated and not stated & (asked | _VAGUE):
        return True
    unit = rate_unit(value.start, value.end, statements) if value.kind.startswith(_RATED) else None
    if _has_another_unit(unit, replies, is_price=value.kind == "amount"):
        return True
    clause = " ".join(statements.around(value.start, value.end))
    if "refund" in asked and _YOU_OWE.search(clause):
        return True
    others, somebody = (
        {stem(word) for words in pattern.findall(clause) for word in words if word not in FUNCTION_WORDS}
        for pattern in (_OTHERS, _SOMEBODY)
    )
    if others & (replies.topic | _PEOPLE) or somebody & (_PEOPLE - replies.topic):
        return True
    if any(stem(word) not in replies.topic for word in _GROUPS.findall(clause)):
        return True
    if any(stem(word) not in replies.topic for word in _FOR_A_KIND.findall(clause)):
        return True
    if any(stem(word) not in replies.topic for words in _ONLY_FOR.findall(clause) for word in words if word):
        return True
    plurals = [word for words in _ALL_OF_A_KIND.findall(clause) for word in words if word]
    if any(stem(word) in replies.topic and word not in replies.topic for word in plurals):
        return True
    return _has_another_key(value, reply, clause, replies) or _is_contrasted(value, reply, replies)


def _is_contrasted(value: Value, reply: int, replies: Replies) -> bool:
    """Is the thing asked about named afterwards only: "Your sofa has K27. For the desk I will ask"?"""
    statements = replies.statements[reply]
    before, after = statements.around(value.start, value.end)
    subject = own_subject(value.start, value.end, asked_attributes(value.kind, replies), statements)
    if not subject or subject in _GENERIC or _PRONOUN.search(before + after):
        return False
    topic = replies.topic - _COMMON - FUNCTION_WORDS
    end = statements.sentence(value.start).end
    later = [_TOPIC.match(statements.low, span.start) for span in statements.sentences if span.start >= end]
    named = [match for match in later if match]
    if any(match[1] for match in named):
        return True
    if topic & {stem(word) for word, start, _ in statements.words if start < end}:
        return False
    return any(topic & set(map(stem, match[2].split())) for match in named)


def _has_another_unit(unit: str | None, replies: Replies, *, is_price: bool) -> bool:
    """Is it the price of another unit than the user asked about: "$12 a day" of the price a month?"""
    if unit in (None, "tim") or unit in replies.topic - replies.counted:
        return False
    if unit in PERIODS:
        return is_price and bool(replies.topic & PERIODS)
    return unit != "each" or bool(replies.counted)


def _has_another_key(value: Value, reply: int, clause: str, replies: Replies) -> bool:
    """Does the clause name another order, person or day than the user did?"""
    titled = set(PERSON.findall(clause))
    if titled and replies.persons and not titled & replies.persons:
        return True
    if value.kind == "time":
        days = {stem(day) for day in DAYS.findall(clause)}
        asked = {stem(day) for day in DAYS.findall(" ".join(replies.topic))}
        return bool(days and asked) and not days & asked
    if any(hour not in replies.topic for hour in _THE_HOUR.findall(clause)):
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
    """Of an identifier: "K27" -> "a9"."""
    return re.sub(r"\d+", "9", re.sub(r"[^\W\d_]", "a", str(name)))


def differs(stated: frozenset[str], attributes: frozenset[str]) -> bool:
    """Is a value said of something else than the attributes of a fact?"""
    known = attributes or stated <= PARTS
    return bool(stated and known) and not stated & attributes


def own_subject(start: int, end: int, attributes: frozenset[str], statements: Statements) -> str:
    """Stem of the first word of a clause that says what a value is of: "the shirt on Monday" -> shirt; or "".

    Of a relative clause it stands before it: "the brake set, which is $25".
    """
    before, after = statements.around(start, end)
    if _WHICH.match(before):
        clause = statements.clauses[statements.clause_number(start)].start
        before = statements.low[max(statements.sentence(start).start, clause - 40) : clause]
    elif (number := statements.clause_number(start)) and _ELLIPSIS.match(before):  # "and arrives on Monday"
        before = statements.low[
            max(statements.sentence(start).start, statements.clauses[number - 1].start) : start
        ]
    common = _COMMON.union(*(_ATTRIBUTES[name] for name in attributes))
    for words in (_WORD.findall(before), _WORD.findall(after)):
        spoken = [word for word in words if word not in FUNCTION_WORDS and not _NO_SUBJECT.fullmatch(word)]
        if spoken:  # "order 48112 is sorted": what comes after is not what the value is of
            return next((stem(word) for word in spoken if stem(word) not in common), "")
    return ""
