"""A text is called too long before it is tokenised only where it is: the bound is never above the tokens."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import stateset_agents
from stateset_agents.backends.tokenizers import ByteTokenizer, HuggingFaceTokenizer

CORPUS = [
    "the order is late " * 3,
    "====== ------",
    "a\u0301 e\u0302\u0323 \u1f82 \uac01",
    "    \n\n\n  ",
    "naïve",
]


def wrapped(raw: Tokenizer, added: list[AddedToken] | None = None) -> HuggingFaceTokenizer:
    raw.add_special_tokens(added or ["<end>"])
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>"))


def byte_level(
    normalizer: Any = None, *, trained: bool = True, before: Any = None, **model: Any
) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: id for id, letter in enumerate(alphabet)}, [], **model))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer = level if before is None else pre_tokenizers.Sequence([before, level])
    raw.decoder = decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    if trained:
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
        raw.train_from_iterator(CORPUS * 20, trainer)
    return raw


def sentencepiece(**model: Any) -> Tokenizer:
    """As Llama 2 and Gemma have it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "t", "h", "e", "th", "the"]
    pieces += ["\u2581\u2581", "\u2581\u2581\u2581\u2581", "\u2581the"]
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("\u2581", "\u2581"),
        ("\u2581\u2581", "\u2581\u2581"),
        ("\u2581", "the"),
    ]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", **model))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return raw


def wordpiece() -> Tokenizer:
    raw = Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##r": 2}, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return raw


def unigram(pieces: list[tuple[str, float]], **model: Any) -> Tokenizer:
    raw = Tokenizer(models.Unigram(pieces, unk_id=0, **model))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    return raw


def desk() -> HuggingFaceTokenizer:
    folder = Path(stateset_agents.__file__).parent / "embedded" / "desk"
    return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder))


BYTES = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
STRIPPING = [AddedToken("<end>", rstrip=True, special=True), AddedToken("<user>", lstrip=True, special=True)]
BOUNDED: dict[str, Any] = {
    "tiny": tiny_tokenizer(),
    "bytes": ByteTokenizer(),
    "desk": desk(),
    "byte-level": wrapped(byte_level()),
    "byte-level-nfc": wrapped(byte_level(normalizers.NFC())),
    "byte-level-nfkc": wrapped(byte_level(normalizers.NFKC())),
    "byte-level-nfd": wrapped(byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]))),
    "byte-level-split": wrapped(byte_level(before=pre_tokenizers.Split(Regex(r"\d{1,3}|\s+"), "isolated"))),
    "byte-level-ignore-merges": wrapped(byte_level(ignore_merges=True)),
    "byte-level-rstrip": wrapped(byte_level(), STRIPPING),
    "shorter": wrapped(
        byte_level(normalizers.Sequence([normalizers.Replace("the ", "t"), normalizers.NFC()]))
    ),
    "shorter-by-regex": wrapped(byte_level(normalizers.Replace(Regex(r"[a-z]\s(?=t)"), "x"))),
    "strip": wrapped(byte_level(normalizers.Strip())),
    "llama2": wrapped(sentencepiece(byte_fallback=True, fuse_unk=True)),
    "unknown-apart": wrapped(sentencepiece(fuse_unk=False)),
    "unigram-bytes": wrapped(unigram([("<unk>", 0.0), *BYTES, ("\u2581the", -1.0)], byte_fallback=True)),
}
UNBOUNDED: dict[str, Any] = {
    "spaces-by-regex": wrapped(byte_level(normalizers.Replace(Regex(r" {2,}"), " "))),
    "alternatives": wrapped(byte_level(normalizers.Replace(Regex(r"a|the order"), "x"))),
    "removing": wrapped(byte_level(normalizers.Replace("e", ""))),
    "accents": wrapped(byte_level(normalizers.StripAccents())),
    "split-removed": wrapped(byte_level(before=pre_tokenizers.Split(" ", "removed"))),
    "unknown-fused": wrapped(sentencepiece(fuse_unk=True)),
    "unigram": wrapped(unigram([("<unk>", 0.0), ("\u2581the", -1.0), ("e", -2.0)])),
    "bert": wrapped(wordpiece()),
}
FAMILIES = {**BOUNDED, **UNBOUNDED}

pieces = st.one_of(
    st.sampled_from(["the ", "the order", "<end>", "<user>", "<|end|>", "====", "\ue000", '{"name": "look']),
    st.sampled_from(
        ["e\u0302\u0323", "\u03b1\u0313\u0300\u0345", "\u1100\u1161\u11a8", "\ufb01", "\ufdfa", "\u0130"]
    ),
    st.sampled_from([" ", "\n", "\u2581", "\u3000", "\x1c", "\u0301", "\u200b"]),
    st.text(max_size=6),
)
texts = st.lists(st.tuples(pieces, st.integers(1, 40)), max_size=8).map(
    lambda parts: "".join(piece * times for piece, times in parts)
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(text=texts)
def test_no_text_has_fewer_tokens_than_its_length_says(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]
    least = tokenizer.least_tokens(text)
    assert least <= len(tokenizer.encode(text))
    assert least <= len(tokenizer.encode_markup(text))


@pytest.mark.parametrize("family", BOUNDED)
def test_a_very_long_text_is_known_to_have_many_tokens(family: str) -> None:
    assert BOUNDED[family].least_tokens("where is it " * 100_000) > 5_000


@pytest.mark.parametrize("family", UNBOUNDED)
def test_where_text_may_get_lost_nothing_is_known(family: str) -> None:
    assert UNBOUNDED[family].least_tokens("where is it " * 100_000) == 0


def test_the_bound_is_reached_by_the_longest_token() -> None:
    tokenizer = tiny_tokenizer()  # bytes, and <|assistant|> of 13 characters
    assert (
        tokenizer.least_tokens("<|assistant|>" * 7) == len(tokenizer.encode_markup("<|assistant|>" * 7)) == 7
    )
    composed = BOUNDED["byte-level-nfc"]
    longest = max(len(piece) for piece in composed.hf.get_vocab())
    assert composed.least_tokens("x" * (4 * longest + 1)) == 2


def test_white_space_that_a_tokenizer_may_drop_does_not_count() -> None:
    tokenizer = BOUNDED["byte-level-rstrip"]
    assert len(tokenizer.encode_markup("<end>" + " " * 100_000)) == 1
    assert tokenizer.least_tokens("<end>" + " " * 100_000) == 1


def test_long_and_short_texts_are_tokenised_alike() -> None:
    for family in ("desk", "llama2", "byte-level-nfc", "unigram-bytes"):
        tokenizer = FAMILIES[family]
        text = "the order e\u0301 is <end> late.\n" * 300
        ids = list(tokenizer._plain.encode(text, add_special_tokens=False).ids)
        assert len(text) > 4096
        assert tokenizer.encode(text) == ids


async def test_a_long_text_is_tokenised_without_holding_the_interpreter() -> None:
    tokenizer = BOUNDED["desk"]
    text = "where is it " * 40_000
    waits: list[float] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            waits.append(time.perf_counter() - before)

    watch = threading.Thread(target=look)
    before = time.perf_counter()
    watch.start()
    await asyncio.to_thread(tokenizer.encode, text)
    took = time.perf_counter() - before
    done.set()
    watch.join()
    assert max(waits) < took / 2, (max(waits), took)
