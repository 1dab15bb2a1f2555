"""Thinking and answer told apart, in texts and in replies whose template reads thoughts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.core.chat.replies.parsing import HERMES
from stateset_agents.reasoning import Reasoned, answer_of, num_steps, read_reasoned, split_reasoning
from stateset_agents.types.messages import Message

TEXTS = {
    "<think>a</think><answer>b</answer>": ("a", "b"),
    "<think> a </think> <answer> b </answer>": ("a", "b"),
    "\n<think>\na\nb\n</think>\n\n<answer>\nc\n</answer>\n": ("a\nb", "c"),
    "<think></think><answer>b</answer>": ("", "b"),
    "<think>1 < 2 and 3 > 2</think><answer>b</answer>": ("1 < 2 and 3 > 2", "b"),
    "<think>é λ 中</think><answer>½</answer>": ("é λ 中", "½"),
    "<think>a</think><answer>x < 3</answer>": ("a", "x < 3"),
    "<think>an <answer in words</think><answer>b</answer>": ("an <answer in words", "b"),
    "": None,
    "b": None,
    "<answer>b</answer>": None,
    "<think>a</think>": None,
    "<think>a</think>b": None,
    "<think>a<answer>b</answer>": None,
    "<think>a</think><answer>b": None,
    "a</think><answer>b</answer>": None,
    "<answer>b</answer><think>a</think>": None,
    "<think>a<answer>b</answer></think>": None,
    "<think>a</think><answer></answer>": None,
    "<think>a</think><answer> \n </answer>": None,
    "Sure! <think>a</think><answer>b</answer>": None,
    "<think>a</think> so <answer>b</answer>": None,
    "<think>a</think><answer>b</answer> I think.": None,
    "<think>a</think><think>a</think><answer>b</answer>": None,
    "<think>a<think>b</think><answer>c</answer>": None,
    "<think>a</think></think><answer>b</answer>": None,
    "<think>a</think><answer>b</answer><answer>b</answer>": None,
    "<think>a</think><answer>b<answer>c</answer></answer>": None,
    "<think>write <answer>1</answer></think><answer>b</answer>": None,
    "<think>a</think><answer><think>b</think></answer>": None,
    "<THINK>a</THINK><ANSWER>b</ANSWER>": None,
    "< think>a</think><answer>b</answer>": None,
    "<think>a</answer><answer>b</think>": None,
}


@pytest.mark.parametrize(("text", "parts"), TEXTS.items())
def test_one_thought_then_one_answer_is_the_format(text: str, parts: tuple[str, str] | None) -> None:
    assert split_reasoning(text) == (None if parts is None else Reasoned(*parts))


@pytest.mark.parametrize(("text", "parts"), TEXTS.items())
def test_a_reply_whose_thoughts_are_read_out_is_judged_as_its_text(
    text: str, parts: tuple[str, str] | None
) -> None:
    assert read_reasoned(HERMES.read(text)) == split_reasoning(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    {
        "a</think><answer>b</answer>": Reasoned("a", "b"),
        "\n</think>\n<answer>b</answer>": Reasoned("", "b"),
        "<think>a</think><answer>b</answer>": None,
        "a<answer>b</answer>": None,
        "a</think></think><answer>b</answer>": None,
        "<answer>b</answer></think>": None,
    }.items(),
)
def test_a_thought_that_the_prompt_has_opened_needs_no_tag(text: str, parts: Reasoned | None) -> None:
    assert split_reasoning(text, prefilled=True) == parts


def test_a_message_remembers_that_it_thought_twice_late_or_without_an_end() -> None:
    late = [
        "<answer>b</answer><think>a</think>",
        "<think>a</think><think>c</think><answer>b</answer>",
        "<think>a",
    ]
    for text in late:
        message = HERMES.read(text)
        assert not message.thinks_first
        assert not Message.from_record(message.to_record()).thinks_first
    assert HERMES.read("<think>a</think>b").thinks_first
    assert "thinks_first" not in HERMES.read("<think>a</think>b").to_record()


@pytest.mark.parametrize(
    ("text", "answer"),
    {
        "<think>a</think><answer> 5 </answer>": "5",
        "<answer>5</answer>": "5",
        "so <answer>5</answer>.": "5",
        "<answer>5</answer><think>a</think>": None,
        "<think>a</think><think>b</think><answer>5</answer>": None,
        "so <think>a</think><answer>5</answer>": None,
        "<think></think><answer>5</answer>": "5",
        "5": None,
        "<answer>5": None,
        "<answer></answer>": None,
        "</answer>5<answer>": None,
        "<answer>5</answer><answer>6</answer>": None,
        "<think><answer>5</answer></think>": None,
        "<think><answer>5</answer></think><answer>6</answer>": None,
        "<think><answer>5</answer>": None,
    }.items(),
)
def test_an_answer_is_found_where_there_is_exactly_one(text: str, answer: str | None) -> None:
    assert answer_of(Message(role="assistant", content=text)) == answer
    assert answer_of(HERMES.read(text)) == answer


@pytest.mark.parametrize(
    ("thinking", "steps"),
    {
        "": 0,
        " = . ; \n": 0,
        "13": 1,
        "2 + 12 - 1 = 14 - 1 = 13": 3,
        "2 + 12 - 1 = 14 - 1 =": 2,
        "3 x = 15; x = 5": 2,
        "first 2 + 3 = 5\nthen 5 * 2 = 10\n": 2,
        "I add. I check! Is it 3.5? Yes": 4,
    }.items(),
)
def test_steps_are_lines_sentences_clauses_or_links_of_a_chain(thinking: str, steps: int) -> None:
    assert num_steps(thinking) == steps


@given(st.text(max_size=200), st.text(min_size=1, max_size=50).filter(str.strip))
def test_what_is_written_in_the_format_is_read_back(thinking: str, answer: str) -> None:
    split = split_reasoning(f"<think>{thinking}</think><answer>{answer}</answer>")
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(tag in text for tag in tags for text in (thinking, answer)):
        assert split is None
    else:
        assert split == Reasoned(thinking.strip(), answer.strip())


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]), max_size=12)
)
def test_any_order_of_tags_is_judged_alike_with_and_without_a_template_that_reads_thoughts(
    parts: list[str],
) -> None:
    text = "".join(parts)
    assert read_reasoned(HERMES.read(text)) == split_reasoning(text)
    assert answer_of(HERMES.read(text)) == answer_of(Message(role="assistant", content=text))


def test_long_texts_take_time_in_proportion() -> None:
    def seconds(size: int) -> float:
        texts = ["<think>" * size, "<think>" + "<" * size, "</answer><answer>" * size, " = ;\n" * size]
        begun = time.process_time()
        for text in texts:
            split_reasoning(text)
            answer_of(Message(role="assistant", content=text))
            num_steps(text)
        return time.process_time() - begun

    assert seconds(200_000) < 40 * max(seconds(20_000), 0.005)
