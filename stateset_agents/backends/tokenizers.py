"""Tokenizers with one small interface (`backends.base.Tokenizer`), for backends and chat templates.

Text from users and tools is encoded by `encode`, where a control token that is written out is ordinary text.
Only the template's own markup is encoded by `encode_markup`. So nobody can forge a role or end a turn by
typing a control token.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.base import Tokenizer
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase


# --- a lower bound of a text's number of tokens, from its length
#
# If no token stands for more than n characters, a text has at least length / n tokens. That holds only if the
# tokenizer drops nothing of the text. So each part of the tokenizer is checked; with a part of unknown type
# there is no bound.

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
    """The number of characters that one token may stand for."""

    characters: float
    """Most characters of one token; infinite if there is no bound."""
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
    """The most characters that a normalizer may turn into one."""
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
    """True if a pre-tokenizer drops nothing but white space."""
    if split["type"] in _SPLITS_WITH_A_BEHAVIOR:
        return bool(split["behavior"] != "Removed")
    return split["type"] in _LOSSLESS_SPLITS | _SPLITS_AT_SPACE


def _keeps_all(model: Mapping[str, Any], steps: Iterable[Mapping[str, Any]]) -> bool:
    """True if the model drops no character, and joins no characters into one unknown token."""
    vocabulary = set(_names(model.get("vocab", {})))
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return model["type"] in ("BPE", "Unigram")
    if model["type"] != "BPE":
        return False  # one unknown token stands for a word, or for a run of characters
    if model.get("unk_token") is not None:
        return not model.get("fuse_unk")
    if not any(step["type"] == "ByteLevel" for step in steps):
        return False
    from tokenizers.pre_tokenizers import ByteLevel

    prefixes = {"", model.get("continuing_subword_prefix") or ""}
    suffixes = {"", model.get("end_of_word_suffix") or ""}
    return all(
        f"{prefix}{letter}{suffix}" in vocabulary
        for letter in ByteLevel.alphabet()
        for prefix in prefixes
        for suffix in suffixes
    )


_LONG = 4096
"""Characters. A shorter text is tokenised within a few milliseconds."""


class HuggingFaceTokenizer:
    """Adapts a transformers tokenizer: it never adds a BOS, and control tokens come only from markup.

    All added tokens are control tokens, flagged special or not (`<tool_call>` is usually not), except for
    runs of whitespace that a tokenizer has as added tokens.
    """

    hf: PreTrainedTokenizerBase
    """The wrapped tokenizer, for chat templates and `save_pretrained`."""
    control: Mapping[str, int]
    """Control tokens: text as markup writes them -> id."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, *, extra_eos_ids: Iterable[int] = ()) -> None:
        """`extra_eos_ids`: those that the model's generation config adds to the tokenizer's eos.

        Raises ConfigurationError if a control token cannot be encoded as plain text.
        """
        self.hf = hf_tokenizer
        eos: Any = hf_tokenizer.eos_token_id
        tokenizer_eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self.eos_ids = tuple(dict.fromkeys([*tokenizer_eos, *extra_eos_ids]))
        # Any text that the vocabulary lacks becomes the unknown token, so that is no control token.
        unknown = {hf_tokenizer.unk_token_id} - {*self.eos_ids, hf_tokenizer.bos_token_id}
        self.control = {
            token.content: id
            for id, token in hf_tokenizer.added_tokens_decoder.items()
            if id not in unknown and (token.special or not _is_text(token.content))
        }
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        self._markup = None if backend is None else _load(json.loads(backend.to_str()))
        self._plain = (
            None
            if backend is None
            else _load(_without_control(json.loads(backend.to_str()), set(self.control)))
        )
        self._check_plain()
        self._bound = _bound(self._markup, self._plain)

    def encode(self, text: str) -> list[int]:
        if self._plain is not None:
            return _encoded(self._plain, text)
        return list(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def encode_markup(self, text: str) -> list[int]:
        if self._markup is not None:
            return _encoded(self._markup, text)
        return list(self.hf.encode(text, add_special_tokens=False))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text, plain or markup; 0 if there is none.

        It follows from the length, so a text that is far too long need not be tokenised.
        """
        return self._bound.least_tokens(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens (added ones that are not special, like `<tool_call>`, stay)."""
        # A slow tokenizer would also change the spaces around punctuation.
        return str(self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_markup(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens as markup writes them."""
        return str(self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, id: int) -> str:
        """Text of one token with its leading space; a control token as markup writes it.

        A token that is part of a character gives U+FFFD.
        """
        text = self.decode_markup([id])
        begins_word = str(self.hf.convert_ids_to_tokens(id)).startswith("\u2581")
        return f" {text}" if begins_word and not text.startswith(" ") else text  # decoders drop the first one

    def _check_plain(self) -> None:
        forged = set(self.control.values())
        for content in self.control:
            if forged & set(self.encode(content)):
                raise ConfigurationError(
                    f"tokenizer {self.hf.name_or_path!r} turns the plain text {content!r} into a control "
                    "token; use the fast (tokenizers-backed) version of this tokenizer"
                )


def _is_text(content: str) -> bool:
    """True if an added token is ordinary text: a run of whitespace, or a single character."""
    return not content.replace("\u2581", "").strip() or len(content) == 1


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text.

    A long text is encoded as a batch, since for batches the library releases the GIL. `encode` does not, and
    would block every other thread, also the event loop's, for a second per million characters.
    """
    if len(text) < _LONG:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _bound(markup: Any, plain: Any) -> TextBound:
    """A bound that holds for both tokenizers.

    The tokens of `plain` are among those of `markup`; only the hidden names of its control tokens are longer.
    """
    if markup is None or plain is None:
        return TextBound(math.inf, False)
    of_markup, of_plain = (text_bound(json.loads(tokenizer.to_str())) for tokenizer in (markup, plain))
    characters = math.inf if math.isinf(of_plain.characters) else of_markup.characters
    return TextBound(characters, of_markup.counts_space and of_plain.counts_space)


def _load(state: dict[str, Any]) -> Any:
    """A separate `tokenizers.Tokenizer`, so that truncation or padding set elsewhere do not apply."""
    from tokenizers import Tokenizer

    state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))


def _without_control(state: dict[str, Any], control: set[str]) -> dict[str, Any]:
    """The state of a tokenizer in which no text becomes a control token; all ids stay the same.

    Added tokens follow the model's vocabulary in order. So an added token outside the vocabulary is renamed:
    dropping it would shift the ids after it. One inside the vocabulary is dropped from the list, and renamed
    in the vocabulary if the model looks up whole words (byte-pair merges alone never form it).
    """
    model = state["model"]
    hidden = {content: f"\ue000{secrets.token_hex(16)}" for content in control}
    pieces = model.get("vocab", {})
    vocabulary = set(pieces) if isinstance(pieces, dict) else {piece for piece, _ in pieces}
    state["post_processor"] = None
    state["added_tokens"] = [
        {**token, "content": hidden.get(token["content"], token["content"])}
        for token in state["added_tokens"]
        if token["content"] not in control or token["content"] not in vocabulary
    ]
    if isinstance(pieces, list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in pieces]
    elif model.get("type") != "BPE" or model.get("ignore_merges"):
        model["vocab"] = {hidden.get(piece, piece): id for piece, id in pieces.items()}
    return state


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a tokenizer's files as transformers reads them. Raises OSError if the disk cannot take them."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the tokenizers library raises a bare Exception for a full disk
        raise OSError(str(error)) from error


class ByteTokenizer:
    """A tokenizer for scripted backends: a token per byte, ids 0 to 255, and a few control tokens."""

    def __init__(
        self, control: Sequence[str] = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    ) -> None:
        """`control`: markup tokens, with ids from 256; the first one ends a turn."""
        self._ids = {content: 256 + index for index, content in enumerate(control)}
        self._control = {id: content for content, id in self._ids.items()}
        self._split = re.compile("(" + "|".join(re.escape(content) for content in control) + ")")
        self.eos_ids = (256,)

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of the text; a control token that is written out in it is bytes, too."""
        return list(text.encode("utf-8", errors="surrogatepass"))

    def encode_markup(self, text: str) -> list[int]:
        """Bytes, and one id for each control token."""
        ids: list[int] = []
        for piece in self._split.split(text):
            ids += [self._ids[piece]] if piece in self._ids else self.encode(piece)
        return ids

    def least_tokens(self, text: str) -> int:
        """The number of tokens if all of the text were the longest control token."""
        return -(-len(text) // max(map(len, self._ids), default=1))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes without control tokens; invalid UTF-8 becomes U+FFFD."""
        return bytes(id for id in ids if id < 256).decode("utf-8", errors="replace")

    def decode_markup(self, ids: Sequence[int]) -> str:
        """Text of the bytes, control tokens as markup writes them."""
        parts = (self._control[id].encode() if id in self._control else bytes([id]) for id in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def piece(self, id: int) -> str:
        """A byte as text, U+FFFD if it is only part of a character; a control token as markup writes it."""
        return self._control[id] if id in self._control else self.decode([id])


# --- one turn, decoded token by token, for streaming and stop strings
#
# A turn without either is decoded once, at its end.

_WINDOW = 64
"""Tokens that are always decoded together. Decoding a full long turn at each token would be slow."""
_BROKEN = "\ufffd"
"""A decoder's output for invalid bytes, and for a character that is not complete yet."""


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it; the full text if there is none."""
    starts = [start for start in (text.find(string) for string in stop) if start >= 0]
    return text[: min(starts, default=len(text))]


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
        self.stopped_by: str | None = None
        """The stop string before which the text ends, once it is finished."""

    def add(self, token: int) -> bool:
        """Add the next token. True if the text now contains a stop string."""
        self._ids.append(token)
        before, self._text = self._text, self._decode(self._ids[self._start :])
        # Half a character at the end is not searched for stop strings, and not emitted yet.
        complete = self._text.rstrip(_BROKEN)
        if any(string in self._held + complete[self._settled :] for string in self._stop):
            return True
        # A decoder may join the newest token to the next one, so it is settled when that has come.
        settled = len(common_prefix(before, complete).rstrip(_BROKEN))
        if settled > self._settled:
            self._settle(self._text[self._settled : settled])
            self._settled = settled
        if len(self._ids) - self._start >= 2 * _WINDOW:
            self._slide()
        return False

    def finish(self, ids: Sequence[int]) -> str:
        """The text of all `ids` of the turn, cut at a stop string; `on_text` gets its last piece."""
        whole = self._decode(ids[:-1] if ids and ids[-1] in self._end_ids else ids)
        text = cut(whole, self._stop)
        if len(text) < len(whole):
            self.stopped_by = next(string for string in self._stop if whole.startswith(string, len(text)))
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


def common_prefix(a: str, b: str) -> str:
    """The beginning that both texts share."""
    if b.startswith(a):
        return a
    return a[: next((n for n, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), len(b))]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the stop string, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
