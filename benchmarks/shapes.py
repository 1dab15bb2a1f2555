"""The work that every side is given: words, requests, scores. Made from a seed, standard library only.

Workers import it in whatever environment they run in, so that all sides see the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|unknown|>")
"""The first ids of every vocabulary; the models never sample one of them."""
END = SPECIAL.index("<|end|>")
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
MARKUP = 3
"""Tokens that the template writes around one user message: <|user|> ... <|end|><|assistant|>."""
DELTA_MARKUP = 4
"""Between two turns of the agent: <|end|><|user|> ... <|end|><|assistant|>, its own end token included."""


class Request(NamedTuple):
    """One prompt, and how many tokens are to follow it."""

    ids: list[int]
    reply: int


def words(stream: random.Random, count: int, vocabulary: int) -> list[int]:
    """Ids of `count` plain words."""
    return [stream.randrange(len(SPECIAL), vocabulary) for _ in range(count)]


def text(ids: Sequence[int]) -> str:
    """The words as text; every one is one token."""
    return " ".join(f"w{token}" for token in ids)


def requests(
    seed: int, *, count: int, vocabulary: int, prompt: tuple[int, int], reply: tuple[int, int]
) -> list[Request]:
    """Prompts and replies of any length between two bounds."""
    stream = random.Random(seed)
    return [
        Request(words(stream, stream.randint(*prompt), vocabulary), stream.randint(*reply))
        for _ in range(count)
    ]


def lognormal(stream: random.Random, mean: float) -> float:
    """Seconds, lognormal with sigma 0.8: most are short, a few take several times the mean."""
    sigma = 0.8
    return mean * stream.lognormvariate(-sigma * sigma / 2, sigma)


def score(reply: str) -> float:
    """Share of even words: members of a group differ, so no advantage is always 0."""
    numbers = [int(word[1:]) for word in reply.split() if word[:1] == "w" and word[1:].isdigit()]
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))
