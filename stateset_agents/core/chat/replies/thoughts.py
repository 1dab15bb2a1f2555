"""Tells thinking and answer of a reply apart. Rewards, problems and distillation call it.

<think> 2 + 12 - 1 = 14 - 1 = 13 </think> <answer> 13 </answer>

The format is DeepSeek-R1-Zero's (https://arxiv.org/abs/2501.12948, table 1). What went wrong with it
elsewhere are the rules here: several blocks that each earn the format, a tag that the template has opened,
blocks that are never closed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stateset_agents.types.messages import Message

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BETWEEN_CLAUSES = re.compile(r"[\n;]|[.!?]\s")
_WORD = re.compile(r"\w")


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A reply in the format, white space at the ends of both parts taken off."""

    thinking: str
    """The thought; it may be empty: whether that is enough is for the reward to say."""
    answer: str
    """Never empty."""


def split_reasoning(text: str, *, prefilled: bool = False) -> Reasoned | None:
    """Thinking and answer of a text in the format; None for any other text.

    >>> split_reasoning("<think> 2 + 3 = 5 </think> <answer> 5 </answer>")
    Reasoned(thinking='2 + 3 = 5', answer='5')

    There is exactly one thought and one answer, in this order, with nothing but white space around them and
    no tag of the format within them. `prefilled`: the prompt has opened the thought, as its template does for
    every reply, so that the text begins inside of it. Takes time in proportion to the text's length.
    """
    tags = _TAGS[1:] if prefilled else _TAGS
    if any(text.count(tag) != (tag in tags) for tag in _TAGS):
        return None
    parts: list[str] = []
    for tag in tags:
        part, separator, text = text.partition(tag)
        if not separator:  # it stands before the tag that must come first
            return None
        parts.append(part)
    thinking, between, answer = parts if prefilled else parts[1:]
    outside = [between, text] if prefilled else [parts[0], between, text]
    if any(part.strip() for part in outside) or not answer.strip():
        return None
    return Reasoned(thinking.strip(), answer.strip())


def read_reasoned(message: Message) -> Reasoned | None:
    """`split_reasoning` for a reply, whether its agent's template has read the thought out of it or not."""
    if message.reasoning is None:
        return split_reasoning(message.content)
    if not message.thinks_first:
        return None
    return split_reasoning(f"{message.reasoning}</think>{message.content}", prefilled=True)


def answer_of(message: Message) -> str | None:
    """The text between the tags of the answer, though the rest of the reply may not be in the format.

    None without an answer, with several, with one in a thought, and where a thought stands anywhere but at
    the beginning: what cannot be told is not guessed.
    """
    words = words_of(message)
    thought = message.reasoning or ""
    if words is None or any(f"{thought}{message.content}".count(tag) != 1 for tag in _TAGS[2:]):
        return None
    _, separator, rest = words.partition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return (answer.strip() or None) if separator and closed else None


def words_of(message: Message) -> str | None:
    """The words of a reply behind its thought; None where it thinks twice, late, or without an end."""
    if message.reasoning is not None:
        is_one = message.thinks_first and not any(tag in message.reasoning for tag in _TAGS[:2])
        return message.content if is_one else None
    text = message.content
    counts = [text.count(tag) for tag in _TAGS[:2]]
    if counts == [0, 0]:
        return text
    if counts != [1, 1] or not text.lstrip().startswith("<think>"):
        return None
    return text.partition("</think>")[2]


def num_steps(thinking: str) -> int:
    """The number of steps of a thought: its lines, sentences and clauses; of a single chain of equations its
    links.

    >>> num_steps("2 + 12 - 1 = 14 - 1 = 13")
    3
    >>> num_steps("3 x = 15; x = 5")
    2

    What holds no letter or digit is no step. It tells how long somebody thought, not how well.
    """
    clauses = [clause for clause in _BETWEEN_CLAUSES.split(thinking) if _WORD.search(clause)]
    if len(clauses) == 1:
        return sum(1 for link in clauses[0].split("=") if _WORD.search(link))
    return len(clauses)
