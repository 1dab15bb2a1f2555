"""Operators beside a value that make another value of it: "at least $40", "half of $40", "$40 plus tax".

A bound is told only where it is what was asked for ("How long do I have?": "up to 30 days"), or a deadline
("by Friday", "within 5 days"). `is_altered` is called for facts and for the values beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

from stateset_agents.claims.statements import Statements
from stateset_agents.claims.typed_values import stem


class Limit(Enum):
    """Which bound a question asks for."""

    LEAST = "least"
    """ "From when on can I check in?" """
    MOST = "most"
    """ "How many days do I have?" """
    DIFFERENCE = "difference"
    """ "By how much is it reduced?" """


_CAN = r"(?:can|may|could|am|is|are|do|does|must|should) (?:\w+ ){1,2}?"
_ASKS = {
    Limit.DIFFERENCE: re.compile(
        r"\bby how much\b|\bhow much (?:more|less|\w+er)\b|\bhow much\b.*\b(?:reduced|lowered|raised)\b"
    ),
    Limit.LEAST: re.compile(
        rf"\b(?:when|what time|how (?:early|soon)) {_CAN}(?:open|start|begin|check|come|pick|collect|visit"
        rf"|enter"
        r"|use|move|call|drop|board|access)|\b(?:at what time|when|what time)\b.*\b(?:opens?|starts?"
        r"|begins?)\b|\b(?:from when|minimum|at least|earliest|cheapest)\b"
    ),
    Limit.MOST: re.compile(
        rf"\bhow (?:\w+ )(?:\w+ ){{0,2}}?{_CAN}(?:have|take|bring|carry|wait|keep|be|get hot|heat|stay|use"
        rf"|return|go)"
        r"|\bhow (?:hot|late|far|fast|high|heavy|big|large|deep|loud) (?:can|may)\b"
        r"|\b(?:when do i have to|when must i|until when"
        r"|till when|by when|how late|latest|deadline|maximum|max|at most|limit|up to)\b"
        r"|\bwhen\b.*\b(?:ends?|closes?|expires?|finish(?:es)?|runs? out)\b"
    ),
}

_TIMES = ("weekday", "date", "time", "relative", "month")
_GAP = (
    r"\s(?:(?:the|a|an|that|this|these|those|your|our|my|full|whole|total|price|sum|of|for|on|at|in|next"
    r"|coming|only|just|even|being|been|be|to|getting|having|end|evening|morning|delivery|refund|is"
    r"|was)\s){0,4}$"
)
_NOT = r"(?:\bno|\bnot|n't|\bnever|\bcannot|\bneither|\bhardly)\b(?: [\w']+){0,5}? "


def _before(phrases: str, start: str = r"(?<!\w)") -> re.Pattern[str]:
    return re.compile(rf"{start}(?:{phrases}){_GAP}")


_EXACT = re.compile(
    rf"(?:\b(?:no|not|neither) more,? (?:(?:and|or|nor|but) )?(?:no |not )?less than|\bon or (?:by|before)"
    rf"|(?:n't|\bnot|\bnever|\bcannot)\b[^.;:!?]{{0,60}}\b(?:until|till)){_GAP}"
)
"""Not until Friday is on Friday."""
_MORE = (
    r"(?:more|greater|later|longer|higher|hotter|larger|bigger|older|heavier|further|dearer) than|over"
    r"|above|beyond|past|exceed\w*|in excess of|upwards? of|north of|starting|start(?:s|ing)? (?:at|from"
    r"|with|out at)|begin(?:s|ning)? (?:at|from|with)|at (?:the )?(?:very )?least|(?:a "
    r"|the )?(?:bare )?min(?:imum|\.)?(?: of)?|a floor of"
)
_LESS = (
    r"(?:less|fewer|earlier|sooner|shorter|lower|cheaper|cooler|smaller|younger|faster) than|under|below"
    r"|up to|as (?:much|many|little|few|long|late|high|hot|large) as|at (?:the )?(?:very |absolute )?most"
    r"|(?:a |the )?max(?:imum|\.)?(?: of)?|capped at|south of|limited to|a (?:cap|ceiling|limit) of"
)
_MORE_BEFORE = _before(_MORE)
_LESS_BEFORE = _before(_LESS)
_MORE_TIME = _before(r"after|since|from|as of|following")
_LESS_TIME = _before(r"before|prior to|ahead of|until|till")
_FEWER = _before(r"(?:less|fewer|shorter) than|before|prior to|ahead of", r"(?<!no )(?<!not )\b")
_SUBJECT_BOUND = re.compile(
    r"\b(?:(minimum|least|floor|earliest|cheapest|lowest|starting price)|(maximum|most|ceiling|cap|limit))"
    r"(?: [\w']+){0,6}? (?:is|of|at|was|would be|will be) ?$"
)
_NEGATED = re.compile(rf"{_NOT}$")
_MORE_AFTER = re.compile(
    r"\+|,? (?:and|or) (?:up|upwards?|over|above|more|beyond|longer|later|higher|hotter|older|then some"
    r"|counting)\b|,? upwards?\b|,?(?: at| as)?(?: the| a| an)? (?:very |bare |absolute )?(?:least"
    r"|min(?:imum)?|earliest|soonest)\b| and a bit\b| onwards?\b| is (?:only |just )?(?:the|a"
    r"|our) (?:\w+ )?(?:least|minimum|floor|start|starting point)\b"
)
_LESS_AFTER = re.compile(
    r",? or (?:less|under|below|fewer|earlier|sooner|shorter|lower|cheaper|before|faster)\b|,?(?: at"
    r"| as)?(?: the| a)? (?:very |absolute )?(?:most|max(?:imum)?|latest)\b|,? tops\b| is (?:only "
    r"|just )?(?:the|a|our) (?:\w+ )?(?:most|maximum|ceiling|cap|limit)\b"
)
_DEADLINE = _before(r"by|within|inside(?: of)?")

_FRACTION = (
    r"half|halves|quarters?|thirds?|fifths?|tenths?|most|some|much|little|rest|remainder|part|parts"
    r"|fraction|portion|bit|slice|percent|%"
)
_NEAR = _before(
    r"nearly|almost|virtually|practically|as good as|close (?:to|on)|near(?:ing)?|next to|next door to"
    r"|not quite|not far (?:off|from)|far from|like|such as|similar to|approaching|towards?|short of|shy of"
    r"|something of|(?:kind|sort) of|half|partly|on the (?:verge|brink|point|edge|cusp) of|outside(?: of)?"
    r"|on (?:its|the) way to|left|leaving|(?:begin|start|end)(?:s|ing)? with|the same(?: \w+)? as|equal to"
    r"|(?:leaves?|heads?|headed|bound|off|destined) (?:for|to|towards?)|(?:one|two|three|four|five"
    r"|\d+) \w+ (?:after|before|past|from|behind|below|above)|passed|off from|away from|opposite|behind"
    r"|beside|across [^.,]{1,15} from|yet to be|remains? to be|waits? to be|waiting to be|just off"
)
_COMPARED = _before(r"(?:\w+er|more|less|other|rather|different) than|compared (?:to|with)")
_OTHER_BEFORE = _before(
    r"say,?|roughly|approximately|approx\.?|around|about|circa|ca\.?|more or less|loosely|somewhere|barely"
    r"|scarcely|in the (?:region|area|neighbou?rhood|range|order|vicinity) of|something|some|between"
    r"|between [^.;,]{1,25} and"
    rf"|(?:{_FRACTION}) of|half|double|twice|triple|thrice|\w+ times|a multiple of|minus|less|plus|times"
    rf"|multiply|divide|halve|subtract|deduct|take (?:away|off)"
    r"|(?:an )?estimated|an average of|averag(?:es?|ing)|averages? (?:at|out at)|(?:weeks?|days?|months?"
    r"|fortnight) (?:from|on)|(?:week|weekend|month|days) (?:of|leading up to)|(?:some ?time|well|long"
    r"|shortly|soon|just|right|while|minutes?|hours?|days?|weeks?|months?) (?:after|before|past)",
    r"(?<![a-z$])",
)
_DIFFERENCE = _before(r"by")
_INDEFINITE = re.compile(
    r"(?<!\w)(?:any|every|each|some|another|a|an|one|most|last|black|good|freaky|casual|cyber|fat|ash"
    r"|the \w+ before|the \w+ after|alternate)(?: given| old| random| normal| fine| sunny)? $"
)
_OTHER_AFTER = re.compile(
    r"-?ish\b|,? or (?:so|thereabouts|near|about|around|(?:a (?:bit|little|touch)|slightly|somewhat) \w+)\b"
    r"|,? give or take\b| (?:\w+er|more|less|other) than\b| (?:ago|more|less|fewer|short|too \w+|worth of"
    r"|on top of)\b"
    r"(?! (?:and|or)\b)| (?:is|was|would be) (?:\w+ )?(?:more|less|\w+er) than (?!enough|fair)"
)
_FRACTION_AFTER = re.compile(
    rf",? (?:(?:or|well|no|but|and),? )*(?:rather |actually |i mean |make that |only )*(?:an? |the |one )?"
    rf"(?:(?:{_FRACTION}) of|twice|double|half) (?:it|that|this)\b| (?:of|in) (?:our|all|the|my"
    rf"|those) (?:customers|students"
    r"|users|people|cases|orders|buyers|guests|clients|members)\b"
)
_OFF_AFTER = re.compile(r" off (?:the|your|that|it|this)\b")
_PLUS_AFTER = re.compile(
    r",? ?(?:minus|less)\b|,? ?(?:plus|net of|excluding|excl\.?|exclusive of|not (?:including|counting)"
    r"|apart from)\b"
    r"(?! [^.;]{0,20}\d)|,? (?:before|without|on top of) (?:\w+ )?(?:tax|taxes|vat|fees?|charges?|costs?"
    r"|postage|shipping|deductions?|discounts?|extras)\b"
)
_DAY_AFTER = re.compile(
    r" (?:last (?:week|month|year)|after next|after that|before that|week\b|fortnight\b|in (?:a|two|three"
    r"|four|\d+) (?:weeks|months?|years?))"
)
_RATE = re.compile(
    r",? (?:per|each|every|for (?:each|every|one|a single)) ([^\W\d_]+)| an? (hour|day|night|week|month"
    r"|year|piece|head|person|item|unit|pop|kilo|ticket)\b(?! (?:ago|later|before|after)\b)|/ ?([^\W\d_]+)"
    r"| (apiece|each|hourly|daily|nightly|weekly|monthly|yearly|annually)\b"
)
_RATE_BEFORE = re.compile(r"\b(?:each|every|per|one|an?) (?:[^\W\d_]+ )?([^\W\d_]+) (?:is|costs?|for|at|:) $")
PERIODS = frozenset(map(stem, ("hour", "day", "night", "week", "month", "year")))
_PERIOD_WORDS = {"hourly": "hour", "daily": "day", "nightly": "night", "weekly": "week", "monthly": "month"}
_PERIOD_WORDS |= {"yearly": "year", "annually": "year"}


_COUNTED = re.compile(
    r"\b(?:two|three|four|five|six|seven|eight|nine|ten|\d+|both|all|these) ([^\W\d_]+)(?: ([^\W\d_]+))?"
)
_OPEN_QUOTE = re.compile(r"[\"\u201c\u00ab][^\"\u201c\u201d\u00ab\u00bb]*$")
_CLOSE_QUOTE = re.compile(r"[^\"\u201c\u201d\u00ab\u00bb]*[\"\u201d\u00bb]")
_SHOWN = re.compile(
    r"\b(?:says?|reads?|shows?|states?|displays?|is|status)\W*[\"\u201c\u00ab][^\"\u201c\u00ab]*$"
)
_MEDIUM = re.compile(
    r"\b(?:film|movie|show|series|song|album|book|novel|poem|story|guide|article|page|post|blog|leaflet"
    r"|poster|sign|band|game|word|term|title|name|phrase|headline|slogan|motto|read|watch|sing|called"
    r"|entitled|asked|wrote|said)\b",
    re.IGNORECASE,
)
_WORDS_OF = re.compile(r"[^.!?]*\b(?:word|term|name|phrase|title|film|song|book|letters|syllables)\b")
_TITLED = re.compile(
    r"\b(?:the (?:word|term|phrase|name|title)|titled|entitled|called|named|known as)\W{1,3}$"
)
_NAME_AFTER = re.compile(
    r" (?!(?:Morning|Afternoon|Evening|Night|Noon|January|February|March|April|May|June|July|August"
    r"|September|October|November|December)\b)[A-Z][a-z]+"
)
_NAME_BEFORE = re.compile(r"[a-z,] (?!(?:On|By|This|Next|Coming|For|The)\b)[A-Z][a-z]+ $")


def asked_limits(texts: Iterable[str]) -> frozenset[Limit]:
    """The bounds that questions ask for: "How many days do I have?" -> {MOST}."""
    return frozenset(limit for text in texts for limit, asks in _ASKS.items() if asks.search(text.lower()))


def is_altered(start: int, end: int, kind: str, statements: Statements, limits: frozenset[Limit]) -> bool:
    """Does an operator beside the value there make it another value?

    `kind` is the value's, "" for words that no type knows; `limits` are the bounds that may stand for it.
    """
    sentence = statements.sentence(start)
    low = statements.low
    before = low[max(sentence.start, start - 80) : start]
    after = low[end : min(sentence.end, end + 40)]
    if _NEAR.search(before):
        return True
    is_label = kind in ("", "id", "place", "status") or kind.startswith(("number:", "choice:"))
    if is_label and not low[start : start + 1].isdigit():
        return bool(_COMPARED.search(before))
    if _EXACT.search(before):
        return False
    other = _OTHER_AFTER.match(after)
    if other and not (Limit.DIFFERENCE in limits and other[0].endswith(" than")):
        return True
    if _OTHER_BEFORE.search(before) or _FRACTION_AFTER.match(after):
        return True
    is_time = kind in _TIMES
    if kind == "weekday" and _DAY_AFTER.match(after):
        return True
    if (
        not is_time
        and kind != "duration"
        and (_PLUS_AFTER.match(after) or (Limit.DIFFERENCE not in limits and _DIFFERENCE.search(before)))
    ):
        return True
    if kind != "percent" and _OFF_AFTER.match(after):
        return True
    if kind == "duration" and Limit.MOST in limits and _MORE_TIME.search(before):
        return True
    bound = _bound(before, after, kind)
    if bound is Limit.MOST and _FEWER.search(before):
        return True
    if bound is None or bound in limits:
        return False
    is_deadline = bound is Limit.MOST and (
        (is_time and not _LESS_TIME.search(before) and not _LESS_BEFORE.search(before))
        or (kind == "duration" and not re.search(r"\b(?:less|fewer|shorter|under|below)\b[^.]*$", before))
    )
    return not is_deadline


def is_indefinite(start: int, statements: Statements) -> bool:
    """Is it no certain day: "on a Friday", "every Friday"; or a name: "Black Friday"?"""
    return bool(_INDEFINITE.search(statements.low, max(0, start - 30), start))


def _bound(before: str, after: str, kind: str) -> Limit | None:
    """Which bound the words beside a value make of it; "not more than" is the other than "more than"."""
    is_time = kind in _TIMES
    timed = is_time or kind == "duration"
    for limit, patterns in (
        (Limit.LEAST, (_MORE_BEFORE, *((_MORE_TIME,) if is_time else ()))),
        (Limit.MOST, (_LESS_BEFORE, *((_LESS_TIME,) if is_time else ()))),
    ):
        for pattern in patterns:
            if match := pattern.search(before):
                earlier = before[: match.start()].removesuffix("until ").removesuffix("till ")
                negated = earlier == before[: match.start()] and bool(_NEGATED.search(earlier))
                return (Limit.MOST if limit is Limit.LEAST else Limit.LEAST) if negated else limit
    if match := None if is_time else _SUBJECT_BOUND.search(before):
        return Limit.LEAST if match[1] else Limit.MOST
    if not is_time and re.search(rf"\bfrom{_GAP}", before):
        return Limit.LEAST
    if _MORE_AFTER.match(after):
        return Limit.LEAST
    if _LESS_AFTER.match(after) or (timed and _DEADLINE.search(before)):
        return Limit.MOST
    return None


def counted_nouns(text: str) -> frozenset[str]:
    """Stems of what a text counts: "two tickets" -> {"ticket"}."""
    return frozenset(stem(noun) for nouns in _COUNTED.findall(text.lower()) for noun in nouns)


def is_cited(start: int, end: int, kind: str, statements: Statements) -> bool:
    """Is it a part of a title or name, or a word that is spoken of: "Black Friday", 'the word "Friday"'?"""
    sentence = statements.sentence(start)
    before = statements.text[max(sentence.start, start - 80) : start]
    after = statements.text[end : min(sentence.end, end + 80)]
    quoted = _OPEN_QUOTE.search(before)
    if quoted and (closed := _CLOSE_QUOTE.match(after)):
        if _MEDIUM.search(before) or _WORDS_OF.match(after):
            return True
        if (
            re.search(r"\w", quoted[0])
            and re.search(r"\w", closed[0] + quoted[0])
            and not _SHOWN.search(before)
        ):
            return True
    if _TITLED.search(before.lower()):
        return True
    return kind in ("weekday", "amount") and bool(
        _NAME_AFTER.match(after) or (kind == "weekday" and _NAME_BEFORE.search(before))
    )


def rate_unit(start: int, end: int, statements: Statements) -> str | None:
    """Stem of the unit that a price is for: "$20 per ticket" -> "ticket", "$20 each" -> "each"."""
    sentence = statements.sentence(start)
    match = _RATE.match(statements.low, end, min(sentence.end, end + 40))
    match = match or _RATE_BEFORE.search(statements.low, max(sentence.start, start - 40), start)
    if match is None:
        return None
    word = next(group for group in match.groups() if group)
    return stem(_PERIOD_WORDS.get(word, word))
