"""What counts as the same where texts and calls are compared: two Unicode forms, two spellings of a number.

What is compared goes through here; what is trained on, sampled or passed to a tool never does.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

__all__ = ["canonical", "nfc"]


def nfc(text: str) -> str:
    """The text in Unicode's form NFC, in which a letter with its accent is one character.

    >>> nfc("Zu\\u0308rich") == "Z\\u00fcrich"
    True
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def canonical(value: Any) -> str:
    """One text for all spellings of a JSON value: keys in order, texts in NFC, numbers by value.

    >>> canonical({"b": 20.0, "a": True}) == canonical({"a": True, "b": 20})
    True
    >>> canonical(1) == canonical(True)
    False
    """
    return json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return nfc(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {nfc(str(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
