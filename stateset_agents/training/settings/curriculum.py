"""The settings of a training that say what is played when, and what the parts of its rewards count."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings, expect_that

# Stages of a training, as settings have them: until when, with what weights, at what difficulty.

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
        hint = "let a penalty score below 0"
        expect_that(0 <= weight < math.inf, f"the weight of {name}", "be at least 0", weight, hint)
    if not any(weights.values()):
        raise ConfigurationError(f"at least one part needs a weight above 0, got {dict(weights)!r}")
    return dict(weights)


Weights = Annotated[dict[str, float], AfterValidator(_expect_weights)]
"""The weight of each part of a reward."""


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
        """The bounds of "easy", 3, or [easiest, hardest]. Raises ConfigurationError for anything else."""
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
        """True for a difficulty between the bounds; False for none, and for one of the other kind."""
        level = level_of(difficulty)
        return level is not None and level[0] == self.low[0] and self.low <= level <= self.high


def _expect_difficulty(value: object) -> object:
    if value is not None:
        DifficultyBounds.of(value)
    return value


Difficulty = Annotated[Any, AfterValidator(_expect_difficulty)]
"""A value that `DifficultyBounds.of` takes, or None for all."""


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
        """The condition of "format >= 0.95 for 3 steps". Raises ConfigurationError for anything else."""
        match = _CONDITION.fullmatch(text.strip())
        try:
            value = float(match["value"]) if match else math.nan
        except ValueError:  # 1.2.3
            value = math.nan
        steps = int(match["steps"] or 1) if match else 0
        if match is None or math.isnan(value) or steps < 1:
            raise ConfigurationError(f"a condition is such as {_EXAMPLE!r}, got {text!r:.60}")
        return cls(match["name"], match["sign"], value, steps)

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.value:g}"

    def read(self, metrics: Mapping[str, float]) -> float | None:
        """The value that a step has for it; None where it has none."""
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
    weights: Weights | None = None
    """Weight of each part of the reward; unset: `reward_weights`."""
    difficulty: Difficulty = None
    """Scenarios that it plays, by `difficulty` in their context: easy, 3, or [easy, medium], both included;
    unset: `difficulty` of the training."""

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
        """The condition it waits for; None where it ends with a step."""
        return Condition.parse(self.until) if isinstance(self.until, str) else None

    def last_step(self, num_steps: int) -> int | None:
        """The step that it ends with in a run of so many, the first at least; None for a condition, and for
        the last stage."""
        if self.until is None or isinstance(self.until, str):
            return None
        if isinstance(self.until, int):
            return self.until
        return max(1, round(self.until * num_steps))


class CurriculumSettings(Settings):
    """Order of the scenarios, sizes of groups, parts of the reward, stages; see docs/curriculum.md."""

    scenario_order: Literal["shuffled", "stratified", "success"] = "shuffled"
    """shuffled: every scenario once per epoch. stratified: the same, and each step has the strata in
    proportion. success: drawn by measured success p, as often as p(1 - p) says."""
    strata: str | tuple[str, ...] = "family"
    """Key by which scenarios are put into strata: their family, or a key of their context such as difficulty;
    or several of these, [family, side]: a stratum is then of those that are alike in all. For the orders
    stratified and success, and for group_sizes success."""
    difficulty: Difficulty = None
    """Scenarios that are played, by `difficulty` in their context: easy, 3, or [easy, medium], both
    included; those without one are not. Unset: all."""
    group_sizes: Literal["fixed", "difficulty", "success"] = "fixed"
    """fixed: num_generations. difficulty: times .75 where a scenario's context says easy, 1.5 where hard.
    success: 4 to 16 by measured success, so that more groups have both successes and failures, at as many
    conversations a step."""
    success_memory: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Share of what was measured of a scenario or stratum that is kept when it is measured again: the policy
    changes."""
    track_success: bool = False
    """Measure the success of every scenario that is played and keep it in the checkpoint, though nothing
    follows from it in this run: a memory of prompts for later domains is made of it."""
    replay_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the groups that play scenarios of earlier domains, those with `replayed: true` in their
    context, spread evenly over the run; 0: they are scenarios like any other."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Treatment of a reward of several parts: normalize_then_sum divides each part by its group's deviation
    before they are summed, and their sum by the step's (GDPO)."""
    reward_weights: Weights | None = None
    """Weight of each part of the reward's breakdown: the reward is their weighted sum, and parts without a
    weight count nothing. Unset: the reward's own score."""
    stages: tuple[Stage, ...] = ()
    """Parts of the run, one after the other, each with `until`, `weights` and `difficulty`."""

    @field_validator("strata", mode="before")
    @classmethod
    def _strata_are_named(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(map(_is_name, names)):
            raise ValueError("name family or a key of the scenarios' context, or several: [family, side]")
        return names[0] if len(names) == 1 else value  # one name, however it is written

    @model_validator(mode="after")
    def _memory_and_strata_are_used(self) -> Self:
        fields = CurriculumSettings.model_fields
        if self.success_memory != fields["success_memory"].default and not self.uses_success:
            raise ValueError(
                "success_memory is of measured success, which nothing here follows: leave it out, or set "
                "scenario_order or group_sizes to success, or track_success"
            )
        uses_strata = self.scenario_order == "stratified" or self.uses_success
        if self.strata != fields["strata"].default and not uses_strata:
            raise ValueError(
                f"strata {', '.join(self.strata_keys)} changes nothing in a shuffled order: leave it out, or "
                "set scenario_order to stratified or success"
            )
        return self

    @property
    def strata_keys(self) -> tuple[str, ...]:
        """The keys that `strata` names."""
        return (self.strata,) if isinstance(self.strata, str) else self.strata

    @property
    def uses_success(self) -> bool:
        """True where success is measured, because something follows from it or will in a later run."""
        return self.track_success or "success" in (self.scenario_order, self.group_sizes)

    def all_weights(self) -> list[dict[str, float]]:
        """Every set of weights that is named."""
        named = [self.reward_weights, *(stage.weights for stage in self.stages)]
        return [weights for weights in named if weights is not None]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
