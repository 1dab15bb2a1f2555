"""Replies of scripted solvers: the whole way to the answer, or the same with bad habits, for
demonstrations."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.settings import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A problem solved in writing."""

    steps: tuple[str, ...]
    answer: str
    between: str = "\n"
    """Stands between two steps."""


HABITS = ("careful", "skips", "empty", "bare")
"""Every step; some of the steps; no thought; the answer alone, without tags."""


def reply_of(trace: Trace, habit: str, rng: random.Random) -> Message:
    """The reply of a solver with this habit. Its thought stands apart, and each template frames it its way.

    >>> trace = Trace(steps=("2 + 12", "14"), answer="14", between=" = ")
    >>> reply = reply_of(trace, "careful", random.Random(0))
    >>> reply.reasoning, reply.content
    ('2 + 12 = 14', '<answer> 14 </answer>')
    """
    if habit == "bare":
        return Message(role="assistant", content=trace.answer)
    steps: Sequence[str] = trace.steps
    if habit == "skips":
        kept = [step for step in steps if rng.random() < 0.5]
        steps = kept if 0 < len(kept) < len(steps) else steps[-1:]
    thinking = "" if habit == "empty" else trace.between.join(steps)
    return Message(role="assistant", content=f"<answer> {trace.answer} </answer>", reasoning=thinking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """A scripted agent that answers the one problem it was made for."""

    message: Message

    @property
    def text(self) -> str:
        """The reply as one text in the format."""
        thought = self.message.reasoning
        return (
            self.message.content if thought is None else f"<think> {thought} </think> {self.message.content}"
        )

    def reply(self, messages: Sequence[Message]) -> Message:
        """The same whatever was said."""
        return self.message


def check_habits(habits: Mapping[str, float]) -> None:
    """Raises ConfigurationError for shares of no habit, or of an unknown one."""
    if not isinstance(habits, Mapping):
        raise ConfigurationError(
            f"habits must be shares, such as {{careful: 0.3, empty: 0.7}}, got {habits!r:.60}"
        )
    for name, share in habits.items():
        if name not in HABITS:
            raise ConfigurationError(
                f"habits has no {name!r}{nearest(str(name), HABITS)}: there are {', '.join(HABITS)}"
            )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise ConfigurationError(f"the share of habit {name!r} must be a number from 0 on, got {share!r}")
    if not sum(habits.values()):
        raise ConfigurationError("all habits have the share 0: give one a share, such as careful: 1.0")


def choose_habit(habits: Mapping[str, float], rng: random.Random) -> str:
    """One of them, by their shares."""
    return rng.choices(list(habits), weights=list(habits.values()))[0]
