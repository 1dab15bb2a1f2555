"""The document's GRPOConfig: `ControlConfig` with the defaults of GRPO for acquisition."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field, field_validator

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.numeric.credit import ESTIMATORS
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.learning_rate import Schedule
from stateset_agents.types.settings import OneOf


class GRPOConfig(ControlConfig):
    """Settings of GRPO for acquisition, for the functional form and for `ControlTrainer` alike.

    The document's names entropy_coeff, kl_penalty_coeff and scale_rewards are accepted beside those of
    `ControlConfig`, and can be read. The functional form reads total_steps (experiments), num_groups,
    group_size, num_iterations, advantage_normalization, the settings of the loss, of AdamW and of its
    schedule, and seed; what belongs to episodes and run folders is `ControlTrainer`'s.

    >>> GRPOConfig(entropy_coeff=0.02).entropy_coef
    0.02
    """

    total_steps: int = Field(
        default=100_000,
        ge=1,
        validation_alias=AliasChoices("total_steps", "total_timesteps"),
        description="Experiments of the run; the samples that reach them are the last.",
    )
    group_size: int = Field(
        default=64,
        ge=2,
        validation_alias=AliasChoices("group_size", "num_generations"),
        description="Actions that are tried from one state; at least 2, since they are compared.",
    )
    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = Field(
        default="group", description="What a sample is compared with."
    )
    advantage_normalization: Scaling = Field(
        default="population",
        validation_alias=AliasChoices("advantage_normalization", "scale_rewards"),
        description="Deviation that advantages are divided by; scale_rewards False is none (Dr. GRPO).",
    )
    entropy_coef: float = Field(
        default=0.01,
        ge=0.0,
        validation_alias=AliasChoices("entropy_coef", "entropy_coefficient", "entropy_coeff"),
        description="Weight of the entropy bonus.",
    )
    learning_rate: float = Field(default=3e-4, ge=0.0, description="Peak of the schedule.")
    lr_scheduler_type: Schedule = Field(default="constant", description="How it goes on after the warm-up.")
    weight_decay: float = Field(default=0.0, ge=0.0, description="AdamW's, on matrices; 0 is Adam.")
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Gradients are clipped to this norm.")
    run_name: str = Field(
        default="acquisition", description="Part of the run folder's name.", pattern=r"^[\w.-]+$"
    )

    @field_validator("advantage_normalization", mode="before")
    @classmethod
    def _by_the_batch_or_not(cls, value: Any) -> Any:
        return {True: "population", False: "none"}[value] if isinstance(value, bool) else value

    @property
    def entropy_coeff(self) -> float:
        """The document's name of entropy_coef."""
        return self.entropy_coef

    @property
    def kl_penalty_coeff(self) -> float:
        """The document's name of beta."""
        return self.beta

    @property
    def scale_rewards(self) -> bool:
        """The document's name of advantage_normalization: is there any?"""
        return self.advantage_normalization != "none"
