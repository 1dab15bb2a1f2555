"""Every setting of a training run, in one flat model made of sections.

`runs.settings` and `training.settings` hold the sections, and `training.settings.profiles` the tables of
overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.runs.settings import OptimizerSettings, RunSettings
from stateset_agents.training.estimators.registry import ESTIMATORS
from stateset_agents.training.settings.curriculum import CurriculumSettings
from stateset_agents.training.settings.faults import FaultSettings
from stateset_agents.training.settings.profiles import (
    PROFILES,
    TrainingProfile,
    canonical,
    defaults,
    distillation_defaults,
    estimator_defaults,
)
from stateset_agents.training.settings.rollout import RolloutSettings
from stateset_agents.training.settings.schedule import ScheduleSettings
from stateset_agents.training.settings.update import UpdateSettings
from stateset_agents.training.settings.validation import contradiction

__all__ = ["PROFILES", "TrainingConfig", "TrainingProfile"]

_LENGTHS = {"num_episodes", "max_steps"}


class TrainingConfig(
    FaultSettings,
    RunSettings,
    UpdateSettings,
    OptimizerSettings,
    CurriculumSettings,
    RolloutSettings,
    ScheduleSettings,
):
    """Settings of `MultiTurnGRPOTrainer`. Names are the field's; common aliases are accepted."""

    model_config = ConfigDict(allow_inf_nan=False)

    profile: TrainingProfile = Field(
        default=TrainingProfile.BALANCED, description="Which table of defaults is used."
    )

    def __init__(self, **settings: Any) -> None:
        """`settings` win over the loss's own clip range and the estimator's own loss, those over the
        profile's table."""
        given = canonical(settings, _CANONICAL)
        super().__init__(**{**defaults(given), **given})
        self.model_fields_set.intersection_update(given)  # what the user said, for with_recommended

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> Self:
        wrong = contradiction(self)
        if wrong is not None:
            raise ValueError(wrong)
        return self

    @classmethod
    def from_profile(cls, profile: TrainingProfile | str, **overrides: Any) -> Self:
        """The profile's values with `overrides` on top.

        >>> TrainingConfig.from_profile("aggressive", num_episodes=100).num_iterations
        2
        """
        return cls(**{**overrides, "profile": profile})

    def with_recommended(self, overrides: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """This configuration with a model card's `overrides` where the user set nothing.

        Returns the configuration and what was applied. What the card says stands above the profile; a
        length of the run (num_episodes or max_steps) only counts where the user gave neither, and a loss only
        where the estimator that the user chose brings none, nor a teacher.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set}
        taken = own.keys() | (_LENGTHS if _LENGTHS & own.keys() else set())
        if "loss_type" in estimator_defaults(own.get("advantage_estimator")):
            taken |= {"loss_type"}
        taken |= distillation_defaults(self.distillation).keys()
        applied = {
            name: value for name, value in canonical(overrides, _CANONICAL).items() if name not in taken
        }
        config = type(self)(**{**applied, **own})
        config.model_fields_set.intersection_update(own)
        return config, applied

    @property
    def branches_per_turn(self) -> int:
        """`num_branches` where the estimator has branches played, else 0."""
        return self.num_branches if ESTIMATORS[self.advantage_estimator].branches else 0

    def rollout_limits(self) -> RolloutLimits:
        """How many conversations at once, how long they may take, and what is tried again."""
        return RolloutLimits(
            max_concurrent=self.max_concurrent,
            turn_timeout=self.turn_timeout,
            reward_timeout=self.reward_timeout,
            episode_timeout=self.episode_timeout,
            episode_retries=self.episode_retries,
            faults=self.faults,
        )


_CANONICAL: Mapping[str, str] = {
    alias: name
    for name, field in TrainingConfig.model_fields.items()
    for alias in getattr(field.validation_alias, "choices", ())
}
