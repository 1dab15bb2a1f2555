"""The embedded model's tokenizer: exact round trips, and one token per word wherever the word stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.embedded.tokenizer import build_tokenizer

TEXTS = [
    "hello, i want to send order K27 to oslo.",
    '{"name": "update_address", "arguments": {"order_id": "K27", "city": "oslo"}}',
    '{"order_id": "K27", "days": "14"}',
    "it came 14 days ago, so i can't.",
]
TOKENIZER = build_tokenizer(TEXTS)


@given(st.text())
def test_any_text_comes_back_exactly(text: str) -> None:
    ids = TOKENIZER.encode(text, split_special_tokens=True)
    assert TOKENIZER.decode(ids) == text


@given(st.text(alphabet=st.sampled_from("\"$#( [K27o_s'{:,.\n\ue000\ue001é"), max_size=12))
def test_text_made_of_joiners_quotes_and_spaces_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("word", ["oslo", "K27", "14", "came"])
def test_a_word_has_the_same_tokens_in_json_and_in_prose(word: str) -> None:
    prose = TOKENIZER.encode(f"to {word}.")
    inside = TOKENIZER.encode(f'{{"to": "{word}"}}')
    wanted = TOKENIZER.encode(f" {word}")
    assert len(wanted) == (2 if word == "K27" else 1)

    def holds(ids: list[int]) -> bool:
        return any(ids[start : start + len(wanted)] == wanted for start in range(len(ids)))

    assert holds(prose)
    assert holds(inside)


def test_every_order_id_is_a_letter_and_a_pair_of_digits() -> None:
    ids = {
        TOKENIZER.decode(TOKENIZER.encode(f"order {letter}{number:02d}")[-2:])
        for letter in "AZ"
        for number in (0, 99)
    }
    assert ids == {" A00", " A99", " Z00", " Z99"}
    assert len(TOKENIZER.encode(" Q63")) == 2


def test_the_template_only_appends_and_marks_what_the_agent_says() -> None:
    talk = [
        {"role": "system", "content": "desk"},
        {"role": "user", "content": "send order K27 to oslo."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "get_order", "arguments": {"order_id": "K27"}}}
            ],
        },
        {"role": "tool", "content": '{"order_id": "K27"}'},
        {"role": "assistant", "content": "hello."},
    ]
    before = TOKENIZER.apply_chat_template(talk[:2], tokenize=False, add_generation_prompt=True)
    text = TOKENIZER.apply_chat_template(talk, tokenize=False)
    assert text == (
        "<|system|>desk<|end|><|user|>send order K27 to oslo.<|end|>"
        '<|assistant|><tool_call>{"name": "get_order", "arguments": {"order_id": "K27"}}</tool_call><|end|>'
        '<|tool|>{"order_id": "K27"}<|end|><|assistant|>hello.<|end|>'
    )
    assert text.startswith(before)
    marked = TOKENIZER.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    sampled = [
        token for token, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask
    ]
    assert TOKENIZER.decode(sampled) == (
        '<tool_call>{"name": "get_order", "arguments": {"order_id": "K27"}}</tool_call><|end|>hello.<|end|>'
    )


def test_arguments_may_be_openai_s_json_string() -> None:
    call = {"type": "function", "function": {"name": "get_order", "arguments": '{"order_id": "K27"}'}}
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        tokenize=False,
    )
    assert '{"name": "get_order", "arguments": {"order_id": "K27"}}</tool_call>' in text
