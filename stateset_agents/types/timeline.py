"""What a conversation did when, recorded by the episode and the engine for the run's timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

Doing = Literal["environment", "waiting", "model", "reward"]
"""environment: its user, tools or outcome. waiting: a requested turn that has not begun, because the model
serves others or, with deterministic scheduling, waits for them. model: a turn is sampled. reward: scoring,
which waits for the whole group."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a conversation's time."""

    doing: Doing
    begin: float
    """Seconds of `time.monotonic()`."""
    end: float


class Stopwatch:
    """Divides the time of one conversation into spans without gaps."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._since = time.monotonic()

    @property
    def spans(self) -> tuple[Span, ...]:
        """In order."""
        return tuple(self._spans)

    def lap(self, doing: Doing, until: float | None = None) -> None:
        """Assign the time since the last lap, up to now or `until`."""
        end = max(self._since, time.monotonic() if until is None else until)
        if self._spans and self._spans[-1].doing == doing:
            self._spans[-1] = Span(doing, self._spans[-1].begin, end)
        elif end > self._since:
            self._spans.append(Span(doing, self._since, end))
        self._since = end

    def turn(self, begun: float | None) -> None:
        """The agent's turn is complete; `begun` is when the model began it, if the backend knows."""
        if begun is not None:
            self.lap("waiting", begun)
        self.lap("model")
