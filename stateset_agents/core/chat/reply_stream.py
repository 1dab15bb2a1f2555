"""Cuts a sampled text into words, thoughts and tool calls, whole or piece by piece; for reply_parsing.py.

A `Region` is a part of a reply between two delimiters, `<think>` and `</think>` say. What stands in no region
is the reply's words. What a region holds opens no other one: a call inside a thought is no call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CallText", "Region", "ReplyStream"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Region:
    """One part of a reply. Patterns are of the `regex` package, which tells a partial match at the end."""

    holds: Literal["content", "reasoning", "tool_calls", "nothing"]
    """`nothing`: a frame, such as the header of a message. Its text is dropped."""
    opens: Any
    """Its named groups are the region's captures."""
    closes: Any = None
    """None: only the end of the text closes it."""
    closing: str = ""
    """What `closes` matches, for error messages; empty if that is not one text."""
    closes_by_end: bool = False
    """Is a call complete that the end of the text closes? False: it is reported as not closed."""
    read: Callable[[str, Mapping[str, str]], Any] | None = None
    """Of tool calls: body and captures to `{"function": {"name": ..., "arguments": {...}}}`, or to a list of
    such. Raises ValueError, or whatever a parser of transformers raises, for what it cannot read."""
    waits: bool = False
    """While a reply is sampled, is nothing certain from here on? For calls whose closing delimiter may match
    more when more has come."""
    is_json: bool = False
    """Is the body of a call JSON? For error messages."""
    values_are_text: bool = False
    """Are all arguments read as text, so that only the tool's schema tells their types?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A region of tool calls as it stands in the text."""

    region: Region
    captures: Mapping[str, str]
    body: str
    written: str
    """All of it, delimiters included."""
    is_closed: bool
    """By a delimiter; False if the text ended before one."""


class ReplyStream:
    """What a reply says for sure while it is sampled: `add` its pieces, then look at `content`, `reasoning`.

    Both only grow: what may be the beginning of a delimiter is held back, and white space at the end.
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
        """Where the text stands; None: in no region."""
        self.calls: list[CallText] = []
        """Filled by `finish`."""
        self._opening = [(region.opens, region) for region in regions]
        self._dropped: list[tuple[Any, Region | None]] = [] if dropped is None else [(dropped, _DROPPED)]
        self._keeps_outside = keeps_outside
        self._strips = strips
        self._words: list[str] = []
        self._has_words = False
        """Is there more than white space in `_words`?"""
        self._thoughts: list[list[str]] = [[]] if region is not None and region.holds == "reasoning" else []
        self._text = ""
        self._position = 0
        self._opened: tuple[int, int, Mapping[str, str]] = 0, 0, {}
        """Start and end of the delimiter that opened the region, and its captures."""
        self._empty_match = -1
        """Where the last match of no characters was; another one there would go on for ever."""
        self._found: dict[int, Any] = {}
        """The next match of each pattern in the present text, by the pattern's id."""
        self._is_finished = False

    @property
    def content(self) -> str:
        """The words so far."""
        words = "".join(self._words)
        if self._strips:
            return words.strip()
        return words if self._has_words or self._is_finished else ""

    @property
    def reasoning(self) -> str | None:
        """The thoughts so far, with an empty line between two of them; None if there is none."""
        if not self._thoughts:
            return None
        return "\n\n".join(filter(None, ("".join(pieces).strip() for pieces in self._thoughts)))

    @property
    def num_read(self) -> int:
        """Characters that are certain; the others are held back."""
        return self._position

    def add(self, piece: str) -> None:
        """More text, in pieces of any size."""
        self._text += piece
        self._advance(is_last=False)

    def finish(self, piece: str = "") -> None:
        """The last piece: from now on content and reasoning are those of the whole reply."""
        self._text += piece
        self._advance(is_last=True)
        if self.region is not None and self.region.holds == "tool_calls":
            self._keep_call(len(self._text), len(self._text))
        self._is_finished = True

    def _advance(self, is_last: bool) -> None:
        self._found.clear()
        while True:
            match, region, end = self._next(is_last)
            self._take(self._text[self._position : end])
            self._position = end if match is None else match.end()
            if match is None:
                return
            if match.start() == match.end():
                self._empty_match = match.end()
            if region is _DROPPED:
                continue
            if region is not None:
                self._open(region, match)
            else:
                if is_last and self.region is not None and self.region.holds == "tool_calls":
                    self._keep_call(match.start(), match.end())
                self.region = None

    def _next(self, is_last: bool) -> tuple[Any, Region | None, int]:
        """The next delimiter that is certain, what it opens, and up to where the text before it is certain.

        A delimiter at the end of the text may become a longer one, unless nothing more comes.
        """
        best: tuple[tuple[int, bool, int], Any, Region | None] | None = None
        size = certain = len(self._text)
        if self.region is not None and self.region.waits and not is_last:
            return None, None, certain
        for pattern, region in self._watched():
            match = self._search(pattern, partial=not is_last)
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

    def _watched(self) -> list[tuple[Any, Region | None]]:
        if self.region is None:
            return [*self._opening, *self._dropped]
        closing: list[tuple[Any, Region | None]] = (
            [] if self.region.closes is None else [(self.region.closes, None)]
        )
        return closing + (self._dropped if self.region.holds in ("content", "reasoning") else [])

    def _search(self, pattern: Any, *, partial: bool) -> Any:
        """The pattern's next match; one that was found before is kept while it lies ahead."""
        match = self._found.get(id(pattern), _UNKNOWN)
        if match is _UNKNOWN or (match is not None and match.start() < self._position):
            match = pattern.search(self._text, self._position, partial=partial)
        if match is not None and match.start() == match.end() == self._empty_match and not match.partial:
            ahead = self._position + 1
            match = pattern.search(self._text, ahead, partial=partial) if ahead <= len(self._text) else None
        self._found[id(pattern)] = match
        return match

    def _open(self, region: Region, match: Any) -> None:
        self.region = region
        captures = {name: text for name, text in match.groupdict().items() if text is not None}
        self._opened = match.start(), match.end(), captures
        if region.holds == "reasoning":
            self._thoughts.append([])
            if not self._has_words:
                self._words.clear()

    def _take(self, text: str) -> None:
        holds = "content" if self.region is None else self.region.holds
        if holds == "reasoning":
            self._thoughts[-1].append(text)
        elif holds == "content" and text and (self.region is not None or self._keeps_outside):
            self._words.append(text)
            self._has_words = self._has_words or not text.isspace()

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


_DROPPED = Region(holds="nothing", opens=None)
"""Stands for a control token, which opens no region."""
_UNKNOWN = object()
