"""The text of a turn comes in pieces that never change, and stops at a stop string wherever tokens end."""

from __future__ import annotations

import random

import pytest
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stateset_agents.backends.base import Tokenizer as Encoder
from stateset_agents.backends.pretrained.loading import model_folder
from stateset_agents.backends.tokenizers import ByteTokenizer, HuggingFaceTokenizer, TurnText, cut

ALPHABET = [
    "a",
    "b",
    " ",
    '"',
    "é",
    "e\u0301",
    "שלום",
    "👩‍👩‍👧",
    "日本",
    "\ufffd",
    "\n",
    "\ue000",
    "word ",
    '"K27"',
]


def embedded() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(model_folder("embedded:desk")))


def sentencepiece() -> HuggingFaceTokenizer:
    """Words with their space in front, bytes for the rest, as in Llama 2."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "b", "▁", "a"]
    raw = Tokenizer(models.BPE(vocab={w: n for n, w in enumerate(words)}, merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return HuggingFaceTokenizer(hf)


def stream(tokenizer: Encoder, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str, int]:
    """The pieces, the final text, and after how many tokens it stopped."""
    pieces: list[str] = []
    text = TurnText(tokenizer, stop, pieces.append)
    taken = next((n for n, token in enumerate(ids, 1) if text.add(token)), len(ids))
    return pieces, text.finish(ids[:taken]), taken


@pytest.mark.parametrize("make", [ByteTokenizer, tiny_tokenizer, embedded])
def test_control_tokens_stand_in_the_text_where_they_are_asked_for(make) -> None:
    tokenizer: Encoder = make()
    text = "é <|assistant|>so, 日本<|user|> ok"
    ids = tokenizer.encode_markup(text)
    pieces: list[str] = []
    turn = TurnText(tokenizer, ("ok",), pieces.append, end_ids=tokenizer.eos_ids, skip_special_tokens=False)
    assert [turn.add(token) for token in ids].index(True) == len(ids) - 1
    said = turn.finish([*ids, tokenizer.eos_ids[0]])
    assert said == "".join(pieces) == text.removesuffix("ok")
    plain = TurnText(tokenizer, (), end_ids=tokenizer.eos_ids).finish([*ids, tokenizer.eos_ids[0]])
    assert plain == tokenizer.decode(ids)


@pytest.mark.first(1)
@pytest.mark.parametrize("make", [ByteTokenizer, tiny_tokenizer, embedded, sentencepiece])
def test_pieces_laid_end_to_end_are_the_decoded_text(make) -> None:
    tokenizer, draw = make(), random.Random(0)
    for _ in range(60):
        text = "".join(draw.choice(ALPHABET) for _ in range(draw.randint(0, 120)))
        pieces, final, _ = stream(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == final == tokenizer.decode(tokenizer.encode(text))
        assert "" not in pieces


@pytest.mark.parametrize("make", [ByteTokenizer, tiny_tokenizer, embedded])
def test_any_tokens_at_all_lay_end_to_end(make) -> None:
    tokenizer, draw = make(), random.Random(1)
    for _ in range(60):
        ids = [draw.randrange(260) for _ in range(draw.randint(0, 300))]
        pieces, final, _ = stream(tokenizer, ids)
        assert "".join(pieces) == final == tokenizer.decode(ids)


def test_no_piece_ends_inside_a_character() -> None:
    pieces, _, _ = stream(ByteTokenizer(), list("né👩🏽x".encode()))
    assert pieces == ["n", "é", "👩", "🏽", "x"]


def test_a_piece_comes_at_most_one_token_late() -> None:
    pieces: list[str] = []
    text = TurnText(ByteTokenizer(), (), pieces.append)
    for number, token in enumerate(b"hello", 1):
        text.add(token)
        assert "".join(pieces) == "hello"[: number - 1]
    assert text.finish(b"hello") == "".join(pieces) == "hello"


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    pieces, final, taken = stream(ByteTokenizer(), list(b"a\nus\nuse\nuser: no"), ("\nuser:",))
    assert (final, taken) == ("a\nus\nuse", len("a\nus\nuse\nuser:"))
    assert pieces == ["a", "\nus", "\nuse"]
    assert stream(ByteTokenizer(), list(b"end\nuse"), ("\nuser:",))[1] == "end\nuse"


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("bc", "abcd"), "xxabbcd", "xxab"),
        (("aab",), "aaab!", "a"),
        (("é",), "caféé", "caf"),
        (("👧",), "x👩‍👩‍👧 y", "x👩‍👩‍"),
        (("a",), "abc", ""),
    ],
)
def test_the_text_ends_before_the_first_stop_string(stop: tuple[str, ...], text: str, expected: str) -> None:
    pieces, final, _ = stream(tiny_tokenizer(), tiny_tokenizer().encode(text), stop)
    assert "".join(pieces) == final == expected == cut(text, stop)


def test_a_stop_string_is_found_wherever_the_tokens_end() -> None:
    tokenizer, draw = embedded(), random.Random(2)
    for _ in range(200):
        text = "".join(draw.choice(ALPHABET) for _ in range(150))
        stop = tuple(text[(start := draw.randrange(140)) : start + draw.randint(1, 9)] for _ in range(2))
        ids = tokenizer.encode(text)
        pieces, final, taken = stream(tokenizer, ids, stop)
        text_of_all = tokenizer.decode(ids)
        if all(string.strip("\ufffd") for string in stop) and any(string in text_of_all for string in stop):
            assert any(string in tokenizer.decode(ids[:taken]) for string in stop)
            assert text_of_all.startswith(final)
        assert "".join(pieces) == final == cut(tokenizer.decode(ids[:taken]), stop)
