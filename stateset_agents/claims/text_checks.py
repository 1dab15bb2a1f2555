"""Checks plain text without a model: whether it is prose, is rude or declines; and reads lists of facts.

Used by the form rewards (rewards/factories.py) and the rule-based user
(core/users/simulated_user.py). The word lists are English. Which facts a text tells is read by
`fact_status.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from stateset_agents.claims.english import Patterns, word_list
from stateset_agents.types.errors import ConfigurationError

WORD = re.compile(r"[$€£]?\d+(?:[.,:]\d+)*%?|\w+(?:'\w+)*")

_ENGLISH = Patterns("text_checks")
FUNCTION_WORDS = word_list("function")


_MARKUP = re.compile(
    r"<\||\|>|</?(s|tool_\w+|think|system|user|assistant)>|\[/?INST\]|<<SYS>>", re.IGNORECASE
)
_LABELLED = re.compile(r"^[ \t]*(?:[-*•]|\d+[.)])?[ \t]*(?:\w+ ){0,2}\w+: ?(?:[^\s:]+ ?){1,3}$", re.MULTILINE)
"""A line of a list that says what of what: "- Refund: $40"."""
_SYNTAX = frozenset('{}[]<>|"=\\`')


def words(text: str) -> list[str]:
    """Words and numbers in lower case: "It's $5.50, K27." -> it's, $5.50, k27."""
    return WORD.findall(text.lower().replace("\u2019", "'"))


def content_words(text: str) -> set[str]:
    """The words that carry a topic: no function words, nothing under three letters."""
    return {word for word in words(text) if len(word) > 2 and word not in FUNCTION_WORDS}


def facts(context: Mapping[str, object], key: str) -> dict[str, tuple[str, ...]]:
    """The facts listed under `context[key]`: name -> accepted wordings.

    A list of phrases, or a mapping of names to phrases; a list instead of a phrase gives wordings of
    which one is enough. Raises ConfigurationError for anything else.

        {"expected_facts": ["K27", ["5 days", "five days"]]}  ->  {"K27": ("K27",), "5 days": (...)}
    """
    value = context.get(key)
    if value is None:
        return {}
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        named = [(str(name), _wordings(key, value)) for name, value in value.items()]
    elif isinstance(value, Sequence):
        named = [(wordings[0], wordings) for wordings in (_wordings(key, value) for value in value)]
    else:
        raise ConfigurationError(
            f"context[{key!r}] must be a list of phrases or a mapping, got {value!r:.60}"
        )
    return dict(named)


def choices(context: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """The lists under `context["choices"]`, each a type of values of which an answer may name one.

    A list of phrases, or a list of such lists. Raises ConfigurationError for anything else.

        {"choices": ["aspen", "cedar", "pine"]}  ->  (("aspen", "cedar", "pine"),)
    """
    value = context.get("choices")
    if value is None:
        return ()
    listed = (
        [value]
        if isinstance(value, Sequence) and all(isinstance(item, str | int | float) for item in value)
        else value
    )
    if isinstance(value, str) or not isinstance(listed, Sequence) or not listed:
        raise ConfigurationError(
            f"context['choices'] must be a list of phrases or of such lists, got {value!r:.60}"
        )
    return tuple(_wordings("choices", options) for options in listed)


def _wordings(key: str, value: object) -> tuple[str, ...]:
    wordings = [value] if isinstance(value, str | int | float) else value
    if not isinstance(wordings, Sequence) or not wordings or not all(words(str(item)) for item in wordings):
        raise ConfigurationError(
            f"a fact in context[{key!r}] must be a phrase or a list of phrases, got {value!r:.60}"
        )
    return tuple(str(item) for item in wordings)


def is_prose(text: str, *, english: bool = True) -> bool:
    """True for something a person could have written: no gibberish, keyword list, JSON or control tokens,
    no repeating.

    `english=False` leaves out the check that needs function words.
    """
    text_words = words(text)
    if not text_words or _MARKUP.search(text):
        return False
    if sum(map(_SYNTAX.__contains__, text)) > max(3, 0.08 * len(text)):
        return False
    letters = [word for word in text_words if word.isalpha()]
    if sum(map(_looks_typed_at_random, letters)) > 0.3 * len(text_words):
        return False
    if len(text_words) >= 5 and len(set(pairwise(text_words))) < 0.7 * (len(text_words) - 1):
        return False
    running = words(_LABELLED.sub("", text))
    if english and len(running) >= 6 and sum(map(FUNCTION_WORDS.__contains__, running)) < 0.2 * len(running):
        return False
    if len(text_words) >= 10:
        most = max(Counter(word for word in text_words if word not in FUNCTION_WORDS).values(), default=0)
        return most <= max(2, 0.2 * len(text_words))
    return True


def _looks_typed_at_random(word: str) -> bool:
    if len(word) > 24 or re.search(r"(.)\1\1", word):
        return True
    if not word.isascii() or len(word) < 4:
        return False
    return not re.search(r"[aeiouy]", word) or bool(re.search(r"[^aeiouy]{5,}", word))


def echo(text: str, heard: Sequence[str]) -> float:
    """Share of the text's word triples that stand in one of the texts heard; 0 below five words."""
    triples = _triples(text)
    if len(triples) < 3:
        return 0.0
    others = [set(_triples(other)) for other in heard]
    return max((sum(triple in other for triple in triples) for other in others), default=0) / len(triples)


def _triples(text: str) -> list[tuple[str, ...]]:
    text_words = words(text)
    return list(zip(text_words, text_words[1:], text_words[2:], strict=False))


def is_rude(text: str) -> bool:
    """True for insults and brush-offs."""
    return bool(_ENGLISH.rude.search(text))


def is_courteous(text: str) -> bool:
    """True where the text apologises, thanks, or offers help."""
    return bool(_ENGLISH.courteous.search(text))


def is_refusal(text: str) -> bool:
    """True for "I can't help with that" and its like."""
    return bool(_ENGLISH.refusal.search(text))


def declines(text: str) -> bool:
    """True where the text says that something will not be done or told: "I am not allowed to share that"."""
    return bool(_ENGLISH.declines.search(text.replace("\u2019", "'")))


def is_pleased(text: str) -> bool:
    """True for thanks and praise, and no complaint."""
    return bool(_ENGLISH.pleased.search(text)) and not is_displeased(text)


def is_displeased(text: str) -> bool:
    """True for a user who complains: of the answer, of having to ask again, or for a human."""
    return bool(_ENGLISH.displeased.search(text.replace("\u2019", "'")))
