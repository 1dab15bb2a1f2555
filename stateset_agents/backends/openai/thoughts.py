"""The words of an endpoint's answer, without the thoughts that a thinking model wrote before them.

A server that reads thoughts gives them beside the content (`reasoning`). Others leave them in it, between
`<think>` and `</think>`, without the first where the chat template has written it into the prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(f"{_OPEN}(.*?)(?:{_CLOSE}|\\Z)", re.DOTALL)


def words_of(content: str) -> str:
    """The content as it is, or without thoughts where it holds any; a thought may end with the text."""
    begins_in_thought = _begins_in_thought(content)
    if _OPEN not in content and not begins_in_thought:
        return content
    words = WordStream(in_thought=begins_in_thought)
    return words.add(content) + words.finish()


def thoughts_of(content: str) -> str | None:
    """The thoughts that stand in a content, white space around them aside; None where it holds none."""
    found = _THOUGHT.findall(_OPEN + content if _begins_in_thought(content) else content)
    return "\n".join(thought.strip() for thought in found) if found else None


def _begins_in_thought(content: str) -> bool:
    opened, closed = content.find(_OPEN), content.find(_CLOSE)
    return closed >= 0 and not 0 <= opened < closed


@dataclass(slots=True)
class WordStream:
    """The same while the content comes: `add` its pieces.

    That a thought is over which nothing has opened is only known at its end: `in_thought` tells it before.
    """

    in_thought: bool = False
    _rest: str = ""
    """What may be the beginning of a delimiter."""
    _strips: bool = False
    """Is white space behind a thought still to be dropped?"""

    def add(self, piece: str) -> str:
        """The words that are certain now."""
        text, words = self._rest + piece, ""
        while True:
            delimiter = _CLOSE if self.in_thought else _OPEN
            before, found, after = text.partition(delimiter)
            if not found:
                break
            words += self._words(before)
            self.in_thought = not self.in_thought
            self._strips = self._strips or not self.in_thought
            text = after
        held = next(n for n in range(len(delimiter), -1, -1) if text.endswith(delimiter[:n]))
        self._rest = text[len(text) - held :]
        return words + self._words(text[: len(text) - held])

    def finish(self) -> str:
        """The words that were held back until nothing more can come."""
        rest, self._rest = self._rest, ""
        return self._words(rest)

    def _words(self, text: str) -> str:
        if self.in_thought:
            return ""
        text = text.lstrip() if self._strips else text
        self._strips = self._strips and not text
        return text
