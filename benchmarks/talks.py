"""Conversations made from a seed: their shape, and their tokens where a side is given them ready-made.

Workers import it in whatever environment they run in. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.shapes import DELTA_MARKUP, END, MARKUP, SPECIAL, lognormal, score, text, words

_USER, _ASSISTANT = SPECIAL.index("<|user|>"), SPECIAL.index("<|assistant|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """The conversations of one step; lengths are in tokens, markup included."""

    vocabulary: int
    scenarios: int
    group: int
    """Conversations of one scenario: they share opening and user."""
    prompt: int
    reply: int
    """Sampled tokens of one turn of the agent."""
    turns: int = 1
    delta: int = 0
    """What stands between two turns of the agent."""
    shortest_reply: int | None = None
    """Of conversations that are given; unset: all replies have `reply` tokens."""
    wait: float = 0.0
    """Mean seconds that the tools of one turn take."""
    seed: int = 0

    @property
    def rows(self) -> int:
        """Conversations in all."""
        return self.scenarios * self.group

    def opening(self, scenario: int) -> str:
        """The user's first message."""
        stream = random.Random(f"opening {self.seed} {scenario}")
        return text(words(stream, self.prompt - MARKUP, self.vocabulary))

    def user_words(self, scenario: int) -> list[str]:
        """What the user says after each turn of the agent but the last."""
        stream = random.Random(f"user {self.seed} {scenario}")
        return [
            text(words(stream, self.delta - DELTA_MARKUP, self.vocabulary)) for _ in range(self.turns - 1)
        ]

    def waits(self, row: int) -> list[float]:
        """Seconds that the tools of one conversation take in each of its turns."""
        if not self.wait:
            return [0.0] * self.turns
        stream = random.Random(f"waits {self.seed} {row}")
        return [lognormal(stream, self.wait) for _ in range(self.turns)]

    def requests(self, round: int = 0) -> list[Talk]:
        """Whole conversations, others in each round, so that nothing is cached from the last."""
        talks = []
        for scenario in range(self.scenarios):
            stream = random.Random(f"given {self.seed} {round} {scenario}")
            opening = [_USER, *words(stream, self.prompt - MARKUP, self.vocabulary), END, _ASSISTANT]
            deltas = [
                [END, _USER, *words(stream, self.delta - DELTA_MARKUP, self.vocabulary), END, _ASSISTANT]
                for _ in range(self.turns - 1)
            ]
            for member in range(self.group):
                lengths = [
                    stream.randint(self.shortest_reply or self.reply, self.reply) for _ in range(self.turns)
                ]
                replies = [words(stream, length, self.vocabulary) for length in lengths]
                parts = list(zip([opening, *deltas], replies, strict=True))
                talks.append(Talk(scenario=scenario, member=member, parts=parts))
        return talks


def talks(job: Mapping[str, Any]) -> Talks:
    """The shape in a worker's job."""
    return Talks(**job["talks"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """One conversation with all its tokens."""

    scenario: int
    member: int
    parts: list[tuple[list[int], list[int]]]
    """(prompt or delta, reply) of each turn."""

    @property
    def ids(self) -> list[int]:
        return [token for delta, reply in self.parts for token in (*delta, *reply)]

    @property
    def mask(self) -> list[int]:
        """1 on the agent's tokens."""
        return [bit for delta, reply in self.parts for bit in (*[0] * len(delta), *[1] * len(reply))]

    @property
    def reward(self) -> float:
        return score(" ".join(text(reply) for _, reply in self.parts))

    def history(self, turn: int) -> list[int]:
        """All ids before the agent's turn number `turn`."""
        before = [token for delta, reply in self.parts[:turn] for token in (*delta, *reply)]
        return [*before, *self.parts[turn][0]]
