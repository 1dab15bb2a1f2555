"""The tokenizer of the small models, made from the text that they are shown.

A byte-level vocabulary in which every word of that text is one token. A word carries the space before
it; where no space stands (`"Oslo"`), a *joiner* goes before the word and swallows that space, so the
word is the same token in JSON and in prose, and copying it from one to the other is a copy of ids:

    to Oslo      ->  to| Oslo
    "to": "Oslo" ->  "J| to|": "J| Oslo|"          (J joins, and belongs to the punctuation's token)

Text that is not in the vocabulary falls back to bytes; decoding gives every text back exactly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stateset_agents.types.messages import Message

Dialogue = tuple[Message, ...]
PAD, END = "<|pad|>", "<|end|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
TOOL_CALL_TOKENS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (Path(__file__).parent / "desk" / "chat_template.jinja").read_text(encoding="utf-8")

_JOINER, _ESCAPE = "\ue000", "\ue001"
"""Private-use characters; a joiner in the text itself is written joiner + escape."""
_OPENERS = ('"', "$", "#", "(", "[")
"""Marks that a word may follow without a space and still be the same token."""
_CALL_PARTS = (f'{{"{_JOINER} name": "{_JOINER}', f'", "{_JOINER} arguments": {{')
"""The fixed parts of a tool call are one token each."""
_PIECES = "|".join(
    [
        *(re.escape(part) for part in _CALL_PARTS),
        rf'(?:\{{|", |, )?"{_JOINER} [a-z_]+": (?:"{_JOINER})?',  # a JSON key with its quotes: `", "city": "`
        r" ?[A-Za-z_]+(?:'[a-z]+)?",  # a word with the space before it: " order_id", " I'm"
        r" ?[0-9]{1,2}",  # numbers in pairs of digits: K27 is " K", "27"
        r"\s*[^A-Za-z0-9_\s]+(?: [^A-Za-z0-9_\s]+)*",  # punctuation, with single spaces inside: ": "
        r"\s+",
    ]
)


def _pipeline(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(_JOINER, _JOINER + _ESCAPE),
            *(
                normalizers.Replace(Regex(re.escape(opener) + "(?=[A-Za-z0-9])"), f"{opener}{_JOINER} ")
                for opener in _OPENERS
            ),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteLevel(),
            decoders.Replace(_JOINER + " ", ""),
            decoders.Replace(_JOINER + _ESCAPE, _JOINER),
        ]
    )
    return tokenizer


def _pieces(pipeline: Tokenizer, text: str) -> list[str]:
    normalized = pipeline.normalizer.normalize_str(text)
    return [piece for piece, _ in pipeline.pre_tokenizer.pre_tokenize_str(normalized)]


def build_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 1000,
    max_length: int = 1024,
    tags: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the control tokens, the 256 bytes, all pairs of digits, all
    capital letters, and the most frequent pieces of `texts` (ties in alphabetical order).

    `texts` is what stands between control tokens: contents of messages and calls as JSON. `tags` are one
    token each, such as <think>.
    """
    markup_tokens = (*TOOL_CALL_TOKENS, *tags)
    controls: Sequence[str] = (PAD, END, *ROLE_TOKENS.values(), *markup_tokens)
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    pipeline = _pipeline({symbol: index for index, symbol in enumerate(symbols)})
    pieces: dict[str, None] = dict.fromkeys(symbols)
    for text in (*(f"{number:02d}" for number in range(100)), *(f" {chr(65 + n)}" for n in range(26))):
        pieces.update(dict.fromkeys(_pieces(pipeline, text)))
    counts = Counter(piece for text in texts for piece in _pieces(pipeline, text))
    for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        pieces.setdefault(piece)
    vocabulary = {
        piece: index
        for index, piece in enumerate(list(pieces)[: vocab_size - len(controls)], start=len(controls))
    }
    # Control tokens stand first, in the model's vocabulary too, so that ids do not depend on the texts.
    pipeline = _pipeline({**{token: index for index, token in enumerate(controls)}, **vocabulary})
    pipeline.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in controls[: -len(markup_tokens)]]
    )
    pipeline.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in markup_tokens]
    )  # kept when special tokens are left out of decoded text: whoever reads the calls needs them
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=pipeline,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )


def texts(dialogues: Iterable[Dialogue]) -> Iterator[str]:
    """Every text of the dialogues, as in the template but without control tokens."""
    for dialogue in dialogues:
        for message in dialogue:
            if message.reasoning is not None:
                yield f" {message.reasoning} "
            yield message.content
            for call in message.tool_calls:
                arguments = json.dumps(dict(call.arguments))
                yield f'{{"name": "{call.name}", "arguments": {arguments}}}'
