"""What can be read off plain text without a model: was a fact told, is this prose, is it rude.

Used by the form rewards (core/reward_factories.py) and the rule-based user (core/simulated_user.py).
`told` works in any language written with spaces; the word lists are English.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from stateset_agents.errors import ConfigurationError

__all__ = [
    "MOST_READ",
    "content_words",
    "declines",
    "echo",
    "facts",
    "is_courteous",
    "is_displeased",
    "is_pleased",
    "is_prose",
    "is_refusal",
    "is_rude",
    "sprayed",
    "told",
    "words",
]

MOST_READ = 20_000
"""Characters of one text that are read; a longer one is no prose, and of it only the start is looked at."""

_WORD = re.compile(r"[$€£]?\d+(?:[.,:]\d+)*%?|\w+(?:'\w+)*|[.,;:!?]")
_CLAUSE_ENDS = frozenset(".,;:!?")
_CLAUSE_STARTS = frozenset({"and", "but", "so", "however", "because"})
_NEGATIONS = frozenset({"not", "no", "never", "cannot", "without", "unable", "nor", "neither"})

_FUNCTION_WORDS = """
    a about after again all also am an and any are as at be because been before being but by can can't
    could did do does doesn't don't done for from get had has have he her here him his how i i'll i'm i've
    if in into is it it's its just let like may me more my next no not now of off on once one or our out
    over please she should so some soon than that that's the their them then there these they this those
    to too until up us was we we'll we've were what when where which while who why will with within would
    yes yet you you'll you're your"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())

_RUDE = re.compile(
    r"\b(stupid|idiots?|moron|dumb|shut up|go away|whatever|not my (problem|job|fault)|your (own )?fault"
    r"|(do not|don't|couldn't) care|stop (whining|complaining|bothering|wasting)|deal with it|get lost"
    r"|too bad|crap|damn|hell no|pathetic|ridiculous|nonsense|waste of (my )?time|leave me alone)\b",
    re.IGNORECASE,
)
_COURTEOUS = re.compile(
    r"\b(sorry|apolog\w+|thank(s| you)|please|happy to|glad|welcome|understand|appreciate|my pleasure)\b",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\b(can ?not|can't|unable to|won't|not able to) (help|assist|do (this|that|anything))\b", re.IGNORECASE
)

_DECLINES = re.compile(
    r"\b(can ?not|can't|unable to|won't|will not|not able to|not allowed to|may not|must not) (\w+ ){0,2}?"
    r"(help|assist|do|share|give|tell|say|provide|disclose|reveal|discuss|show|send|explain|support)\b"
    r"|\b(have to|must) (decline|refuse)\b|\bi (decline|refuse)\b",
    re.IGNORECASE,
)
_PLEASED = re.compile(
    r"\b(thanks|thank you|cheers|great|perfect|excellent|wonderful|brilliant|lovely|that helps|appreciate)\b",
    re.IGNORECASE,
)
_DISPLEASED = re.compile(
    r"\b(no thanks|thanks for nothing|(do|does|did)(n't| not) (help|answer|work|understand|make sense)"
    r"|not what i|(have|has)(n't| not) answered|useless|unhelpful|terrible|awful|frustrat\w+|annoy\w+"
    r"|complain\w*|asked (you )?already|already (asked|told|said)"
    r"|(speak|talk) to (a|your) (human|manager|person))\b",
    re.IGNORECASE,
)
_MARKUP = re.compile(
    r"<\||\|>|</?(s|tool_\w+|think|system|user|assistant)>|\[/?INST\]|<<SYS>>", re.IGNORECASE
)
_SYNTAX = frozenset('{}[]<>|"=\\`')


class Word(NamedTuple):
    """A word in lower case and the clause it stands in."""

    text: str
    clause: int


def words(text: str) -> list[str]:
    """Words and numbers in lower case: "It's $5.50, K27." -> it's, $5.50, k27."""
    return [word.text for word in _clauses(text)[0]]


def content_words(text: str) -> set[str]:
    """The words that carry a topic: no function words, nothing under three letters."""
    return {word for word in words(text) if len(word) > 2 and word not in FUNCTION_WORDS}


def facts(context: Mapping[str, object], key: str) -> dict[str, tuple[str, ...]]:
    """The facts listed under `context[key]`: name -> accepted wordings.

    A list of phrases, or a mapping of names to phrases; a list instead of a phrase gives wordings of
    which one is enough. Raises ConfigurationError for anything else.

        {"expected_facts": ["K27", ["5 days", "five days"]]}  ->  {"K27": ("K27",), "5 days": (...)}
    """
    given = context.get(key)
    if given is None:
        return {}
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        named = [(str(name), _wordings(key, value)) for name, value in given.items()]
    elif isinstance(given, Sequence):
        named = [(wordings[0], wordings) for wordings in (_wordings(key, value) for value in given)]
    else:
        raise ConfigurationError(
            f"context[{key!r}] must be a list of phrases or a mapping, got {given!r:.60}"
        )
    return dict(named)


def _wordings(key: str, value: object) -> tuple[str, ...]:
    wordings = [value] if isinstance(value, str | int | float) else value
    if not isinstance(wordings, Sequence) or not wordings or not all(words(str(item)) for item in wordings):
        raise ConfigurationError(
            f"a fact in context[{key!r}] must be a phrase or a list of phrases, got {value!r:.60}"
        )
    return tuple(str(item) for item in wordings)


def told(wordings: Iterable[str], text: str) -> bool:
    """True when one of the wordings stands in the text as a statement: neither negated nor asked.

    "The refund takes 5 days" tells "5 days"; "it is not 5 days" and "is it 5 days?" do not.
    """
    said, asked = _clauses(text)
    return any(_stated([word.text for word in _clauses(wording)[0]], said, asked) for wording in wordings)


def sprayed(wordings: Iterable[str], texts: Sequence[str], expected: Iterable[str]) -> bool:
    """True where a fact is told as one of many: at least four other fillings of the same clause.

    "It is Monday. It is Tuesday. It is Friday ..." and "$10, $20, $30, ..." name everything to hit
    something. Fillings that are `expected` too don't count.
    """
    clauses = dict.fromkeys(clause for text in texts for clause in _clause_words(text))
    wanted = {tuple(words(wording)) for wording in expected}
    return any(_is_one_of_many(tuple(words(wording)), clauses, wanted) for wording in wordings)


_MANY = 4
_FRAME_WORDS = 12
"""Longer clauses are no frame that somebody fills over and over; it bounds the work, too."""


def _is_one_of_many(
    phrase: tuple[str, ...], clauses: Iterable[tuple[str, ...]], wanted: set[tuple[str, ...]]
) -> bool:
    """("it", "is", "monday") is the frame (("it", "is"), ()) filled by ("monday",); and so on."""
    frames: dict[tuple[tuple[str, ...], tuple[str, ...]], set[tuple[str, ...]]] = {}
    for clause in clauses:
        for length in range(1, len(phrase) + 1) if len(clause) <= _FRAME_WORDS + len(phrase) else ():
            for start in range(len(clause) - length + 1):
                end = start + length
                frames.setdefault((clause[:start], clause[end:]), set()).add(clause[start:end])
    for fillings in frames.values():
        own = {
            filling
            for filling in fillings
            if len(filling) == len(phrase) and all(map(_same, filling, phrase))
        }
        if own and len(fillings - own - wanted) >= _MANY:
            return True
    return False


def _clause_words(text: str) -> list[tuple[str, ...]]:
    clauses: dict[int, list[str]] = {}
    for word in _clauses(text)[0]:
        clauses.setdefault(word.clause, []).append(word.text)
    return [tuple(clause) for clause in clauses.values()]


def _stated(phrase: list[str], said: Sequence[Word], asked: frozenset[int]) -> bool:
    for start in range(len(said) - len(phrase) + 1):
        window = said[start : start + len(phrase)]
        if not all(_same(word.text, part) for word, part in zip(window, phrase, strict=True)):
            continue
        before = [word.text for word in said[:start] if word.clause == window[0].clause]
        if window[-1].clause not in asked and not any(map(_negates, before)):
            return True
    return False


def _same(word: str, part: str) -> bool:
    """A price or percentage also counts as its bare number, so "20" is told by "$20"."""
    return word == part or word.strip("$€£%") == part


def _negates(word: str) -> bool:
    return word in _NEGATIONS or word.endswith("n't")


@lru_cache(maxsize=1024)  # one score reads the same reply a dozen times
def _clauses(text: str) -> tuple[tuple[Word, ...], frozenset[int]]:
    """The words with their clauses, and the clauses that are questions."""
    said: list[Word] = []
    asked: set[int] = set()
    clause = 0
    for match in _WORD.finditer(text.lower().replace("\u2019", "'")):
        token = match[0]
        if token in _CLAUSE_ENDS:
            if token == "?":
                asked.add(clause)
            clause += 1
            continue
        if token in _CLAUSE_STARTS:
            clause += 1
        said.append(Word(token, clause))
    return tuple(said), frozenset(asked)


def is_prose(text: str, *, english: bool = True) -> bool:
    """True for something a person could have written: no gibberish, keyword list, JSON or control tokens,
    no repeating.

    `english=False` leaves out the check that needs function words.
    """
    spoken = words(text)
    if not spoken or _MARKUP.search(text):
        return False
    if sum(map(_SYNTAX.__contains__, text)) > max(3, 0.08 * len(text)):
        return False
    letters = [word for word in spoken if word.isalpha()]
    if sum(map(_looks_typed_at_random, letters)) > 0.3 * len(spoken):
        return False
    if len(spoken) >= 5 and len(set(pairwise(spoken))) < 0.7 * (len(spoken) - 1):
        return False
    if english and len(spoken) >= 6 and sum(map(FUNCTION_WORDS.__contains__, spoken)) < 0.2 * len(spoken):
        return False
    if len(spoken) >= 10:
        most = max(Counter(word for word in spoken if word not in FUNCTION_WORDS).values(), default=0)
        return most <= max(2, 0.2 * len(spoken))
    return True


def _looks_typed_at_random(word: str) -> bool:
    if len(word) > 24 or re.search(r"(.)\1\1", word):
        return True
    if not word.isascii() or len(word) < 4:
        return False
    return not re.search(r"[aeiouy]", word) or bool(re.search(r"[^aeiouy]{5,}", word))


def echo(text: str, heard: Sequence[str]) -> float:
    """Share of the text's word triples that stand in one of the texts heard; 0 below five words."""
    spoken = _triples(text)
    if len(spoken) < 3:
        return 0.0
    known = [set(_triples(other)) for other in heard]
    return max((sum(triple in other for triple in spoken) for other in known), default=0) / len(spoken)


def _triples(text: str) -> list[tuple[str, ...]]:
    spoken = words(text)
    return list(zip(spoken, spoken[1:], spoken[2:], strict=False))


def is_rude(text: str) -> bool:
    """True for insults and brush-offs."""
    return bool(_RUDE.search(text))


def is_courteous(text: str) -> bool:
    """True where the text apologises, thanks, or offers help."""
    return bool(_COURTEOUS.search(text))


def is_refusal(text: str) -> bool:
    """True for "I can't help with that" and its like."""
    return bool(_REFUSAL.search(text))


def declines(text: str) -> bool:
    """True where the text says that something will not be done or told: "I am not allowed to share that"."""
    return bool(_DECLINES.search(text.replace("\u2019", "'")))


def is_pleased(text: str) -> bool:
    """True for thanks and praise, and no complaint."""
    return bool(_PLEASED.search(text)) and not is_displeased(text)


def is_displeased(text: str) -> bool:
    """True for a user who complains: of the answer, of having to ask again, or for a human."""
    return bool(_DISPLEASED.search(text.replace("\u2019", "'")))
