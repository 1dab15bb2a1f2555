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
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.text.text_bound import TextBound, text_bound
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase


_LONG = 4096
"""Characters. A shorter text is tokenised within a few milliseconds."""


class HuggingFaceTokenizer:
    """Adapts a transformers tokenizer: it never adds a BOS, and control tokens come only from markup.

    All added tokens are control tokens, flagged special or not (`<tool_call>` is usually not), except for
    runs of whitespace that a tokenizer has as added tokens.
    """

    hf: PreTrainedTokenizerBase
    """The wrapped tokenizer, for chat templates and `save_pretrained`."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, *, extra_eos_ids: Iterable[int] = ()) -> None:
        """`extra_eos_ids`: those that the model's generation config adds to the tokenizer's eos.

        Raises ConfigurationError if a control token cannot be encoded as plain text.
        """
        self.hf = hf_tokenizer
        eos: Any = hf_tokenizer.eos_token_id
        tokenizer_eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self._eos_ids = tuple(dict.fromkeys([*tokenizer_eos, *extra_eos_ids]))
        # Any text that the vocabulary lacks becomes the unknown token, so that is no control token.
        unknown = {hf_tokenizer.unk_token_id} - {*self._eos_ids, hf_tokenizer.bos_token_id}
        self._control = {
            token.content: id
            for id, token in hf_tokenizer.added_tokens_decoder.items()
            if id not in unknown and (token.special or not _is_text(token.content))
        }
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        self._markup = None if backend is None else _load(json.loads(backend.to_str()))
        self._plain = (
            None
            if backend is None
            else _load(_without_control(json.loads(backend.to_str()), set(self._control)))
        )
        self._check_plain()
        self._bound = _bound(self._markup, self._plain)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

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

        It follows from the length, so a text that is far too long need not be tokenised (text_bound.py).
        """
        return self._bound.least_tokens(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens (added ones that are not special, like `<tool_call>`, stay)."""
        text = self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def decode_markup(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens as markup writes them."""
        text = self.hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def piece(self, id: int) -> str:
        """Text of one token with its leading space; a control token as markup writes it.

        A token that is part of a character gives U+FFFD.
        """
        text = str(self.hf.decode([id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        begins_word = str(self.hf.convert_ids_to_tokens(id)).startswith("\u2581")
        return f" {text}" if begins_word and not text.startswith(" ") else text  # decoders drop the first one

    def _check_plain(self) -> None:
        forged = set(self._control.values())
        for content in self._control:
            if forged & set(self.encode(content)):
                raise ConfigurationError(
                    f"tokenizer {self.hf.name_or_path!r} turns the plain text {content!r} into a control "
                    "token; use the fast (tokenizers-backed) version of this tokenizer"
                )


def _is_text(content: str) -> bool:
    """Is an added token ordinary text: a run of whitespace, or a single character?"""
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
    """The same tokenizer, in which no text becomes a control token; all ids stay the same.

    Added tokens follow the model's vocabulary in order. So an added token outside the vocabulary is renamed:
    dropping it would shift the ids after it. One inside the vocabulary is dropped from the list, and renamed
    in the vocabulary if the model looks up whole words (byte-pair merges alone never form it).
    """
    model = state["model"]
    hidden = {content: f"\ue000{secrets.token_hex(16)}" for content in control}
    pieces = model.get("vocab", {})
    known = set(pieces) if isinstance(pieces, dict) else {piece for piece, _ in pieces}
    state["post_processor"] = None
    state["added_tokens"] = [
        {**token, "content": hidden.get(token["content"], token["content"])}
        for token in state["added_tokens"]
        if token["content"] not in control or token["content"] not in known
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
    """One token per byte, ids 0 to 255, and a few control tokens; pure Python, for the scripted backend."""

    def __init__(
        self, control: Sequence[str] = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    ) -> None:
        """`control`: markup tokens, with ids from 256; the first one ends a turn."""
        self._ids = {content: 256 + index for index, content in enumerate(control)}
        self._control = {id: content for content, id in self._ids.items()}
        self._split = re.compile("(" + "|".join(re.escape(content) for content in control) + ")")
        self._eos_ids = (256,)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

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
