"""Cuts a sampled text into words, thoughts and tool calls, whole or piece by piece; for parsing.py.

A `Region` is a part of a reply between two delimiters, `<think>` and `</think>` say. What stands in no region
is the reply's words. What a region holds opens no other one: a call inside a thought is no call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """One part of a reply. Patterns are of the `regex` package, which tells a partial match at the end."""

    holds: Literal["content", "reasoning", "tool_calls", "nothing"]
    """`nothing`: a frame, such as the header of a message. Its text is dropped."""
    opens: Any
    """Pattern of the opening delimiter; its named groups are the region's captures."""
    closes: Any = None
    """Pattern of the closing delimiter; with None only the end of the text closes the region."""
    closing: str = ""
    """The text that `closes` matches, for error messages; empty if there are several."""
    closes_by_end: bool = False
    """True if a call that the end of the text closes is complete; else it is reported as not closed."""
    read: Callable[[str, Mapping[str, str]], Any] | None = None
    """Reads a tool call: body and captures to `{"function": {"name": ..., "arguments": {...}}}`, or to a
    list of such. Raises ValueError, or whatever a parser of transformers raises, for what it cannot read."""
    waits: bool = False
    """True if nothing is certain from here on while a reply is sampled: for calls whose closing delimiter may
    match more when more has come."""
    is_json: bool = False
    """True if the body of a call is JSON; for error messages."""
    values_are_text: bool = False
    """True if all arguments are read as text, so that only the tool's schema tells their types."""
    literal: tuple[Any, Any] | None = None
    """Patterns of a text in a call, its beginning and its rest: no delimiter closes the region in there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A region of tool calls as it stands in the text."""

    region: Region
    captures: Mapping[str, str]
    body: str
    written: str
    """All of it, delimiters included."""
    is_closed: bool
    """True if a delimiter closed it; False if the text ended before one."""


class ReplyStream:
    """Reads a reply while it is sampled, and tells what is certain: `add` its pieces, then ask for the
    `delta` of each.

    `content` and `reasoning` only grow: what may be the beginning of a delimiter is held back, and white
    space at the end. Both take time in proportion to their length, `delta` to its own.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        *,
        dropped: Any = None,
        region: Region | None = None,
        keeps_outside: bool = True,
        strips: bool = True,
    ) -> None:
        """
        Args:
            regions: Where two of them open at one place, the longer delimiter decides, then their order.
            dropped: Pattern of control tokens, which are left out of words and thoughts.
            region: What the prompt has opened.
            keeps_outside: False: what stands in no region is dropped, for formats that frame words, too.
            strips: Drop white space at the ends of the words?
        """
        self.region = region
        """The region in which the text stands; None outside of all."""
        self.calls: list[CallText] = []
        """Filled by `finish`."""
        self._opening: list[tuple[Any, Region | None]] = [(region.opens, region) for region in regions]
        self._dropped: list[tuple[Any, Region | None]] = [] if dropped is None else [(dropped, _DROPPED)]
        self._keeps_outside = keeps_outside
        self._words = _Growing(strips=strips)
        self._thoughts = _Growing(strips=True)
        self._has_thoughts = region is not None and region.holds == "reasoning"
        self._thinks_first = True
        self._text = ""
        self.num_read = 0
        """Characters that are certain; the others are held back."""
        self._next_look = 0
        """Length of the text from which delimiters are sought again. It grows with what is held back, which
        is gone through each time: a delimiter that never ends would take time with the square of its
        length."""
        self._opened: tuple[int, int, Mapping[str, str]] = 0, 0, {}
        """Start and end of the delimiter that opened the region, and its captures."""
        self._empty_match = -1
        """Position of the last empty match; another one there would go on for ever."""
        self._found: dict[int, Any] = {}
        """The next match of each pattern in the present text, by the pattern's id."""
        self._literals_end = 0
        """Position up to which the texts in a call have been gone through."""
        self._first_closing = -1
        """Position of a delimiter that was taken for part of a text in a call; -1 for none."""

    @property
    def content(self) -> str:
        """The words so far."""
        return self._words.text()

    @property
    def reasoning(self) -> str | None:
        """The thoughts so far, with an empty line between two of them; None if there is none."""
        return self._thoughts.text() if self._has_thoughts else None

    @property
    def thinks_first(self) -> bool:
        """After `finish`: is the thought, if there is one, closed, the only one, and before all words?"""
        is_open = self.region is not None and self.region.holds == "reasoning"
        return self._thinks_first and not is_open

    def delta(self) -> dict[str, str]:
        """The text that became certain since the last call, as `reasoning` and `content`; nothing empty is
        in it."""
        texts = {"reasoning": self._thoughts.take_new(), "content": self._words.take_new()}
        return {name: text for name, text in texts.items() if text}

    def add(self, piece: str) -> None:
        """More text, in pieces of any size."""
        self._advance(piece, is_last=False)

    def finish(self, piece: str = "") -> None:
        """The last piece: from now on content and reasoning are those of the whole reply."""
        self._advance(piece, is_last=True)
        if self.region is not None and self.region.holds == "tool_calls":
            self._keep_call(len(self._text), len(self._text))
        self._words.end()

    def _advance(self, piece: str, *, is_last: bool) -> None:
        """Append a piece, and go through all delimiters that are certain now."""
        self._found.clear()
        text, self._text = self._text, ""
        text += piece  # in place, as nothing else refers to the text; else Python would copy it each time
        self._text = text
        if not is_last and len(text) < self._next_look:
            return
        while True:
            match, opened, end = self._next(is_last)
            holds = "content" if self.region is None else self.region.holds
            certain = text[self.num_read : end]
            if holds == "reasoning":
                self._thoughts.add(certain)
            elif holds == "content" and (self.region is not None or self._keeps_outside):
                self._words.add(certain)
            self.num_read = end if match is None else match.end()
            if match is None:
                break
            if match.start() == match.end():
                self._empty_match = match.end()
            if opened is _DROPPED:
                continue
            if opened is None and is_last and holds == "tool_calls":
                self._keep_call(match.start(), match.end())
            self.region = opened
            if opened is not None:
                captures = {name: text for name, text in match.groupdict().items() if text is not None}
                self._opened = match.start(), match.end(), captures
                self._literals_end, self._first_closing = match.end(), -1
                if opened.holds == "reasoning":
                    self._begin_thought()
        self._next_look = len(text) + (len(text) - self.num_read) // 8

    def _begin_thought(self) -> None:
        if self._has_thoughts or self._words.has_words:
            self._thinks_first = False
        self._has_thoughts = True
        self._thoughts.begin("\n\n")
        self._words.drop_leading_space()

    def _next(self, is_last: bool) -> tuple[Any, Region | None, int]:
        """The next delimiter that is certain, what it opens, and up to where the text before it is certain.

        A delimiter at the end of the text may become a longer one, unless nothing more comes.
        """
        best: tuple[tuple[int, bool, int], Any, Region | None] | None = None
        size = certain = len(self._text)
        if self.region is not None and self.region.waits and not is_last:
            return None, None, certain
        if self.region is None:
            watched = [*self._opening, *self._dropped]
        else:
            watched = [] if self.region.closes is None else [(self.region.closes, None)]
            watched += self._dropped if self.region.holds in ("content", "reasoning") else []
        for pattern, region in watched:
            match = self._search(pattern, partial=not is_last)
            if region is None and self.region is not None and self.region.literal is not None:
                match = self._outside_literals(pattern, match, self.region.literal, is_last)
            if match is None:
                continue
            if not is_last and (match.partial or match.end() == size):
                certain = min(certain, match.start())
                continue
            rank = match.start(), region is _DROPPED, -match.end()
            if best is None or rank < best[0]:
                best = rank, match, region
        if best is None or (not is_last and best[0][0] >= certain):
            return None, None, certain
        return best[1], best[2], best[0][0]

    def _search(self, pattern: Any, *, partial: bool) -> Any:
        """The pattern's next match; one that was found before is kept while it lies ahead."""
        match = self._found.get(id(pattern), _UNKNOWN)
        if match is _UNKNOWN or (match is not None and match.start() < self.num_read):
            match = pattern.search(self._text, self.num_read, partial=partial)
        if match is not None and match.start() == match.end() == self._empty_match and not match.partial:
            ahead = self.num_read + 1
            match = pattern.search(self._text, ahead, partial=partial) if ahead <= len(self._text) else None
        self._found[id(pattern)] = match
        return match

    def _outside_literals(self, pattern: Any, match: Any, literal: tuple[Any, Any], is_last: bool) -> Any:
        """The closing delimiter that stands in no text of the call; the first one where all of them do."""
        opens, rest = literal
        while match is not None and not match.partial:
            opening = opens.search(self._text, self._literals_end, match.start())
            if opening is None:
                return match
            whole = rest.match(self._text, opening.end(), partial=not is_last)
            if whole is None:  # it is no text after all
                return match
            if whole.partial:  # until more has come
                return whole
            self._literals_end = whole.end()
            if whole.end() > match.start():
                if self._first_closing < 0:
                    self._first_closing = match.start()
                match = pattern.search(self._text, whole.end(), partial=not is_last)
        if match is None and is_last and self._first_closing >= 0:
            self.num_read = self._first_closing
            return pattern.search(self._text, self._first_closing)
        return match

    def _keep_call(self, end: int, closed: int) -> None:
        assert self.region is not None
        start, begin, captures = self._opened
        self.calls.append(
            CallText(
                region=self.region,
                captures=captures,
                body=self._text[begin:end],
                written=self._text[start:closed],
                is_closed=closed > end,
            )
        )


class _Growing:
    """Text that comes in pieces, and grows alone: white space at its end is held back until more comes."""

    def __init__(self, *, strips: bool) -> None:
        """`strips`: drop white space at the ends? Else it is held back only before the first word."""
        self._strips = strips
        self._pieces: list[str] = []
        self._new: list[str] = []
        self._held: list[str] = []
        self._between = ""
        self.has_words = False
        """True once it has held a word since it began."""

    def begin(self, between: str) -> None:
        """Begins another text; `between` stands before it, if it is not empty."""
        self._held.clear()
        self._between = between if self._pieces else ""
        self.has_words = False

    def drop_leading_space(self) -> None:
        if not self.has_words:
            self._held.clear()

    def add(self, text: str) -> None:
        if not text:
            return
        if text.isspace() and (self._strips or not self.has_words):
            self._held.append(text)
            return
        if self._strips and not self.has_words:
            text = text.lstrip()
            self._held = [self._between] if self._between else []
        self.has_words = True
        size = len(text.rstrip()) if self._strips else len(text)
        certain = [*self._held, text[:size]]
        self._held = [text[size:]] if size < len(text) else []
        self._pieces += certain
        self._new += certain

    def end(self) -> None:
        """Nothing more comes."""
        if not self._strips:
            self._pieces += self._held
            self._new += self._held
        self._held = []

    def text(self) -> str:
        self._pieces = ["".join(self._pieces)] if self._pieces else []
        return "".join(self._pieces)

    def take_new(self) -> str:
        new, self._new = "".join(self._new), []
        return new


_DROPPED = Region(holds="nothing", opens=None)
"""Stands for a control token, which opens no region."""
_UNKNOWN = object()
