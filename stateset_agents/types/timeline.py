"""When a conversation did what: the episode and the engine take it down, the run's timeline shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

__all__ = ["Doing", "Span", "Stopwatch"]

Doing = Literal["environment", "waiting", "model", "reward"]
"""Its user, its tools or its verdict; a turn that was asked for and not begun, because the model was with
others or, with deterministic scheduling, waited for them; a turn that was being sampled; its scoring, which
waits for all of the group."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a conversation's time."""

    doing: Doing
    begin: float
    """Seconds of `time.monotonic()`."""
    end: float


class Stopwatch:
    """Lays the time of one conversation out in spans without gaps."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._since = time.monotonic()

    @property
    def spans(self) -> tuple[Span, ...]:
        """In order."""
        return tuple(self._spans)

    def lap(self, doing: Doing, until: float | None = None) -> None:
        """What the time since the last lap went into, up to now unless said otherwise."""
        end = max(self._since, time.monotonic() if until is None else until)
        if self._spans and self._spans[-1].doing == doing:
            self._spans[-1] = Span(doing, self._spans[-1].begin, end)
        elif end > self._since:
            self._spans.append(Span(doing, self._since, end))
        self._since = end

    def turn(self, begun: float | None) -> None:
        """The agent's turn is here; `begun` is when the model took it up, where its backend knows."""
        if begun is not None:
            self.lap("waiting", begun)
        self.lap("model")
