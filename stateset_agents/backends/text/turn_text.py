"""The text of one turn while its tokens come, for streaming and for stop strings; backends feed it.

Nothing here runs for a turn that asks for neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stateset_agents.backends.base import Tokenizer

__all__ = ["TurnText", "cut"]

_WINDOW = 64
"""Tokens that are decoded together at the least; a whole long turn would be decoded again at each token."""
_BROKEN = "\ufffd"
"""What a decoder shows for bytes that are no character, and for one that is not complete yet."""


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it; all of it where there is none."""
    places = [place for place in (text.find(one) for one in stop) if place >= 0]
    return text[: min(places)] if places else text


class TurnText:
    """Decodes token by token: pieces of text that will not change any more, and whether a stop string came.

    A piece is held back while the next token may still change it: half a character, what a decoder joins
    to the following word, and the beginning of a stop string. Pieces so far and `finish`'s last one,
    laid end to end, are the turn's text. (Not where a decoder takes whole characters back, which those with
    byte fallback do when bytes that are no UTF-8 follow them.)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """`on_text` is called by `add` with each new piece."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._on_text = on_text
        self._ids: list[int] = []
        self._start = 0
        """Where the window begins; `_text` is what the tokens from there on say."""
        self._text = ""
        self._settled = 0
        """How much of `_text` is settled, and stands in `_said` or `_held`."""
        self._held = ""
        """Settled, and perhaps the beginning of a stop string."""
        self._num_said = 0
        """Characters handed to `on_text`."""

    def add(self, token: int) -> bool:
        """Take the next token; True when the text now holds a stop string."""
        self._ids.append(token)
        before, self._text = self._text, self._tokenizer.decode(self._ids[self._start :])
        # Half a character may stand at the end: no stop string is found in it, and it isn't said yet.
        whole = self._text.rstrip(_BROKEN)
        if any(one in self._held + whole[self._settled :] for one in self._stop):
            return True
        # A decoder may join the newest token to the one after it, so it settles when that has come.
        settled = len(_common(before, whole).rstrip(_BROKEN))
        if settled > self._settled:
            self._settle(self._text[self._settled : settled])
            self._settled = settled
        if len(self._ids) - self._start >= 2 * _WINDOW:
            self._slide()
        return False

    def finish(self, ids: Sequence[int]) -> str:
        """The text of all the turn's `ids`, cut at the stop string; what is left of it goes to `on_text`."""
        text = cut(self._tokenizer.decode(ids), self._stop)
        if self._on_text is not None and len(text) > self._num_said:
            self._on_text(text[self._num_said :])
            self._num_said = len(text)
        return text

    def _settle(self, piece: str) -> None:
        """Say the piece, except for an end of it that may begin a stop string."""
        text = self._held + piece
        kept = max((_overlap(text, one) for one in self._stop), default=0)
        self._held = text[len(text) - kept :]
        said = text[: len(text) - kept]
        self._num_said += len(said)
        if said and self._on_text is not None:
            self._on_text(said)

    def _slide(self) -> None:
        """Let go of the oldest tokens, if the rest says the same without them."""
        start = len(self._ids) - _WINDOW
        text = self._tokenizer.decode(self._ids[start:])
        settled = len(text) - (len(self._text) - self._settled)
        if self._text.endswith(text) and settled > 0 and not text.endswith(_BROKEN):
            self._start, self._text, self._settled = start, text, settled


def _common(one: str, other: str) -> str:
    """What both begin with."""
    if other.startswith(one):
        return one
    return one[: next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))]


def _overlap(text: str, stop: str) -> int:
    """How long an end of the text is a beginning of the stop string, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
