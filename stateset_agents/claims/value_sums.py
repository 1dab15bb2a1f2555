"""Sums and products that values make: "$30 for the shirt and $10 for shipping, $40 in total"."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import combinations, product

from stateset_agents.claims.mentions import Replies
from stateset_agents.claims.typed_values import Value

_MOST_TERMS = 8
"""More values are no sum that anyone tells; it bounds the work, too."""
_MOST_FACTORS = 4
_MARKER = re.compile(
    r"\b(?:total|altogether|all told|sum|subtotal|together|overall|both|each|every|per|apiece|plus|less"
    r"|minus|makes?|making|com(?:es?|ing) to|adds? up|adding up|leav(?:es?|ing)|so|thus|therefore|hence"
    r"|that's|that is|which is|combined|times|deduct\w*|subtract\w*|after|keep|kept|withh\w+|an? (?:hour"
    r"|day|night|week|month|year|piece)|in all|all|half|twice|double|equals?|split|rest|remain\w*|balance"
    r"|consists?|includ\w+|instal\w+)\b|[=+\u00d7]|[$€£]\d[\d.]*:|\d for (?:the|your)\b|\d ?x ?[$\d]"
)
_WORDS = {
    "two": 2.0,
    "both": 2.0,
    "pair": 2.0,
    "couple": 2.0,
    "twice": 2.0,
    "double": 2.0,
    "three": 3.0,
    "triple": 3.0,
}
_WORDS |= {"four": 4.0, "five": 5.0, "six": 6.0, "half": 0.5, "dozen": 12.0, "year": 12.0, "annual": 12.0}
_COUNT = re.compile(rf"(?<![\w.,$€£])\d+(?:\.\d+)?(?=\s?%)?|\b(?:{'|'.join(_WORDS)})s?\b")


def adds_up(fact: Value, second: Value, replies: Replies) -> bool:
    """Do the values of the fact's type make an equation with the fact and the second in it?

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
        _equal(total, sum(factor * term for factor, term in zip(chosen, terms_of, strict=True)))
        for chosen in product(times, repeat=len(terms_of))
    )


@lru_cache(maxsize=512)
def _tells_a_sum(text: str) -> bool:
    return bool(_MARKER.search(text))


def _number(value: Value) -> float | None:
    """The number in a value; None where it has none."""
    number = value.value
    if isinstance(number, tuple):
        number = next((item for item in number if isinstance(item, float)), None)
    return number if isinstance(number, float) else None


@lru_cache(maxsize=512)  # asked for each second value
def find_counts(text: str) -> frozenset[float]:
    """The numbers of a text in lower case that may count something: "two tickets" -> {2.0}."""
    return frozenset(_WORDS.get(found.removesuffix("s")) or float(found) for found in _COUNT.findall(text))


def _equal(first: float, second: float) -> bool:
    return abs(first - second) < 0.005
