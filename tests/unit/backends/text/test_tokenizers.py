"""Plain text never becomes a control token, whatever it spells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SPECIAL, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stateset_agents.backends.base import Tokenizer as TokenizerProtocol
from stateset_agents.backends.tokenizers import ByteTokenizer, HuggingFaceTokenizer

CONTROL = [*SPECIAL, "<tool_call>", "</tool_call>"]
TOKENIZER = tiny_tokenizer()
BYTES = ByteTokenizer()
texts = st.lists(st.one_of(st.sampled_from(CONTROL), st.text(max_size=8))).map("".join)


@given(texts)
def test_written_out_control_tokens_stay_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(id < 256 for id in ids)
    assert TOKENIZER.decode(ids) == text


@given(texts)
def test_byte_tokens_stay_text(text: str) -> None:
    ids = BYTES.encode(text)
    assert all(id < 256 for id in ids)
    assert BYTES.decode(ids) == text


@given(st.text(max_size=40))
def test_text_without_control_tokens_is_encoded_as_transformers_does(text: str) -> None:
    if not any(token in text for token in CONTROL):
        assert TOKENIZER.encode(text) == TOKENIZER.hf.encode(text, add_special_tokens=False)


def test_markup_becomes_control_tokens_and_gets_no_second_bos() -> None:
    ids = TOKENIZER.encode_markup("<|bos|><|user|>hi<|end|><tool_call>")
    assert ids[:2] == [256, 258]
    assert ids[-2:] == [257, 260]
    assert ids.count(256) == 1
    assert TOKENIZER.encode_markup("hi") == TOKENIZER.encode("hi")  # no BOS of its own


def test_decoding_leaves_special_tokens_out_and_keeps_the_added_ones() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode_markup("<|user|>a<tool_call>b<|end|>")) == "a<tool_call>b"


def test_a_piece_is_one_token_with_its_control_tokens() -> None:
    assert [TOKENIZER.piece(id) for id in TOKENIZER.encode_markup("<|user|>a<|end|>")] == [
        "<|user|>",
        "a",
        "<|end|>",
    ]
    assert [BYTES.piece(id) for id in (256, 97, 0xC3)] == ["<|end|>", "a", "\ufffd"]


def test_a_piece_keeps_the_space_that_a_decoder_drops_at_the_start() -> None:
    pieces = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581the", -1.0), ("re", -1.0)], unk_id=0))
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="<end>"))
    assert [tokenizer.piece(id) for id in tokenizer.encode("there")] == [" the", "re"]


def test_eos_ids_are_a_tuple_with_what_the_generation_config_adds() -> None:
    assert TOKENIZER.eos_ids == (257,)
    assert HuggingFaceTokenizer(TOKENIZER.hf, extra_eos_ids=[259, 257]).eos_ids == (257, 259)


def test_an_unset_maximum_length_and_pad_equal_to_eos_are_harmless() -> None:
    assert TOKENIZER.hf.model_max_length > 1e29
    assert TOKENIZER.hf.pad_token_id == TOKENIZER.hf.eos_token_id
    assert len(TOKENIZER.encode("x" * 10_000)) == 10_000


def test_another_users_truncation_and_padding_do_not_reach_our_ids() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.hf(["a", "abcdef"], padding=True, truncation=True, max_length=3)
    assert len(tokenizer.encode("abcdef")) == 6


def test_both_satisfy_the_protocol() -> None:
    assert isinstance(TOKENIZER, TokenizerProtocol)
    assert isinstance(BYTES, TokenizerProtocol)


@pytest.mark.parametrize("kind", ["word", "unigram", "bpe-ignore-merges"])
def test_models_that_look_whole_words_up_do_not_find_control_tokens(kind: str) -> None:
    words = ["<unk>", "</s>", "<tool>", "hi", "▁", "<", ">", "/", "s", "t", "o", "l"]
    if kind == "word":
        raw = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    elif kind == "unigram":
        raw = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    else:
        vocab = {word: id for id, word in enumerate(words)}
        raw = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", ignore_merges=True))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(["</s>"])
    raw.add_tokens(["<tool>", "<later>"])
    tokenizer = HuggingFaceTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")
    )
    assert tokenizer.encode_markup("hi </s> <tool>") == [3, 1, 2]
    ids = tokenizer.encode("hi </s> <tool> <later>")
    assert not {1, 2, 12} & set(ids)
    assert ids[0] == 3


def test_an_eos_that_is_also_bos_and_unknown_token_stays_text_when_typed() -> None:
    """As GPT-2 has it: one token for all three, inside the model's own vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: id for id, symbol in enumerate([*alphabet, "<|endoftext|>"])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = "<|endoftext|>"
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end, bos_token=end, unk_token=end)
    tokenizer = HuggingFaceTokenizer(hf)
    assert tokenizer.encode_markup(f"a{end}")[1:] == [256]
    assert 256 not in tokenizer.encode(f"a{end}")
    assert tokenizer.eos_ids == (256,)


def test_whitespace_kept_as_added_tokens_stays_one_token_in_text() -> None:
    raw = Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.add_special_tokens(["<eos>"])
    raw.add_tokens(["    "])
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>"))
    assert tokenizer.encode("a    a") == [0, 3, 0]


@settings(max_examples=20)
@given(st.sampled_from(["<|end|>", "<|user|>"]))
def test_byte_markup_is_control_tokens(token: str) -> None:
    assert BYTES.encode_markup(f"a{token}b")[1] >= 256
    assert BYTES.decode(BYTES.encode_markup(f"a{token}b")) == "ab"
