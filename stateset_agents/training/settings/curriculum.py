"""The settings of a training that say what the parts of its rewards count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from stateset_agents.types.settings import Settings

__all__ = ["CurriculumSettings"]


def expect_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights. Raises ValueError for one that is negative or no number, and where none is above 0."""
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"the weight of {name} must be at least 0, got {weight!r}: let a penalty score below 0"
            )
    if not any(weights.values()):
        raise ValueError(f"at least one part needs a weight above 0, got {dict(weights)!r}")
    return dict(weights)


class CurriculumSettings(Settings):
    """Parts of the reward."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="Of a reward of several parts: normalize_then_sum divides each part by its group's "
        "deviation before they are summed, and their sum by the step's (GDPO).",
    )
    reward_weights: dict[str, float] | None = Field(
        default=None,
        description="What each part of the reward's breakdown counts: the reward is their weighted sum, and "
        "parts without a weight count nothing. Unset: the reward's own score.",
    )

    @field_validator("reward_weights")
    @classmethod
    def _are_weights(cls, weights: dict[str, float] | None) -> dict[str, float] | None:
        return weights if weights is None else expect_weights(weights)

    def all_weights(self) -> list[dict[str, float]]:
        """Every set of weights that is named."""
        return [] if self.reward_weights is None else [self.reward_weights]
