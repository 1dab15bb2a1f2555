"""Reads what a text asserts: its sentences, its clauses, and what they deny, doubt, suppose or ask.

`Statements.at` says what holds at a place of the text; `english.yaml` has the words for it. The work
grows with the length of the text alone, and of a long one only the start is read.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from stateset_agents.claims.english import OPERATORS, Operator, Patterns
from stateset_agents.claims.text_checks import FUNCTION_WORDS, WORD
from stateset_agents.claims.typed_values import stem

MOST_READ = 20_000
"""Characters of one text that are read; a longer one is no prose, and of it only the start is looked at."""
NEARBY = 120
"""Characters to either side in which words of a clause are looked for."""


class TextSpan(NamedTuple):
    """A part of the text."""

    start: int
    end: int


class Modality(NamedTuple):
    """The mood in which a text has the word at one place."""

    denials: int
    doubted: bool
    supposed: bool
    planned: bool
    past: bool
    asked: bool

    @property
    def asserted(self) -> bool:
        return not (self.denials or self.doubted or self.supposed or self.planned or self.asked)


_ENGLISH = Patterns("statements")
_BARE = re.compile(r"[\s,*\u2022:-]+")


class Statements:
    """A text as it was read: made by `read_statements`."""

    def __init__(self, text: str, conditions: frozenset[str] = frozenset()) -> None:
        """Reads `MOST_READ` characters. `conditions` are stems of the cases that the user asks about."""
        self._conditions = conditions
        self.text = text[:MOST_READ]
        self.low = _lower(self.text)
        sentences = _ENGLISH.abbreviations.sub(_blank, self.low)
        self.plain = _ENGLISH.idioms.sub(_blank, sentences)
        """The text in lower case, with the idioms blanked out that would read like denials."""
        self.words = [(match[0], match.start(), match.end()) for match in WORD.finditer(self.low)]
        self.sentences = _parts(sentences, _ENGLISH.sentence_end)
        self.clauses = [clause for sentence in self.sentences for clause in _clauses(sentences, sentence)]
        self._sentence_starts = [sentence.start for sentence in self.sentences]
        self._clause_starts = [clause.start for clause in self.clauses]
        self._turns = [match.span() for match in _ENGLISH.adversative.finditer(self.plain)]
        self._breaks = [match.start() for match in _ENGLISH.but.finditer(self.plain)]
        self._joints = [match.end() for match in _ENGLISH.independent.finditer(self.plain)]
        self._brackets = [match.start() for match in re.finditer(r"[()]", self.low)]
        self._asked = [self._is_asked(clause) for clause in self.clauses]
        self._scopes = self._covered()
        self.retractions = self._retracted()

    def at(self, start: int) -> Modality:
        """Return what the text does with the word that starts there."""
        planned = self._count("planned", start) > 0
        return Modality(
            denials=self._count("denied", start),
            doubted=self._count("doubted", start) > 0,
            supposed=self._count("supposed", start) > 0,
            planned=planned,
            past=planned or self._count("past", start) > 0 or self._is_past(start),
            asked=self._asked[self.clause_number(start)],
        )

    def clause_number(self, start: int) -> int:
        """Return the index in `clauses` of the clause that holds the place."""
        return max(0, bisect_right(self._clause_starts, start) - 1)

    def around(self, start: int, end: int) -> tuple[str, str]:
        """Return what stands before and after a part of a clause, up to `NEARBY` characters each.

        What stands alone has the clauses beside it: "delivery: Friday", "the other day, Friday, is".
        """
        number = self.clause_number(start)
        clause, sentence = self.clauses[number], self.sentence(start)
        first, last = clause.start, clause.end
        alone = not _BARE.sub("", self.low[first:start] + self.low[end:last])
        if number and (alone or self.low[self.clauses[number - 1].end : first].strip() == ":"):
            first = max(self.clauses[number - 1].start, sentence.start)
        if alone and number + 1 < len(self.clauses) and _ENGLISH.goes_on.match(self.low, last):
            last = min(self.clauses[number + 1].end, sentence.end)
        return self.low[max(first, start - NEARBY) : start], self.low[end : max(end, min(last, end + NEARBY))]

    def clause(self, start: int) -> str:
        """The clause that holds the place, as far as it is `NEARBY`."""
        return "".join(self.around(start, start))

    def sentence(self, start: int) -> TextSpan:
        """The sentence that holds the place."""
        return self.sentences[max(0, bisect_right(self._sentence_starts, start) - 1)]

    def is_of_earlier(self, retraction: TextSpan) -> bool:
        """True where earlier words are taken back, not those just said."""
        start = self.sentence(retraction.start).start
        return bool(_ENGLISH.earlier.search(self.low, max(start, retraction.start - NEARBY), retraction.end))

    def is_denied_after(self, end: int) -> bool:
        """True where the words behind a place deny what ends there: "Friday is out of the question"."""
        return bool(_ENGLISH.denied_after.match(self.plain, end, min(len(self.plain), end + 200)))

    def _is_asked(self, clause: TextSpan) -> bool:
        """The clause before a question mark; the whole sentence where it begins as a question does."""
        sentence = self.sentence(clause.start)
        if self.low[max(sentence.start, sentence.end - 9) : sentence.end].rstrip(" \"')")[-1:] != "?":
            return False
        if _ENGLISH.tag.search(self.low, sentence.start, sentence.end):
            return True
        last = not self.low[clause.end : min(sentence.end, clause.end + 9)].strip(" ?!.\"')")
        return last or bool(_ENGLISH.asks.match(self.low, sentence.start))

    def _covered(self) -> dict[str, tuple[list[int], list[int]]]:
        """For each sign, the places where the number of scopes changes, and the number from there on."""
        changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        unread = self.plain
        for operator in OPERATORS:
            matches = list(operator.pattern.finditer(unread))
            if operator.sign == "denied":  # "no way" is one denial, not also that of its "no"
                unread = operator.pattern.sub(_blank, unread)
            for match in matches:
                scope = self._scope(operator, match.start(), match.end())
                if scope.start < scope.end:
                    changes[operator.sign][scope.start] += 1
                    changes[operator.sign][scope.end] -= 1
        covered = {}
        for sign, steps in changes.items():
            positions, counts, total = sorted(steps), [], 0
            for position in positions:
                total += steps[position]
                counts.append(total)
            covered[sign] = (positions, counts)
        return covered

    def _count(self, sign: str, start: int) -> int:
        positions, counts = self._scopes.get(sign, ([], []))
        index = bisect_right(positions, start) - 1
        return counts[index] if index >= 0 else 0

    def _scope(self, operator: Operator, start: int, end: int) -> TextSpan:
        clause = self.clauses[self.clause_number(start)]
        sentence = self.sentence(start)
        if operator.scope == "next words":
            words = _ENGLISH.next_words.match(self.low[end : end + 80])
            return TextSpan(end, min(sentence.end, end + (words.end() if words else 0)))
        if operator.scope == "rest of clause":
            return TextSpan(end, clause.end)
        if operator.scope == "clause":
            return clause
        if operator.scope == "condition":
            return self._condition(start, clause, sentence)
        following = bisect_left(self._turns, (end, 0))
        stop = min(self._turns[following][0], sentence.end) if following < len(self._turns) else sentence.end
        if operator.scope == "rest of sentence":
            return TextSpan(end, stop)
        before = bisect_left(self._turns, (start, 0)) - 1
        return TextSpan(max(sentence.start, self._turns[before][1] if before >= 0 else 0), stop)

    def _condition(self, start: int, clause: TextSpan, sentence: TextSpan) -> TextSpan:
        """A condition takes its sentence with it, from the last "and", "but" or colon before it; a polite one
        ("if you have questions") or the user's only itself, and one in brackets what is in the brackets."""
        words = self.low[start : clause.end].split()[1:] if self._conditions else []
        content = {stem(word.strip(".")) for word in words if word not in FUNCTION_WORDS}
        is_the_users = (
            content and content <= self._conditions and not _ENGLISH.negated.search(" ".join(words))
        )
        if is_the_users or _ENGLISH.polite_condition.match(self.plain, start):
            return TextSpan(start, clause.end)
        next_bracket = bisect_right(self._brackets, start)
        opening = self._brackets[next_bracket - 1] if next_bracket else -1
        if opening >= sentence.start and self.low[opening] == "(":
            closing = self._brackets[next_bracket] if next_bracket < len(self._brackets) else sentence.end
            return TextSpan(opening, min(closing, sentence.end))
        joint = bisect_right(self._joints, start) - 1
        begin = max(sentence.start, self._joints[joint] if joint >= 0 else 0)
        following = bisect_left(self._breaks, start)
        stop = self._breaks[following] if following < len(self._breaks) else sentence.end
        return TextSpan(begin, min(stop, sentence.end))

    def _is_past(self, start: int) -> bool:
        before, after = self.around(start, start)
        words = before + after
        changes = [match.end() for match in _ENGLISH.changed_to.finditer(words)]
        if changes and changes[-1] <= len(before):
            return False
        if changes or _ENGLISH.surely_past.search(words):
            return True
        return bool(_ENGLISH.past.search(words)) and not _ENGLISH.present.search(words)

    def _retracted(self) -> list[TextSpan]:
        spans = []
        for sentence in self.sentences:
            words = self.low[sentence.start : sentence.end]
            start = sentence.start + len(words) - len(words.lstrip())
            match = _ENGLISH.retractions.search(words.strip())
            if match and not words.rstrip().endswith("?"):
                spans.append(TextSpan(start + match.start(), sentence.end))
        return spans


@lru_cache(maxsize=512)  # a score reads the same reply for each fact
def read_statements(text: str, conditions: frozenset[str] = frozenset()) -> Statements:
    """The sentences and clauses of a text and what they assert."""
    return Statements(text, conditions)


def _lower(text: str) -> str:
    """Return the text in lower case, with plain apostrophes, and each letter at its place."""
    low = text.lower().replace("\u2019", "'")
    if len(low) == len(text):
        return low
    return "".join(letter.lower() if len(letter.lower()) == 1 else letter for letter in text)


def _blank(match: re.Match[str]) -> str:
    return "_" * len(match[0])


def _parts(text: str, ends: re.Pattern[str]) -> list[TextSpan]:
    parts, start = [], 0
    for match in ends.finditer(text):
        if text[start : match.start()].strip():
            parts.append(TextSpan(start, match.end()))
            start = match.end()
    if text[start:].strip() or not parts:
        parts.append(TextSpan(start, len(text)))
    return parts


def _clauses(text: str, sentence: TextSpan) -> list[TextSpan]:
    """The clauses of a sentence; "and Friday" belongs to the clause that it continues."""
    spans: list[TextSpan] = []
    start = sentence.start
    ends = [match.span() for match in _ENGLISH.clause_end.finditer(text, sentence.start, sentence.end)]
    for end, after in [*ends, (sentence.end, sentence.end)]:
        span, start = TextSpan(start, max(start, end)), max(start, after)
        if spans and not text[span.start : span.end].strip():
            continue
        if spans and span.end - span.start < NEARBY and _ENGLISH.bare_tail.match(text, span.start, span.end):
            spans[-1] = TextSpan(spans[-1].start, span.end)
        else:
            spans.append(span)
    return spans
