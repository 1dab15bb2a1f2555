"""The document's GRPOConfig: `ControlConfig` with the defaults of GRPO for acquisition."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

from pydantic import AliasChoices, Field, field_validator

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.settings import Schedule

_FIELDS = ControlConfig.model_fields
"""Descriptions, limits and aliases, which stay; the class below changes defaults."""


class GRPOConfig(ControlConfig):
    """Settings of GRPO for acquisition, for the functional form and for `ControlTrainer` alike.

    The document's names entropy_coeff, kl_penalty_coeff and scale_rewards are accepted beside those of
    `ControlConfig`, and can be read. The functional form reads total_steps (experiments), num_groups,
    group_size, num_iterations, advantage_normalization, the settings of the loss, of AdamW and of its
    schedule, and seed; what belongs to episodes and run folders is `ControlTrainer`'s.

    >>> GRPOConfig(entropy_coeff=0.02).entropy_coef
    0.02
    """

    total_steps: Annotated[int, _FIELDS["total_steps"]] = 100_000
    group_size: int = Field(default=64, ge=2, validation_alias=AliasChoices("group_size", "num_generations"))
    """Actions that are tried from one state; at least 2, since they are compared."""
    advantage_estimator: Annotated[str, _FIELDS["advantage_estimator"]] = "group"
    advantage_normalization: Annotated[Scaling, _FIELDS["advantage_normalization"]] = "population"
    entropy_coef: Annotated[float, _FIELDS["entropy_coef"]] = 0.01
    learning_rate: Annotated[float, _FIELDS["learning_rate"]] = 3e-4
    lr_scheduler_type: Annotated[Schedule, _FIELDS["lr_scheduler_type"]] = "constant"
    weight_decay: Annotated[float, _FIELDS["weight_decay"]] = 0.0
    max_grad_norm: Annotated[float, _FIELDS["max_grad_norm"]] = 1.0
    run_name: Annotated[str, _FIELDS["run_name"]] = "acquisition"

    @field_validator("advantage_normalization", mode="before")
    @classmethod
    def _by_the_batch_or_not(cls, value: Any) -> Any:
        return {True: "population", False: "none"}[value] if isinstance(value, bool) else value

    entropy_coeff = property(attrgetter("entropy_coef"), doc="The document's name of entropy_coef.")
    kl_penalty_coeff = property(attrgetter("beta"), doc="The document's name of beta.")

    @property
    def scale_rewards(self) -> bool:
        """The document's name of advantage_normalization: is there any?"""
        return self.advantage_normalization != "none"
