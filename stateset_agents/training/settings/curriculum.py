"""The settings of a training that say what is played when, and what the parts of its rewards count."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from stateset_agents.training.settings.stages import Difficulty, Stage, Weights
from stateset_agents.types.settings import Settings


class CurriculumSettings(Settings):
    """Order of the scenarios, sizes of groups, parts of the reward, stages; see docs/curriculum.md."""

    scenario_order: Literal["shuffled", "stratified", "success"] = Field(
        default="shuffled",
        description="shuffled: every scenario once per epoch. stratified: the same, and each step has the "
        "strata in proportion. success: drawn by measured success p, as often as p(1 - p) says.",
    )
    strata: str | tuple[str, ...] = Field(
        default="family",
        description="What tells scenarios of a stratum: their family, or a key of their context such as "
        "difficulty; or several of these, [family, side]: a stratum is then of those that are alike in all. "
        "For the orders stratified and success, and for group_sizes success.",
    )
    difficulty: Difficulty = Field(
        default=None,
        description="Which scenarios are played, by `difficulty` in their context: easy, 3, or "
        "[easy, medium], both included; those without one are not. Unset: all.",
    )
    group_sizes: Literal["fixed", "difficulty", "success"] = Field(
        default="fixed",
        description="fixed: num_generations. difficulty: times .75 where a scenario's context says easy, 1.5 "
        "where hard. success: 4 to 16 by measured success, so that more groups have both successes and "
        "failures, at as many conversations a step.",
    )
    success_memory: float = Field(
        default=0.5,
        ge=0.0,
        lt=1.0,
        description="Share of what was measured of a scenario or stratum that is kept when it is measured "
        "again: the policy changes.",
    )
    track_success: bool = Field(
        default=False,
        description="Measure the success of every scenario that is played and keep it in the checkpoint, "
        "though nothing follows from it in this run: a memory of prompts for later domains is made of it.",
    )
    replay_share: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the groups that play scenarios of earlier domains, those with `replayed: true` "
        "in their context, spread evenly over the run; 0: they are scenarios like any other.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="Of a reward of several parts: normalize_then_sum divides each part by its group's "
        "deviation before they are summed, and their sum by the step's (GDPO).",
    )
    reward_weights: Weights | None = Field(
        default=None,
        description="What each part of the reward's breakdown counts: the reward is their weighted sum, and "
        "parts without a weight count nothing. Unset: the reward's own score.",
    )
    stages: tuple[Stage, ...] = Field(
        default=(),
        description="Parts of the run, one after the other, each with `until`, `weights` and `difficulty`.",
    )

    @field_validator("strata", mode="before")
    @classmethod
    def _strata_are_named(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(map(_is_name, names)):
            raise ValueError("name family or a key of the scenarios' context, or several: [family, side]")
        return names[0] if len(names) == 1 else value  # one name, however it is written

    @property
    def strata_keys(self) -> tuple[str, ...]:
        """What `strata` names."""
        return (self.strata,) if isinstance(self.strata, str) else self.strata

    @property
    def uses_success(self) -> bool:
        """Is success measured, because something follows from it or will in a later run?"""
        return self.track_success or "success" in (self.scenario_order, self.group_sizes)

    def all_weights(self) -> list[dict[str, float]]:
        """Every set of weights that is named."""
        named = [self.reward_weights, *(stage.weights for stage in self.stages)]
        return [weights for weights in named if weights is not None]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
