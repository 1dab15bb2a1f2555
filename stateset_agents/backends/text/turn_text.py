"""Decode one turn token by token, for streaming and stop strings; called by backends.

A turn without either is decoded once, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from stateset_agents.backends.base import Tokenizer

_WINDOW = 64
"""Tokens that are always decoded together. Decoding a full long turn at each token would be slow."""
_BROKEN = "\ufffd"
"""A decoder's output for invalid bytes, and for a character that is not complete yet."""


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it; the full text if there is none."""
    starts = [start for start in (text.find(string) for string in stop) if start >= 0]
    return text[: min(starts)] if starts else text


class TurnText:
    """Emits pieces of text that no further token changes, and finds stop strings.

    A piece is held back while the next token may change it: half a character, text that the decoder joins to
    the following word, and the beginning of a stop string. All pieces joined, with the last one of `finish`,
    are the turn's text. (The exception: decoders with byte fallback take a complete character back if bytes
    follow that are no UTF-8.)
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
        *,
        end_ids: Collection[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: Of the model that samples.
            stop: Strings before which the text ends.
            on_text: Called by `add` and `finish` with each new piece.
            end_ids: Tokens that end a turn: one at the end is no part of the text.
            skip_special_tokens: Leave control tokens out? Else they stand in the text as markup writes them.
        """
        self._decode = tokenizer.decode if skip_special_tokens else tokenizer.decode_markup
        self._stop = tuple(stop)
        self._on_text = on_text
        self._end_ids = end_ids
        self._ids: list[int] = []
        self._start = 0
        """First token of the window; `_text` is the text of the tokens from there on."""
        self._text = ""
        self._settled = 0
        """Characters of `_text` that are settled: emitted, or in `_held`."""
        self._held = ""
        """Settled text that may be the beginning of a stop string."""
        self._num_emitted = 0
        """Characters passed to `on_text`."""

    def add(self, token: int) -> bool:
        """Add the next token. True if the text now contains a stop string."""
        self._ids.append(token)
        before, self._text = self._text, self._decode(self._ids[self._start :])
        # Half a character at the end is not searched for stop strings, and not emitted yet.
        complete = self._text.rstrip(_BROKEN)
        if any(string in self._held + complete[self._settled :] for string in self._stop):
            return True
        # A decoder may join the newest token to the next one, so it is settled when that has come.
        settled = len(_common_prefix(before, complete).rstrip(_BROKEN))
        if settled > self._settled:
            self._settle(self._text[self._settled : settled])
            self._settled = settled
        if len(self._ids) - self._start >= 2 * _WINDOW:
            self._slide()
        return False

    def finish(self, ids: Sequence[int]) -> str:
        """The text of all `ids` of the turn, cut at a stop string; `on_text` gets its last piece."""
        said = ids[:-1] if ids and ids[-1] in self._end_ids else ids
        text = cut(self._decode(said), self._stop)
        if self._on_text is not None and len(text) > self._num_emitted:
            self._on_text(text[self._num_emitted :])
            self._num_emitted = len(text)
        return text

    def _settle(self, piece: str) -> None:
        """Emit a piece, except for an end of it that may begin a stop string."""
        text = self._held + piece
        num_held = max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        emitted = text[: len(text) - num_held]
        self._num_emitted += len(emitted)
        if emitted and self._on_text is not None:
            self._on_text(emitted)

    def _slide(self) -> None:
        """Drop the oldest tokens of the window, if the others have the same text without them."""
        start = len(self._ids) - _WINDOW
        text = self._decode(self._ids[start:])
        settled = len(text) - (len(self._text) - self._settled)
        if self._text.endswith(text) and settled > 0 and not text.endswith(_BROKEN):
            self._start, self._text, self._settled = start, text, settled


def _common_prefix(a: str, b: str) -> str:
    if b.startswith(a):
        return a
    return a[: next((n for n, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), len(b))]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
