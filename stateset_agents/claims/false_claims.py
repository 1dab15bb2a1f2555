"""Does a text claim a phrase that it must not, in these words or in others that say the same?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from stateset_agents.claims.mentions import denied_after, phrase_spans, read_values, wanted_value
from stateset_agents.claims.statements import Statements, TextSpan, read_statements
from stateset_agents.claims.text_checks import FUNCTION_WORDS
from stateset_agents.claims.typed_values import same_value, stem

_PAYS = r"pay|paid|give|gave|get|send|return|credit|put|have|receive|hand|transfer"
_MONEY = r"money|amount|price|payment|cash|funds"
_MEANINGS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)")
    for name, phrases in {
        "full": (
            r"full(?:y)?|complete(?:ly)?|entire(?:ly)?|entirety|whole|total(?:ly)?|all of it|the lot"
            r"|all your \w+",
            r"(?:100|one hundred|a hundred) ?(?:%|percent|per cent)|every (?:single |last )?(?:cent|penny"
            r"|dollar|euro|bit)",
            rf"all (?:of )?(?:your|the|that|my|this) (?:{_MONEY})",
            r"(?:everything|all|all that|whatever)(?: that)? you(?:'ve| have)? (?:paid|spent)",
        ),
        "refund": (
            r"refund\w*|reimburs\w*|repa(?:y|id|yment|ys|yments)|money[- ]back|(?:your|the|my) (?:money"
            r"|cash|payment) back",
            rf"(?:{_PAYS})\w{{0,4}} (?:(?!(?:and|or|but)\b)[\w'%$]+ ){{0,6}}?(?:back|returned)",
            rf"(?:{_MONEY}) (?:\w+ ){{0,3}}?back",
            r"return(?:s|ed|ing)? (?:all |everything|the |your |what )",
        ),
        "free": (
            r"free|complimentary|gratis|(?:at )?no (?:extra |additional )?(?:cost|charge)|on the house"
            r"|for nothing",
            r"without (?:any )?(?:cost|charge)|costs? (?:you )?nothing|on us|our (?:treat|cost|expense)",
            r"we (?:will )?(?:pay|cover|bear|absorb)(?: for)?",
        ),
        "guarantee": (r"guarant\w*|promis\w*|assur\w*",),
        "cancel": (r"cancel\w*|call(?:ed|ing)? (?:it )?off|void(?:ed)?",),
        "replace": (r"replac\w*|new one|another one|swap\w*",),
        "discount": (r"discount\w*|rebate\w*|(?:percent|%|dollars|\$\d+) off|price cut",),
        "lifetime": (r"lifetime|for life|for ?ever",),
    }.items()
}
"""Words of a shop's promises, and other words for them."""

_RESTRICTED = re.compile(
    r"\b(?:only (?:for|on|if|when|from|above|over|with|applies|starts?)|(?:starts?|begins?) (?:at|from)"
    r"|kicks in|reserved for|limited to|applies (?:only )?(?:to|from|above|over)|orders (?:over|above|of"
    r"|from)|for members)\b"
)
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
            denials = modality.denials + denied_after(statements, end)
            withheld = modality.planned or modality.asked or (modality.supposed and not denials)
            if denials % 2 == 0 and not withheld and not _RESTRICTED.search(statements.clause(start)):
                return True
    return False


def _spans(wording: str, statements: Statements) -> Iterator[TextSpan]:
    """Where the phrase is said: its words, its value, or its words' meanings close together."""
    yield from phrase_spans(wording, statements, plural=True)
    value = wanted_value(wording)
    if value is not None:
        if value.kind not in ("number:", "status"):
            found = read_values(statements.text)
            yield from (TextSpan(other.start, other.end) for other in found if same_value(other, value))
        return
    parts = re.findall(r"[\w'$€£%]+", wording.lower())
    if len(parts) < 2 or not FUNCTION_WORDS.isdisjoint(parts):
        return
    places = [_meant(part, statements) for part in parts]
    near = [0] * len(parts)
    """Per part, the first place that is not too far before the first part's: each moves on only."""
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
    """Where words of the part's meaning stand."""
    meaning = next((pattern for pattern in _MEANINGS.values() if pattern.fullmatch(part)), None)
    if meaning is not None:
        return [TextSpan(*match.span()) for match in meaning.finditer(statements.low)]
    wanted = stem(part)
    return [TextSpan(start, end) for word, start, end in statements.words if stem(word) == wanted]


def _is_together(first: TextSpan, second: TextSpan, statements: Statements) -> bool:
    """In one clause, or with a comma between them: "a refund, in full"."""
    before, after = sorted((first, second))
    if after.start - before.end > _TOGETHER:
        return False
    clauses = statements.clause_number(after.start) - statements.clause_number(before.start)
    between = statements.low[before.end : after.start]
    joined = len(between) <= 12 and not re.search(r"[.!?;:\n]|\b(?:and|but|so|because)\b", between)
    return clauses == 0 or joined
