"""Stages of a training, as settings have them: until when, with what weights, at what difficulty."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings

LABELS = ("easy", "medium", "hard")
"""Difficulties that are words, in order."""
_COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(
    r"(?P<name>[^\s<>=]+)\s*(?P<sign>[<>]=?)\s*(?P<value>-?[0-9.]+)(\s+for\s+(?P<steps>[0-9]+)\s+steps?)?"
)
_EXAMPLE = "format >= 0.95 for 3 steps"


def _expect_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights. Raises ConfigurationError for one below 0 or no number, and where none is above 0."""
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ConfigurationError(
                f"the weight of {name} must be at least 0, got {weight!r}: let a penalty score below 0"
            )
    if not any(weights.values()):
        raise ConfigurationError(f"at least one part needs a weight above 0, got {dict(weights)!r}")
    return dict(weights)


Weights = Annotated[dict[str, float], AfterValidator(_expect_weights)]
"""What each part of a reward counts."""


def level_of(value: object) -> tuple[bool, float] | None:
    """A difficulty as something to compare, words apart from numbers: easy < medium < hard, 1 < 2.5.

    None for what is neither.
    """
    if isinstance(value, str) and value.lower() in LABELS:
        return True, float(LABELS.index(value.lower()))
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return False, float(value)
    return None


@dataclass(frozen=True, slots=True)
class DifficultyBounds:
    """The easiest and the hardest difficulty that is played, both included."""

    low: tuple[bool, float]
    high: tuple[bool, float]

    @classmethod
    def of(cls, value: object) -> DifficultyBounds:
        """From "easy", 3, or [easiest, hardest]. Raises ConfigurationError for anything else."""
        pair = list(value) if isinstance(value, list | tuple) else [value, value]
        levels = [level_of(bound) for bound in pair]
        low, high = levels if len(levels) == 2 else (None, None)
        if low is None or high is None or low[0] != high[0] or low > high:
            raise ConfigurationError(
                f"a difficulty is {', '.join(LABELS)}, a number, or two of a kind such as [easy, medium], "
                f"the easier first, got {value!r:.60}"
            )
        return cls(low, high)

    def has(self, difficulty: object) -> bool:
        """Does it lie between the bounds? What has no difficulty, or one of the other kind, does not."""
        level = level_of(difficulty)
        return level is not None and level[0] == self.low[0] and self.low <= level <= self.high


def _expect_difficulty(value: object) -> object:
    if value is not None:
        DifficultyBounds.of(value)
    return value


Difficulty = Annotated[Any, AfterValidator(_expect_difficulty)]
"""What `DifficultyBounds.of` takes, or None for all."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison that ends a stage once it has held for some steps in a row."""

    name: str
    """A metric of the step, or a part of the reward."""
    sign: str
    value: float
    steps: int

    @classmethod
    def parse(cls, text: str) -> Condition:
        """From "format >= 0.95 for 3 steps". Raises ConfigurationError for anything else."""
        found = _CONDITION.fullmatch(text.strip())
        try:
            value = float(found["value"]) if found else math.nan
        except ValueError:  # 1.2.3
            value = math.nan
        steps = int(found["steps"] or 1) if found else 0
        if found is None or math.isnan(value) or steps < 1:
            raise ConfigurationError(f"a condition is such as {_EXAMPLE!r}, got {text!r:.60}")
        return cls(found["name"], found["sign"], value, steps)

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value:g}"

    def read(self, metrics: Mapping[str, float]) -> float | None:
        """What a step says of it; None where it says nothing."""
        return metrics.get(self.name, metrics.get(f"reward/{self.name}"))

    def holds(self, value: float) -> bool:
        return _COMPARED[self.sign](value, self.value)


class Stage(Settings):
    """A part of a training with weights and a difficulty of its own."""

    until: int | float | str | None = Field(
        default=None,
        description="The step that it ends with (5000), the share of the run (0.1), or a condition on a "
        f"metric or a part of the reward ({_EXAMPLE}). The last stage has none.",
    )
    weights: Weights | None = Field(
        default=None, description="What each part of the reward counts; unset: `reward_weights`."
    )
    difficulty: Difficulty = Field(
        default=None,
        description="Which scenarios it plays, by `difficulty` in their context: easy, 3, or [easy, medium], "
        "both included; unset: `difficulty` of the training.",
    )

    @field_validator("until", mode="before")
    @classmethod
    def _is_an_end(cls, until: object) -> object:
        if isinstance(until, str):
            Condition.parse(until)
        elif isinstance(until, float) and not 0 < until < 1:
            raise ConfigurationError(
                f"a share of the run lies between 0 and 1, got {until!r}: write steps without a dot"
            )
        elif isinstance(until, bool) or (isinstance(until, int) and until < 1):
            raise ConfigurationError(f"a stage ends after a step from 1 on, got {until!r}")
        return until

    @property
    def condition(self) -> Condition | None:
        """What it waits for; None where it ends with a step."""
        return Condition.parse(self.until) if isinstance(self.until, str) else None

    def last_step(self, num_steps: int) -> int | None:
        """The step that it ends with in a run of so many, the first at least; None for a condition, and for
        the last stage."""
        if self.until is None or isinstance(self.until, str):
            return None
        if isinstance(self.until, int):
            return self.until
        return max(1, round(self.until * num_steps))
