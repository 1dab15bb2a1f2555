"""Tokenizers behind one small interface (`backends.base.Tokenizer`), for backends and chat templates.

Text from users and tools goes through `encode`, where a written-out control token is just text; only the
template's own markup goes through `encode_markup`. So nobody can forge a role or end a turn by typing it.
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

__all__ = ["ByteTokenizer", "HuggingFaceTokenizer", "save_tokenizer"]

_LONG = 4096
"""Characters; less is tokenised in a few milliseconds."""


class HuggingFaceTokenizer:
    """A transformers tokenizer as our code sees it: never a BOS of its own, control tokens only from markup.

    Added tokens count as control tokens whether flagged special or not (`<tool_call>` is usually not);
    runs of whitespace that a tokenizer keeps as added tokens stay text.
    """

    hf: PreTrainedTokenizerBase
    """The wrapped tokenizer, for chat templates and `save_pretrained`."""

    def __init__(self, hf_tokenizer: PreTrainedTokenizerBase, *, extra_eos_ids: Iterable[int] = ()) -> None:
        """`extra_eos_ids`: what the model's generation config adds to the tokenizer's own eos.

        Raises ConfigurationError where a control token can't be written as plain text.
        """
        self.hf = hf_tokenizer
        eos: Any = hf_tokenizer.eos_token_id
        own = [] if eos is None else eos if isinstance(eos, list) else [eos]
        self._eos_ids = tuple(dict.fromkeys([*own, *extra_eos_ids]))
        # The unknown token stands for any text the vocabulary lacks, so text may turn into it.
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
        """Ids that end a turn."""
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and control tokens written out in it stay plain text."""
        if self._plain is not None:
            return _encoded(self._plain, text)
        return list(self.hf.encode(text, add_special_tokens=False, split_special_tokens=True))

    def encode_markup(self, text: str) -> list[int]:
        """Ids of trusted template text, in which control tokens are control tokens; no BOS added."""
        if self._markup is not None:
            return _encoded(self._markup, text)
        return list(self.hf.encode(text, add_special_tokens=False))

    def least_tokens(self, text: str) -> int:
        """A number that the tokens of a text, plain or markup, are never below; 0 where nothing is known.

        Told from its length, so that a text that is far too long need not be tokenised (text_bound.py).
        """
        return self._bound.least_tokens(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out (added ones that aren't special, like `<tool_call>`, stay)."""
        text = self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def piece(self, id: int) -> str:
        """What one token says, with its leading space; a control token as it is written in markup.

        A token that is part of a character reads U+FFFD.
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
    """Whether an added token is ordinary text: a run of whitespace, or one plain character."""
    return not content.replace("\u2581", "").strip() or len(content) == 1


def _encoded(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text.

    A long one goes as a batch, for which the library lets go of the interpreter's lock: `encode` holds up
    every other thread, the event loop's among them, a second for each million characters.
    """
    if len(text) < _LONG:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _bound(markup: Any, plain: Any) -> TextBound:
    """What holds for both ways of reading a text. The tokens of plain text are among those of markup, though
    the names that stand for those it lacks are longer."""
    if markup is None or plain is None:
        return TextBound(math.inf, False)
    wide, narrow = (text_bound(json.loads(way.to_str())) for way in (markup, plain))
    characters = math.inf if math.isinf(narrow.characters) else wide.characters
    return TextBound(characters, wide.counts_space and narrow.counts_space)


def _load(state: dict[str, Any]) -> Any:
    """A `tokenizers.Tokenizer` of its own, so that nobody else's truncation or padding applies."""
    from tokenizers import Tokenizer

    state["truncation"] = state["padding"] = None
    return Tokenizer.from_str(json.dumps(state))


def _without_control(state: dict[str, Any], control: set[str]) -> dict[str, Any]:
    """The same tokenizer with every control token out of reach of any text; all ids stay as they are.

    Added tokens follow the model's vocabulary in order, so one outside it is renamed (dropping it would
    shift the ids after it), and one inside it is dropped from the list, and renamed in the vocabulary where
    the model looks whole words up (byte-pair merges alone never form it).
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
    """Write transformers' files of a tokenizer. Raises OSError where the disk cannot take them."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # a full disk is a bare Exception of the tokenizers library
        raise OSError(str(error)) from error


class ByteTokenizer:
    """Bytes as tokens, ids 0 to 255, and a few control tokens; pure Python, for the scripted backend."""

    def __init__(
        self, control: Sequence[str] = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    ) -> None:
        """`control`: markup tokens, ids from 256; the first ends a turn."""
        self._ids = {content: 256 + index for index, content in enumerate(control)}
        self._control = {id: content for content, id in self._ids.items()}
        self._split = re.compile("(" + "|".join(re.escape(content) for content in control) + ")")
        self._eos_ids = (256,)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of the text; a control token written out in it is bytes like any other."""
        return list(text.encode("utf-8", errors="surrogatepass"))

    def encode_markup(self, text: str) -> list[int]:
        """Bytes, with control tokens as their one id."""
        ids: list[int] = []
        for piece in self._split.split(text):
            ids += [self._ids[piece]] if piece in self._ids else self.encode(piece)
        return ids

    def least_tokens(self, text: str) -> int:
        """As many as if all of it were the longest control token."""
        return -(-len(text) // max(map(len, self._ids), default=1))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the bytes; control tokens are left out and broken UTF-8 is shown as U+FFFD."""
        return bytes(id for id in ids if id < 256).decode("utf-8", errors="replace")

    def piece(self, id: int) -> str:
        """A byte as text, U+FFFD where it is only part of a character; a control token as it is written."""
        return self._control[id] if id in self._control else self.decode([id])
