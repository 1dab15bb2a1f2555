"""Decides what counts as the same where texts and calls are compared: two Unicode forms, two spellings of a
number.

What is compared goes through here; what is trained on, sampled or passed to a tool never does.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]  # it has no types of its own

_MANY_MARKS = regex.compile(r"(\p{M}{31,})")


def nfc(text: str) -> str:
    """The text in Unicode's form NFC, in which a letter with its accent is one character.

    More than 30 marks on a letter stay as they are: sorting them takes time with the square of their number
    (https://www.unicode.org/reports/tr15/#Stream_Safe_Text_Format).

    >>> nfc("Zu\\u0308rich") == "Z\\u00fcrich"
    True
    """
    if text.isascii():
        return text
    parts = _MANY_MARKS.split(text)
    return "".join(p if place % 2 else unicodedata.normalize("NFC", p) for place, p in enumerate(parts))


def composed(value: Any) -> Any:
    """A value in which every text is in NFC, keys included; what holds none is the same object."""
    if isinstance(value, str):
        return nfc(value)
    if isinstance(value, Mapping):
        return {composed(key): composed(item) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(map(composed, value))
    return value


def canonical(value: Any, fold: Callable[[str], str] = str) -> str:
    """One text for all spellings of a JSON value: keys in order, texts in NFC, numbers by value.

    `fold` brings texts that count as the same to one, such as "Oslo" and "oslo".

    >>> canonical({"b": 20.0, "a": True}) == canonical({"a": True, "b": 20})
    True
    >>> canonical(1) == canonical(True)
    False
    """
    return json.dumps(_plain(value, fold), sort_keys=True, default=str)


def _plain(value: Any, fold: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return nfc(fold(nfc(value)))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {nfc(str(key)): _plain(item, fold) for key, item in value.items()}
    return [_plain(item, fold) for item in value] if isinstance(value, list | tuple) else value
