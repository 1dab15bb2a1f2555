"""The document's GRPOConfig: `ControlConfig` with the defaults of GRPO for infrastructure."""

from __future__ import annotations

from typing import Annotated

from pydantic import AliasChoices, Field

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.numeric.credit import ESTIMATORS
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.learning_rate import Schedule
from stateset_agents.types.settings import OneOf


class GRPOConfig(ControlConfig):
    """Settings of GRPO for infrastructure (group-relative policy optimisation of numeric actions).

    A member's whole return is compared with its group's, in deviations of the group; a group is episodes from
    one start. The document's names clip_epsilon, kl_coefficient, entropy_coefficient, num_epochs and
    batch_size are accepted beside those of `ControlConfig`, and can be read.

    >>> GRPOConfig(clip_epsilon=0.1).clip_ratio
    0.1
    """

    steps_per_rollout: int | None = Field(
        default=2048,
        ge=1,
        description="Steps of a rollout: as many groups as make about so many, num_groups at most.",
    )
    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = Field(
        default="group", description="What a step is compared with."
    )
    advantage_normalization: Scaling = Field(
        default="population",
        validation_alias=AliasChoices("advantage_normalization", "scale_rewards"),
        description="Deviation that advantages are divided by.",
    )
    minibatch_size: int = Field(
        default=64,
        ge=1,
        validation_alias=AliasChoices("minibatch_size", "batch_size"),
        description="Steps of an optimiser step, at least: minibatches are of whole groups, under gae of "
        "single steps.",
    )
    entropy_coef: float = Field(
        default=0.01,
        ge=0.0,
        validation_alias=AliasChoices("entropy_coef", "entropy_coefficient", "entropy_coeff"),
        description="Weight of the entropy bonus.",
    )
    beta: float = Field(
        default=0.1,
        ge=0.0,
        validation_alias=AliasChoices("beta", "kl_coefficient", "kl_penalty_coeff", "kl_coef"),
        description="Weight of the KL to the policy at the start; 0 keeps none.",
    )
    learning_rate: float = Field(default=3e-4, ge=0.0, description="Peak of the schedule.")
    lr_scheduler_type: Schedule = Field(
        default="cosine", description="How it falls, over the steps of the run."
    )
    lr_min_ratio: float = Field(
        default=1 / 300, ge=0.0, lt=1.0, description="What it ends at by its peak: 1e-6 by default."
    )
    eval_steps: int = Field(
        default=10_000, ge=0, description="Evaluate after the update that passes a multiple of it."
    )
    eval_episodes: int = Field(default=10, ge=1, description="Episodes of an evaluation.")
    run_name: str = Field(
        default="infrastructure", description="Part of the run folder's name.", pattern=r"^[\w.-]+$"
    )

    @property
    def clip_epsilon(self) -> float:
        """The document's name of clip_ratio."""
        return self.clip_ratio

    @property
    def kl_coefficient(self) -> float:
        """The document's name of beta."""
        return self.beta

    @property
    def entropy_coefficient(self) -> float:
        """The document's name of entropy_coef."""
        return self.entropy_coef

    @property
    def num_epochs(self) -> int:
        """The document's name of num_iterations."""
        return self.num_iterations

    @property
    def batch_size(self) -> int:
        """The document's name of minibatch_size."""
        return self.minibatch_size
