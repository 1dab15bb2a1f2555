"""A lower bound of a text's number of tokens from its length, without tokenising it; for tokenizers.py.

If no token stands for more than n characters, a text has at least length / n tokens. That holds only if the
tokenizer drops nothing of the text. So each part of the tokenizer is checked; with a part of unknown type
there is no bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST_COMPOSED = 4
"""Most characters that NFC and NFKC compose into one: U+1F82 and a few others decompose into four
(https://unicode.org/faq/normalization.html#12)."""
_LOSSLESS_NORMALIZERS = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
_LOSSLESS_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_SPLITS_WITH_A_BEHAVIOR = frozenset({"Split", "Punctuation"})
_SPLITS_AT_SPACE = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_ATOM = re.compile(r"\\[^A-Za-z0-9]|\\[sSdDwWnrtfv]|\[(?:\\.|[^\]\[\\])*\]|[^\\\[\](){}*+?|^$.]", re.DOTALL)
_LOOKAHEAD = re.compile(r"\(\?[=!][^()]*\)\Z")


@dataclass(frozen=True, slots=True)
class TextBound:
    """How many characters one token may stand for."""

    characters: float
    """At most; infinite if there is no bound."""
    counts_space: bool
    """False if the tokenizer may drop white space."""

    def least_tokens(self, text: str) -> int:
        """A lower bound of the text's number of tokens; 0 if there is none."""
        if math.isinf(self.characters):
            return 0
        length = len(text) if self.counts_space else sum(map(len, text.split()))
        return math.ceil(length / self.characters)


def text_bound(state: Mapping[str, Any]) -> TextBound:
    """The bound of a tokenizer, given as the `tokenizer.json` that the tokenizers library writes of it."""
    steps = _parts(state["normalizer"], "normalizers")
    splits = _parts(state["pre_tokenizer"], "pretokenizers")
    pieces = state["model"].get("vocab", {})
    added = state["added_tokens"]
    lossless = _keeps_all(state["model"], splits + steps) and all(map(_keeps, splits))
    longest = max(
        (len(piece) for piece in (*_names(pieces), *(token["content"] for token in added))), default=1
    )
    shrinks = math.prod((_shrinks(step) for step in steps), start=1.0)
    drops_space = (
        any(split["type"] in _SPLITS_AT_SPACE for split in splits)
        or any(step["type"] == "Strip" for step in steps)
        or any(token["lstrip"] or token["rstrip"] for token in added)
    )
    return TextBound(longest * shrinks if lossless else math.inf, not drops_space)


def _parts(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as the list of its steps."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[name] for step in _parts(inner, name)]
    return [part]


def _names(pieces: Any) -> Iterable[str]:
    return pieces if isinstance(pieces, Mapping) else (piece for piece, _ in pieces)


def _shrinks(step: Mapping[str, Any]) -> float:
    """How many characters a normalizer may turn into one."""
    kind = step["type"]
    if kind in ("NFC", "NFKC"):
        return _MOST_COMPOSED
    if kind == "Replace":
        pattern, content = step["pattern"], step["content"]
        width = len(pattern["String"]) if "String" in pattern else _width(pattern["Regex"])
        return max(1.0, width / len(content)) if content else math.inf
    return 1.0 if kind in _LOSSLESS_NORMALIZERS or kind == "Strip" else math.inf


def _width(pattern: str) -> float:
    """Most characters that a regular expression matches; infinite for all but the simplest."""
    consuming = _LOOKAHEAD.sub("", pattern)
    atoms = _ATOM.findall(consuming)
    return len(atoms) if "".join(atoms) == consuming else math.inf


def _keeps(split: Mapping[str, Any]) -> bool:
    """Does a pre-tokenizer drop nothing but white space?"""
    if split["type"] in _SPLITS_WITH_A_BEHAVIOR:
        return bool(split["behavior"] != "Removed")
    return split["type"] in _LOSSLESS_SPLITS | _SPLITS_AT_SPACE


def _keeps_all(model: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> bool:
    """Does the model drop no character, and join no characters into one unknown token?"""
    known = set(_names(model.get("vocab", {})))
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known for byte in range(256)):
        return model["type"] in ("BPE", "Unigram")
    if model["type"] != "BPE":
        return False  # one unknown token stands for a word, or for a run of characters
    if model.get("unk_token") is not None:
        return not model.get("fuse_unk")
    if not any(step["type"] == "ByteLevel" for step in steps):
        return False
    prefixes = {"", model.get("continuing_subword_prefix") or ""}
    suffixes = {"", model.get("end_of_word_suffix") or ""}
    return all(
        f"{prefix}{letter}{suffix}" in known
        for letter in _byte_letters()
        for prefix in prefixes
        for suffix in suffixes
    )


def _byte_letters() -> list[str]:
    """The characters with which byte-level tokenizers write the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return list(ByteLevel.alphabet())
