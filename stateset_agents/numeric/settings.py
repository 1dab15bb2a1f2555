"""Every setting of a numeric training."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.algorithms.kl_settings import KLEstimator
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.grouping.partitioner import GROUP_STRATEGIES, UNNUMBERED
from stateset_agents.grouping.weights import PART_WEIGHTS
from stateset_agents.numeric.credit import ESTIMATORS, LoneSteps
from stateset_agents.runs.settings import OptimizerSettings, RunSettings, Schedule
from stateset_agents.types.settings import OneOf


class ControlConfig(RunSettings, OptimizerSettings):
    """Settings of `ControlTrainer`. Steps are environment steps: one action of one row.

    save_steps and eval_steps count them, too, and act after the update that passes a multiple.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    # Rollout
    total_steps: int = Field(
        default=1_000_000, ge=1, validation_alias=AliasChoices("total_steps", "total_timesteps")
    )
    """Environment steps of the run; the rollout that reaches them is the last."""
    num_groups: int = Field(default=16, ge=1)
    """Groups of a rollout, each with a start of its own."""
    steps_per_rollout: int | None = Field(default=None, ge=1)
    """A rollout has fewer groups than num_groups where episodes as long as the last ones make so many steps
    with fewer."""
    group_size: int = Field(default=8, ge=1, validation_alias=AliasChoices("group_size", "num_generations"))
    """Episodes from one start; at least 2 where members are compared."""
    max_episode_steps: int | None = Field(default=None, ge=1)
    """Truncates episodes of the training before the environment's horizon."""

    # Credit
    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = "step_group"
    """A step's return-to-go against its living siblings', a whole return against its group's, an action
    against other ways on from its state, or a step against a critic; see docs/control.md."""
    advantage_normalization: Scaling = Field(
        default="batch", validation_alias=AliasChoices("advantage_normalization", "scale_rewards")
    )
    """Standard deviation that advantages are divided by: the batch's, for `group` also the group's own
    (population, sample), or none."""
    lone_steps: LoneSteps = "return"
    """Credit of a step at which no sibling lives, for `step_group`: its return (unbiased, and noisy where
    episodes are long), or zero (nothing to compare with, nothing said)."""
    gamma: float = Field(default=0.99, gt=0.0, le=1.0)
    """Discount from one step to the next."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's trade of the critic's bias (0) for the rewards' noise (1)."""
    group_strategy: Annotated[str, OneOf(GROUP_STRATEGIES)] = "none"
    """Parts of a rollout within which advantages are centred and scaled, by what is known before acting
    (task, auto, online, hierarchical), by chance (random), or, biased and for diagnosis, by what came of it
    (difficulty, length, auto_outcome); see docs/grouping.md."""
    n_groups: int = Field(default=4, ge=1, le=8)
    """Parts, for strategies that do not know how many there are."""
    group_weight_method: Annotated[str, OneOf(PART_WEIGHTS)] = "balanced"
    """How much each part counts in the loss: all alike, those far from solved more (performance), or those
    whose returns move (adaptive)."""
    num_branches: int = Field(default=4, ge=1)
    """Other ways on from a state, for `branch`."""
    branch_every: int = Field(default=16, ge=1)
    """Steps between two states with branches."""

    # Update
    num_iterations: int = Field(
        default=4, ge=1, validation_alias=AliasChoices("num_iterations", "num_epochs")
    )
    """Passes over each rollout."""
    minibatch_size: int = Field(
        default=1024, ge=1, validation_alias=AliasChoices("minibatch_size", "batch_size")
    )
    """Steps of an optimiser step, at least: minibatches are of whole groups; under gae, which compares
    nobody, of single steps of all episodes where the loss is a mean over steps (ppo)."""
    loss_type: Annotated[str, OneOf(LOSSES)] = "ppo"
    """Policy loss; what is a token there is a step here, see docs/algorithms.md."""
    clip_ratio: float = Field(
        default=0.2, gt=0.0, lt=1.0, validation_alias=AliasChoices("clip_ratio", "clip_epsilon")
    )
    """The ratio is clipped below 1 - clip_ratio (and above 1 + clip_ratio)."""
    clip_ratio_high: float | None = Field(default=None, gt=0.0)
    """Upper clip where it differs from the lower."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """For negative advantages the loss is at most dual_clip * |A|."""
    entropy_coef: float = Field(
        default=0.003,
        ge=0.0,
        validation_alias=AliasChoices("entropy_coef", "entropy_coefficient", "entropy_coeff"),
    )
    """Weight of the entropy bonus."""
    beta: float = Field(
        default=0.0,
        ge=0.0,
        validation_alias=AliasChoices("beta", "kl_coefficient", "kl_penalty_coeff", "kl_coef"),
    )
    """Weight of the KL to the reference (the policy at the start); 0 keeps none."""
    kl_estimator: KLEstimator = "k3"
    """Per-step estimator."""
    value_coef: float = Field(default=0.5, ge=0.0, validation_alias=AliasChoices("value_coef", "vf_coef"))
    """Weight of the critic's half squared error, for `gae`."""
    value_clip: float | None = Field(default=None, gt=0.0)
    """Values move at most this far in an update, in units of return; with `value_normalization: task` in
    deviations of the task's returns, whatever their unit."""

    gradient_cosines_every: int = Field(default=0, ge=0)
    """Updates from one to the next that has the metric gradient_cosine/ONE+OTHER, the first among them: the
    cosine between two tasks' gradients of the policy loss on the rollout, below 0 where they pull against
    each other. It costs a pass over the rollout; 0: none has."""

    # Other defaults than a language model's
    learning_rate: float = Field(default=2e-3, ge=0.0)
    """Peak of the schedule."""
    lr_scheduler_type: Schedule = "linear"
    """After warm-up: constant, down in a line or a half cosine, or as 1/sqrt(n), by the environment steps so
    far."""
    warmup_ratio: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the steps spent warming up."""
    max_grad_norm: float = Field(default=0.5, gt=0.0)
    """Gradients are clipped to this global norm."""
    save_steps: int = Field(default=50_000, ge=0)
    """Checkpoint every so many steps; 0 only at the end."""
    run_name: str = Field(default="control", pattern=r"^[\w.-]+$")
    """Part of the run folder's name."""
    eval_episodes: int = Field(default=100, ge=1)
    """Episodes of an evaluation."""
    log_episodes: bool = True
    """Write every episode to episodes.jsonl, and to events.jsonl the counts of actions."""

    @field_validator("advantage_normalization", mode="before")
    @classmethod
    def _by_the_batch_or_not(cls, value: Any) -> Any:
        return {True: "batch", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> Self:
        estimator = ESTIMATORS[self.advantage_estimator]
        if estimator.in_group and self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, got {self.group_size}: {self.advantage_estimator} compares "
                "members; take advantage_estimator gae for single episodes"
            )
        if self.lone_steps not in estimator.lone_steps:
            raise ValueError(f"lone_steps {self.lone_steps} is for step_group: leave it out")
        if self.group_strategy != "none" and (
            self.advantage_normalization != "batch" or self.advantage_estimator == "group"
        ):
            raise ValueError(
                f"group_strategy {self.group_strategy} scales advantages by parts: it needs "
                "advantage_normalization batch and an advantage_estimator other than group, got "
                f"{self.advantage_normalization} and {self.advantage_estimator}"
            )
        if self.group_weight_method == "adaptive" and self.group_strategy in UNNUMBERED:
            raise ValueError(
                f"group_weight_method adaptive follows each part, and those of {self.group_strategy} change "
                "their numbers from update to update: take group_strategy online or task"
            )
        if self.group_weight_method != "balanced" and self.group_strategy == "none":
            raise ValueError(
                f"group_weight_method {self.group_weight_method} weighs parts: set group_strategy"
            )
        if self.advantage_normalization not in estimator.scalings:
            raise ValueError(
                f"advantage_normalization of {self.advantage_estimator} must be one of "
                f"{', '.join(estimator.scalings)}, got {self.advantage_normalization}"
            )
        return self
