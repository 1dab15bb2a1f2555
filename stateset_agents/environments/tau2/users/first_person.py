"""tau2 tells its users what they want as "you want ..."; this says it as they would: "I want ..."."""

from __future__ import annotations

import re

_OBJECT = (
    r"(to|for|with|of|from|by|at|on|about|give|gives|gave|tell|tells|told|offer|offers|offered|ask|asks|asked|"
    r"send|sends|sent|show|shows|let|lets|help|helps|charge|charged|refund|call|remind|cost|costs|allow|allows)"
)
_CHANGES = tuple(
    (re.compile(pattern, re.IGNORECASE), words)
    for pattern, words in (
        (r"\byou name\b", "my name"),  # a slip in a dozen of retail's tasks
        (r"\byou (mobile data)\b", r"my \1"),  # and in telecom's
        (r"\bdo you\b", "do I"),
        (r"\bare you\b", "am I"),
        (r"\byou are\b", "I am"),
        (r"\byou're\b", "I'm"),
        (r"\byou were\b", "I was"),
        (r"\byou've\b", "I've"),
        (r"\byou'll\b", "I'll"),
        (r"\byou'd\b", "I'd"),
        (r"\byourself\b", "myself"),
        (r"\byours\b", "mine"),
        (r"\byour\b", "my"),
        (rf"\b{_OBJECT} you\b(?! (?:want|have|are|will|can|would|do|did|had)\b)", r"\1 me"),
        (r"\byou\b", "I"),
    )
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def as_told(text: str) -> str:
    """`You want your order cancelled.` -> `I want my order cancelled.`"""
    for pattern, words in _CHANGES:
        text = pattern.sub(words, text)
    return re.sub(r"(^|[.!?]\s+)([a-z])", lambda found: found[1] + found[2].upper(), text.strip())


def sentences(text: str) -> list[str]:
    """The sentences of a text; a single full stop, as some tasks have, is none."""
    return [part.strip() for part in _SENTENCE.split(text) if re.search(r"\w", part)]
