"""Ends a constrained reply before its limit: where room is short, only tokens are allowed from which a way to
the end still fits; for grammars.py.

llguidance does not say how short a reply can still be, so ways are looked for, depth first over the choices
of the grammar, with what it forces between them taken in one go. A way that is found is a real one; a shorter
one may be missed. What is allowed follows from grammar, text and limit, so that an update finds it again.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from stateset_agents.types.constraint import Constraint, Packed

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Way: TypeAlias = tuple[int, ...]
"""Tokens that end a reply, its stop token among them."""

_FAR = 512
"""Tokens of room from which on nothing is looked for, and of the longest way."""
_SLACK = 64
"""Tokens of room beyond the way's from which on free text goes on as the grammar has it."""
_FEW = 128
"""So many choices are tried one by one; of more, those that close most."""
_MOST_STATES = 2000
"""States that a search may see; then it goes on by the first choices alone."""
_MOST_CHOICES = 100
"""Choices of one way."""
_JOINT = 32
"""Tokens that may stand between two calls, the second one's opener among them."""
_MOST_KEPT = 4096
"""Texts whose ways are kept: replies have their first choices in common."""
_STRUCTURE = set("\"'\\<>[]{}|\ufffd")
"""Characters that no plain token has; the last one stands for a part of a character."""
_EXCLUDED = r"& ~/\(\?s:\.\*\)(.*?)\(\?s:\.\*\)/"
"""The text that free text ends before, in a rule of `reply_grammar`."""
_ONE_BY_ONE = set(string.ascii_letters + string.digits + " ")


class TokenTexts:
    """What the tokens of a vocabulary are made of, for all of its grammars."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces`: the bytes of each token."""
        self.pieces = pieces
        texts = [piece.decode(errors="replace") for piece in pieces]
        is_plain = [text.isprintable() and not _STRUCTURE & {*text} for text in texts]
        self.plain = _packed(is_plain)
        self.letters = _packed([text in _ONE_BY_ONE for text in texts])
        self.control = np.array([id for id, piece in enumerate(pieces) if piece[:1] == b"\xff"], np.int64)
        self.rank = np.array([sum(map(_rank_of, text)) for text in texts], np.int32)
        self.rank[self.control] = -16
        # Within text only what begins with its quote leaves it.
        quotes = np.array([text.startswith('"') for text in texts])
        closing = np.array([text.startswith(('"', "}", "]")) for text in texts]) & (self.rank < 0)
        self.closing_first = np.lexsort((self.rank, ~quotes, ~closing))[: min(closing.sum(), 4 * _FEW)].copy()
        apostrophes = [id for id, text in enumerate(texts) if text.startswith("'")]
        self.apostrophes = np.array(sorted(apostrophes, key=lambda id: len(texts[id])), np.int64)
        length = np.array([len(text) for text in texts], np.int32) * is_plain
        self.longest_first = np.argsort(-length, kind="stable")


class Closer:
    """The ways to the end of one grammar's replies."""

    def __init__(
        self, constraint: Constraint, texts: TokenTexts, encode: Callable[[str], list[int]], calls: Any
    ) -> None:
        """`encode`: text as tokens; `calls`: a matcher of nothing but calls; None where none is begun by a
        fixed text."""
        self.stop_ids = constraint.stop_ids
        self._texts = texts
        self.pieces = pieces = texts.pieces
        opener = tuple(encode(constraint.opener))
        self.opener = self.text_of(opener)
        """What begins a call; empty where no fixed text does."""
        last = self.opener[-1:]
        self.completes_opener = [id for id, piece in enumerate(pieces) if last and last in piece]
        ends = [json.loads(text) for text in re.findall(r'suffix=("(?:[^"\\]|\\.)*")', constraint.grammar)]
        ends += [_unescaped(text) for text in re.findall(_EXCLUDED, constraint.grammar)]
        self._ends_of_text = [tuple(encode(text)) for text in dict.fromkeys(ends)]
        self._kept: dict[tuple[bytes, bytes], dict[int, Way]] = {}
        search = None if calls is None else _Search(self, calls, (len(pieces) + 31) // 32)
        way = (None if search is None else search.shortest(b"", _FAR)) or ()
        self.call_length = _FAR
        """Tokens of the shortest call behind its opener."""
        for count in range(len(way), 0, -1):
            if self.opener in self.text_of(way[:count]):
                self.call_length = len(way) - count

    def is_free(self, mask: Packed) -> bool:
        """True in free text: after any plain token the reply can end as before it."""
        return bool(((mask & self._texts.letters) == self._texts.letters).all())

    def plain(self, mask: Packed) -> Packed:
        """[W] the plain tokens of a mask."""
        return mask & self._texts.plain

    def ways(self, matcher: Any, mask: Packed, text: bytes) -> dict[int, Way]:
        """By the first token, the shortest way from the state after `text`: for each of a few choices, else
        for some that close."""
        begin = text.rfind(self.opener) if self.opener else 0  # within a call what was before it is no matter
        key = text[max(begin, 0) :], hashlib.blake2b(mask.tobytes(), digest_size=16).digest()
        ways = self._kept.get(key)
        if ways is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            search = _Search(self, matcher.deep_copy(), len(mask))
            ways = self._kept[key] = {way[0]: way for way in search.ways(mask, text, _FAR)}
        return ways

    def begun(self, matcher: Any, ways: dict[int, Way], text: bytes) -> dict[int, Way]:
        """The rest of those ways whose end of free text stands there in part, by its next token."""
        return {
            way[count]: way[count:]
            for end in self._ends_of_text
            for count in range(1, len(end))
            if text.endswith(self.text_of(end[:count]))
            for way in ways.values()
            if way[: len(end)] == end and self._leads(matcher.deep_copy(), way[count:])
        }

    def _leads(self, matcher: Any, way: Way) -> bool:
        """True if the way ends a reply from the state of the matcher, which is the call's own."""
        is_taken = matcher.try_consume_tokens(list(way[:-1])) == len(way) - 1
        return is_taken and has(mask_of(matcher, (len(self.pieces) + 31) // 32), way[-1])

    def text_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.pieces[token] for token in tokens)

    def stop(self, mask: Packed) -> int | None:
        """The first token that ends the reply, where the mask allows one."""
        return next((id for id in self.stop_ids if has(mask, id)), None)

    def options(self, mask: Packed) -> list[Way]:
        """What to try from a state, the likeliest to end soon first."""
        if int.from_bytes(mask.tobytes()).bit_count() <= _FEW:
            words = np.flatnonzero(mask)
            allowed = _allowed(mask, (words[:, None] * 32 + np.arange(32)).ravel())
            return [(int(id),) for id in allowed[np.argsort(self._texts.rank[allowed], kind="stable")]]
        ids = [*_allowed(mask, self._texts.control), *_allowed(mask, self._texts.closing_first)[:4]]
        ids += [*_allowed(mask, self._texts.apostrophes)[:2]]
        ids += [*_allowed(mask, self._texts.longest_first)[:1]]
        return [*self._ends_of_text, *((int(id),) for id in ids)]


class _Search:
    """Looks from one state of a grammar for ways to its end."""

    def __init__(self, closer: Closer, matcher: Any, num_words: int) -> None:
        """`matcher` is the search's own."""
        self._closer = closer
        self._matcher = matcher
        self._num_words = num_words
        self._num_states = self._depth = 0
        self._masks: dict[bytes, Packed] = {}
        """By text, the mask after it."""
        self._found: dict[bytes, tuple[Way | None, int]] = {}
        """By text, the shortest way from there, and the length up to which it was looked for."""

    def ways(self, mask: Packed, text: bytes, most: int) -> list[Way]:
        """Of each option after `text` the shortest way, of at most `most` tokens."""
        ways: list[Way] = []
        # By the mask after an option: where one way leads on, others mostly do.
        rest_of: dict[bytes, Way] = {}
        for option in self._closer.options(mask):
            rest: Way | None = ()
            if option[0] not in self._closer.stop_ids:
                count = self._matcher.try_consume_tokens(list(option))
                state = self._mask(text + self._closer.text_of(option)).tobytes()
                same = rest_of.get(state, ())[:-1]
                more = self._matcher.try_consume_tokens(list(same)) if count == len(option) else 0
                self._matcher.rollback(count + more)
                leads = bool(same) and more == len(same)
                rest = rest_of[state] if leads else self._after(option, text, most - len(option))
                if rest is not None:
                    rest_of.setdefault(state, rest)
            if rest is not None:
                ways.append(option + rest)
        return ways

    def shortest(self, text: bytes, most: int) -> Way | None:
        """The shortest way of at most `most` tokens from the state of the matcher, which is after `text`."""
        way, looked_for = self._found.get(text, (None, 0))
        if way is not None or looked_for >= most:
            return way if way is not None and len(way) <= most else None
        if most > 0 and self._depth < _MOST_CHOICES:
            self._depth += 1
            way = self._look(text, most)
            self._depth -= 1
        self._found[text] = way, most
        return way

    def _look(self, text: bytes, most: int) -> Way | None:
        mask = self._mask(text)
        stop = self._closer.stop(mask)
        if stop is not None:
            return (stop,)
        forced = tuple(self._matcher.compute_ff_tokens())
        if forced:
            rest = self._after(forced, text, most - len(forced))
            return None if rest is None else forced + rest
        best: Way | None = None
        options = self._closer.options(mask)
        # Where no option leads elsewhere, text must be longer before it can end.
        for option in self._leading_elsewhere(options, text) or options[-1:]:
            rest = self._after(option, text, most - len(option))
            if rest is not None:
                best = option + rest
                most = len(best) - 1
            if self._num_states >= _MOST_STATES and (
                best is not None or self._num_states >= 2 * _MOST_STATES
            ):
                break
        return best

    def _mask(self, text: bytes) -> Packed:
        if text not in self._masks:
            self._num_states += 1
            self._masks[text] = mask_of(self._matcher, self._num_words)
        return self._masks[text]

    def _leading_elsewhere(self, options: Sequence[Way], text: bytes) -> list[Way]:
        """The options that lead to other states than those before them and this one, told by their masks."""
        seen, leading = {self._mask(text).tobytes()}, []
        for option in options:
            count = self._matcher.try_consume_tokens(list(option))
            state = self._mask(text + self._closer.text_of(option)).tobytes() if count == len(option) else b""
            self._matcher.rollback(count)
            if state and state not in seen:
                seen.add(state)
                leading.append(option)
        return leading

    def _after(self, option: Way, text: bytes, most: int) -> Way | None:
        count = self._matcher.try_consume_tokens(list(option))
        way = None
        if count == len(option):
            way = self.shortest(text + self._closer.text_of(option), most)
        self._matcher.rollback(count)
        return way


class Closing:
    """One reply on its way to its limit."""

    def __init__(self, closer: Closer, room: int) -> None:
        """`room`: tokens that it may still have."""
        self._closer = closer
        self._room = room
        self._is_cut = False
        """True once no way fits: the limit is below the shortest reply."""
        self._text = b""
        self._free: tuple[Packed, dict[int, Way]] | None = None
        """The mask of the free text that it is in, and the ways from there."""

    def narrowed(self, matcher: Any, mask: Packed) -> Packed:
        """The tokens of the mask from which a way to the end fits; all, where none does."""
        closer, room = self._closer, self._room
        if self._is_cut or room > _FAR or (np.count_nonzero(mask) == 1 and not (mask & (mask - 1)).any()):
            return mask
        if _within_character(self._text):  # which begins only where there is room for it
            return mask
        is_free = closer.is_free(mask)
        if closer.opener and closer.stop(mask) is not None:
            return self._words(mask) if is_free else self._between_calls(mask)
        if is_free and self._free is not None and np.array_equal(mask, self._free[0]):
            ways = self._free[1]
        else:
            ways = closer.ways(matcher, mask, self._text)
            self._free = (mask, ways) if is_free else None
        # A key that must not be the same as another, say, may need one token more: hence the 1 below.
        shortest = min(map(len, ways.values()), default=_FAR)
        if is_free:  # a plain token throws what is begun away: `shortest` is without it
            ways = ways | closer.begun(matcher, ways, self._text)
        self._is_cut = min(map(len, ways.values()), default=_FAR) > room
        if self._is_cut or (is_free and room > shortest + _SLACK):
            return mask
        fitting = _packed_ids([first for first, way in ways.items() if len(way) <= room], len(mask)) & mask
        return fitting | closer.plain(mask) if is_free and shortest + 1 < room else fitting

    def _between_calls(self, mask: Packed) -> Packed:
        """The mask, or its stops alone where another call may not end in time."""
        if self._room > self._closer.call_length + _JOINT:
            return mask
        return _packed_ids([id for id in self._closer.stop_ids if has(mask, id)], len(mask))

    def _words(self, mask: Packed) -> Packed:
        """The mask without what opens a call that cannot end in time; words may be cut anywhere."""
        closer = self._closer
        if self._room > closer.call_length:
            return mask
        tail = self._text[-len(closer.opener) :]
        late = [token for token in closer.completes_opener if closer.opener in tail + closer.pieces[token]]
        return mask & ~_packed_ids(late, len(mask))

    def advance(self, token: int) -> None:
        """Take the next token."""
        self._room -= 1
        self._text += self._closer.pieces[token]


def mask_of(matcher: Any, num_words: int) -> Packed:
    """[W] what llguidance allows next."""
    mask = np.empty(num_words, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask


def _allowed(mask: Packed, ids: Ints) -> Ints:
    """Those of the tokens that the mask allows, in their order."""
    return ids[(mask[ids // 32] >> (ids % 32) & 1).astype(np.bool_)]


def has(mask: Packed, token: int) -> bool:
    """True where the mask allows the token."""
    return bool(int(mask[token // 32]) >> token % 32 & 1)


def _rank_of(character: str) -> int:
    """Below 0 for what closes a part of JSON, above for what opens one, and for what may go on for ever."""
    if character.isspace() or character == "\ufffd":
        return 1
    return {"}": -4, "]": -4, '"': -1, ",": 2, ":": 2, "{": 8, "[": 8, "\\": 8}.get(character, 0)


def _within_character(text: bytes) -> bool:
    """True where the last character's bytes are not complete."""
    for count, byte in enumerate(reversed(text[-3:]), start=1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _unescaped(pattern: str) -> str:
    """The text that a regular expression without operators stands for."""
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], pattern)


def _packed_ids(ids: Sequence[int], num_words: int) -> Packed:
    """[W] of these tokens."""
    mask = np.zeros(num_words, np.uint32)
    for id in ids:
        mask[id // 32] |= np.uint32(1 << id % 32)
    return mask.view(np.int32)


def _packed(tokens: Sequence[bool]) -> Packed:
    """[W] of a bit for each token."""
    padded = np.zeros((len(tokens) + 31) // 32 * 32, np.bool_)
    padded[: len(tokens)] = tokens
    return np.packbits(padded, bitorder="little").view(np.int32)
