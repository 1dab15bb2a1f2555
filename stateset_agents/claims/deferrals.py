"""Does a reply put the answer off: "the date will be announced", "how much you get is up to your bank"?

A value before such words was said of something else. What is put off is named by a noun of the value's type,
by one of the question, or by a question word, so "the driver will tell you the hour" takes no day back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from stateset_agents.claims.mentions import Mention, Replies
from stateset_agents.claims.statements import Statements
from stateset_agents.claims.text_checks import FUNCTION_WORDS
from stateset_agents.claims.typed_values import stem

_DAY = ("day date route schedule", "when")
_NAMES: Mapping[str, tuple[str, str]] = {
    "weekday": _DAY,
    "date": _DAY,
    "relative": _DAY,
    "time": ("time slot", "when"),
    "amount": ("amount sum figure price cost fee charge rate total share part excess", "how much|what"),
    "percent": ("rate percentage figure amount", "how (?:much|big|high)|what"),
    "duration": ("period speed length duration time", "how (?:long|quickly|fast|soon)|what"),
    "place": ("place city town location", "where"),
}
"""Per type of value: nouns that name it, and words that ask for it."""
_LABEL = ("number code gate seat room status size colour platform name plan", "what|where")
_NOUNS = frozenset(noun for nouns, _ in (*_NAMES.values(), _LABEL) for noun in nouns.split())

_DECIDED = (
    r"announced|decided|set|fixed|assigned|allotted|determined|worked out|calculated|drawn up|named|published"
    r"|posted|discussed|negotiated|agreed|planned|reviewed|chosen|settled|revealed|looked (?:at|into|up)"
)
_PASSED = r"given|handed|sent|texted|printed|shown|listed|told|issued|found"
_LATER = (
    r"(?:will|'ll|can only|must|to|yet to|going to) be|(?:is|are)(?: still| just| now)? being|ha(?:s|ve)"
    r"(?: not|n't| yet to)(?: yet)?(?: been| be)?|(?:is|are)(?: not|n't) yet|not"
)
_OPEN = (
    rf"(?:{_LATER}) (?:\w+ )?(?:{_DECIDED}|(?P<passed>{_PASSED}))\b(?! (?:too|also|as well|again))|(?:is|are)"
    rf" (?:{_DECIDED}|(?P<shown>{_PASSED})) (?:by|in|with|when|after|once|at|for each"
    rf"|separately)\b(?! \W?\d)|(?:is|are|remains?|stays?)"
    r"(?: still| yet| entirely| all| not|n't){0,2} (?:open|unknown|unclear|known|up to|down to|a mystery"
    r"|an? \w+ (?:for|of|that|which)|for [^.,;]{1,30} to|in the hands)\b|differs?|var(?:y|ies)|depends?"
    r"|hinges?"
)
_AGENT = (
    r"will|'ll|can|shall|going to|ha(?:s|ve)(?: still)? to|must|needs? to|let (?:me|us)|would have to"
    r"|(?:am|is|are"
    r"|'m|'re)(?: still| now| just)?|has|have|and|before i can|(?:we|i)(?= need)"
)
_FIND = (
    r"(?P<firm>name|decide|announce|determine|publish)|tell|set|fix|post|offer|find|work out|look up"
    r"|send|text|e?-?mail|write|call|ring|give"
    r"|get|come back|suggest|inform|look (?:at|for|into)|check|choose|need|issue|assign|let"
    r"|search|preparing|searching|looking|checking|asked|asking|working out|provide|show|explain|settle"
)
_PUT_OFF = re.compile(
    r"\b(?P<subject>(?:the|your|our|its|which|this|a|how (?:much|long|quickly|fast|soon|big|high)|what"
    r"|when|where)"
    rf"(?:,? [\w'-]+){{1,12}}?) (?:{_OPEN})"
    rf"|(?:\b|(?='))(?:{_AGENT}) (?:(?!(?:what|which|how|when|where|you|it"
    rf"|that)\b)[\w']+ ){{0,3}}?(?:{_FIND})"
    r"(?=(?P<object>(?: [\w'-]+){1,9}))"
    r"|\b(?:decides?|determines?|chooses?|fixes|lays? down|works? out|sets (?:its|the|their)|settles?"
    r"|explains?)"
    r"(?=(?P<matter>(?: [\w'-]+){1,8}))"
    r"|\b(?:i|we|nobody|no one)(?: [\w']+){0,3}? (?:can|cannot|can't|has|has not|hasn't|was not|wasn't"
    r"|were not"
    r"|do not|don't)(?: [\w']+){0,2}? (?:say|tell|told|name|given|see|have|vouch|know)(?! how (?:sorry|glad"
    r"|happy|much we))(?=(?P<unknown>(?:,? [\w'-]+){0,8}))"
)
_NOTHING = re.compile(
    r"\b(?:have|has|got|seen|with)(?: still| as yet)? (?:no (?:news|information|word|access|record"
    r"|details?|data|(?:price )?list)"
    r"|nothing (?:in writing|yet|here))\b((?: [\w'-]+){0,8})|\blet me (?:just )?(?:ask|check|find out|look)\b"
    r"(?! (?:that|whether|if)\b)((?: [\w'-]+){0,6})|(?:will|'ll|must|ha(?:s|ve) to|let me"
    r"|needs? to) (?:\w+ )?(?:find out"
    r"|ask(?= ?[.,;])|look (?:\w+ )?up|(?:get|come) back to you|dig|look into (?:it|that"
    r"|this))\b((?: [\w'-]+){0,6})|\bplease wait for (?:the|a|our|his|her|their) (?:letter|answer|reply"
    r"|message|e?-?mail"
    r"|decision|result)|(?<!you )\bstill (?:has|have|needs?) to (?:look|check|ask|find|see|decide)\b"
    r"|\bnot in front of me\b|(?:can(?:no|')t|cannot) (?:confirm|vouch for|promise) (?:it|that|this|them)\b"
)
"""It says that nothing is known, whatever was asked."""
_INSTEAD = re.compile(
    r"\b(?:some(?:thing|where) else|another (?:way|key|room|date|day|time|offer)|the one (?:that|which|with)"
    r"|which (?:of|one)|(?:right|proper|real|correct) [a-z]+|a (?:new|different) (?:one for you|date"
    r"|day|time|slot"
    r"|room|code|price|plan))\b"
)
_NAMED = re.compile(
    r"(?<!on )(?<!at )(?<!by )\b(?:the|an?|your|our|its|his|her|another|which|this|any|own)"
    r"(?: (?:new|right|exact|final|proper|own|real|correct|different|other|departure|arrival|delivery"
    r"|notice))*"
    r" ([a-z]+)\b(?! (?:list|tag|card|number))(?: (?:of|for|about) (?:the |your |our |an? |own )*([a-z]+))?"
)
_ASKING = re.compile(r"(?:how|what|where|when)\b|which \w+")
_ABOUT = re.compile(r"\b(?:about|of|on|for) (?:(?:the|your|our|an?|own|its) )+([a-z]+)")
_WITHIN = re.compile(r"\b(?:how|what|where|when|who|why|whether|if|that|to)\b")
_ANY = frozenset(("it", "own", "one", "you", "this", "that", "us", "them"))


def is_deferred(mention: Mention, replies: Replies) -> bool:
    """Do words after the mention say that what it would answer is still to come, or is not known?"""
    kinds = {value.kind for value in mention.values} or {""}
    later = range(mention.reply, len(replies.statements))
    starts = {number: mention.end if number == mention.reply else 0 for number in later}
    return any(
        _puts_off(kind, start, replies.statements[number], replies)
        for number, start in starts.items()
        for kind in kinds
    )


def _puts_off(kind: str, start: int, statements: Statements, replies: Replies) -> bool:
    nouns, questions = _NAMES.get(kind, _LABEL)
    mine = frozenset(map(stem, nouns.split()))
    if nouns == _LABEL[0]:
        mine &= replies.questions
    known = replies.topic | mine | _ANY
    asked = {word for word in replies.questions if word not in _NOUNS | FUNCTION_WORDS} | mine
    asks = re.compile(rf"\b(?:{questions}) (?:you|it|the|your|they|our|we|i|is (?:right|due|best))\b")
    for match in _NOTHING.finditer(statements.low, start):
        words = " ".join(filter(None, match.groups()))
        if _is_said(match, statements) and known.issuperset(map(stem, _ABOUT.findall(words))):
            return True
    for match in _PUT_OFF.finditer(statements.low, start):
        words = match["subject"] or match["object"] or match["matter"] or match["unknown"] or ""
        if not _is_said(match, statements):
            continue
        head = _ASKING.match(words) if match["subject"] else None
        is_asked = asks.match(words) if head else asks.search(words)  # "let you know when" puts nothing off
        if is_asked and not (match["object"] and questions == "when"):
            return True
        if match["object"] and _INSTEAD.search(words):
            return True
        wide = match["firm"] or (match["subject"] and not match["passed"] and not match["shown"])
        if any(
            stem(noun) in (asked if wide else mine) and (not other or stem(other) in known)
            for noun, other in _NAMED.findall(head[0] if head else _WITHIN.split(words)[0])
        ):
            return True
    return False


def _is_said(match: re.Match[str], statements: Statements) -> bool:
    """Is it no question and under no condition?"""
    modality = statements.at(match.start())
    return not modality.asked and (not modality.supposed or "would" in match[0])
