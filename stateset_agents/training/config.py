"""Every setting of a training run, in one model; `training.settings.profiles` has the tables of overrides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator

from stateset_agents.algorithms.advantages import Baseline, Scaling
from stateset_agents.algorithms.kl_controllers import KLControllerKind
from stateset_agents.algorithms.kl_estimators import KLEstimator
from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.runs.learning_rate import Schedule
from stateset_agents.runs.trackers import TrackerName
from stateset_agents.training.estimators.base import UNBIASED_LOSS, Estimator
from stateset_agents.training.estimators.registry import DEFAULT_ESTIMATOR, ESTIMATORS, estimators_with
from stateset_agents.training.settings.faults import FaultSettings
from stateset_agents.training.settings.lora import LoraSettings
from stateset_agents.training.settings.profiles import (
    PROFILES,
    TrainingProfile,
    canonical,
    defaults,
    estimator_defaults,
)
from stateset_agents.training.settings.validation import contradiction
from stateset_agents.types.settings import OneOf, alternatives

__all__ = ["PROFILES", "TrainingConfig", "TrainingProfile"]

_LENGTHS = {"num_episodes", "max_steps"}


def _alias(*names: str) -> AliasChoices:
    return AliasChoices(*names)


def _estimators(has: Callable[[Estimator], object]) -> str:
    return alternatives(estimators_with(has), "and")


def _loss_clips(side: Callable[[Clip], float]) -> str:
    """`dapo has 0.28, gspo 0.0004`: the losses whose clip is not the usual one on this side."""
    clips = {name: side(loss.clip) for name, loss in LOSSES.items() if side(loss.clip) != side(Clip())}
    return ", ".join(f"{name} {clip:g}" for name, clip in clips.items()).replace(" ", " has ", 1)


# What the descriptions list.
_LONE = _estimators(lambda estimator: estimator.group_default == 1)
_UNBIASED = _estimators(lambda estimator: estimator.loss == UNBIASED_LOSS)
_BRANCHING = _estimators(lambda estimator: estimator.branches)
_CONSTANT = alternatives((name for name, loss in LOSSES.items() if loss.averaging == "constant"), "and")


class TrainingConfig(FaultSettings):
    """Settings of `MultiTurnGRPOTrainer`. Names are the field's; common aliases are accepted."""

    model_config = ConfigDict(allow_inf_nan=False)

    profile: TrainingProfile = Field(
        default=TrainingProfile.BALANCED, description="Which table of defaults is used."
    )
    seed: int = Field(default=0, ge=0, description="Of every random choice of the run.")

    # How long, how much at once
    num_episodes: int = Field(
        default=1000, ge=1, description="Scenarios to play, each `num_generations` times."
    )
    max_steps: int | None = Field(default=None, ge=1, description="Optimiser steps; overrides num_episodes.")
    num_generations: int = Field(
        default=8,
        ge=1,
        validation_alias=_alias("num_generations", "group_size"),
        description=f"Members of a group; one alone trains under {_LONE} only.",
    )
    per_device_train_batch_size: int = Field(
        default=1, ge=1, description="Episodes of one forward-backward pass of one process."
    )
    gradient_accumulation_steps: int = Field(
        default=4, ge=1, description="Passes summed into one optimiser step."
    )
    num_processes: int = Field(
        default=1,
        ge=1,
        description="Processes that train together, each with its share of a step; as many as torchrun or "
        "accelerate must have started, see docs/several-gpus.md.",
    )
    parallelism: Literal["ddp", "fsdp2"] = Field(
        default="ddp",
        description="Of several processes: each holds all weights (ddp), or weights, gradients and "
        "optimiser are cut into shards, one for each (fsdp2).",
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens, padding included, in one forward; longer passes are split. None: 2048 on a "
        "CPU, whose caches hold no more, 16384 elsewhere.",
    )
    row_layout: Literal["auto", "packed", "padded"] = Field(
        default="auto",
        description="How conversations lie in an update's forward: packed behind one another, what several "
        "begin with computed once, or padded side by side. auto packs where the model, tried at the start, "
        "gives the same hidden states that way; the run's log says which.",
    )

    fast_linears: bool = Field(
        default=True,
        description="The update's fp32 matrix products by oneDNN on AMD processors, where torch's own take "
        "twice as long; products are compared once at the start, and elsewhere nothing changes.",
    )
    rollout_sleep: bool = Field(
        default=False,
        description="Free what only generation needs, its cache and packed weights, before each update: a "
        "tenth to a fifth less peak memory, and a tenth more time.",
    )
    lora: LoraSettings | None = Field(
        default=None,
        description="Train an adapter of these settings and leave the model's own weights alone, see "
        "docs/lora.md. Unset: all weights.",
    )

    # Optimiser
    learning_rate: float = Field(default=5e-6, ge=0.0, description="Peak of the schedule.")
    lr_scheduler_type: Schedule = Field(
        default="cosine",
        description="After warm-up: constant, down in a line or a half cosine, or as 1/sqrt(n). The alias "
        "constant_with_warmup is accepted: all of them warm up, and with warmup_ratio 0 none does.",
    )
    lr_min_ratio: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="What the fall ends at, as a share of learning_rate."
    )
    warmup_ratio: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="Share of the steps spent warming up."
    )
    weight_decay: float = Field(
        default=0.01, ge=0.0, description="AdamW's, on matrices only (not norms or biases)."
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0.0, description="Gradients are clipped to this global norm."
    )
    num_iterations: int = Field(
        default=1,
        ge=1,
        validation_alias=_alias("num_iterations", "num_epochs"),
        description="Optimiser steps on each batch (the first is on-policy).",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Autocast of the update, master weights stay fp32; auto is fp32 on CPU, bf16 on GPUs "
        "that have it. The aliases bf16=True, fp16=True and use_amp are accepted.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    dropout: bool = Field(
        default=False,
        description="Leave the model's own dropout on in updates. Rollouts have none, so the ratio of the "
        "first pass is then not 1 and may be clipped.",
    )

    # Loss
    loss_type: Annotated[str, OneOf(LOSSES)] = Field(
        default="grpo",
        description=f"Policy loss; {_UNBIASED} have {UNBIASED_LOSS}, with which their gradient is "
        "unbiased; see docs/algorithms.md.",
    )
    clip_ratio: float = Field(
        default=0.2,
        gt=0.0,
        lt=1.0,
        validation_alias=_alias("clip_ratio", "clip_epsilon"),
        description="The ratio is clipped below 1 - clip_ratio (and above 1 + clip_ratio); "
        f"{_loss_clips(lambda clip: clip.low)}.",
    )
    clip_ratio_high: float | None = Field(
        default=None,
        gt=0.0,
        description=f"Upper clip where it differs from the lower; {_loss_clips(lambda clip: clip.high)}.",
    )
    dual_clip: float | None = Field(
        default=None, gt=1.0, description="For negative advantages the loss is at most dual_clip * |A|."
    )
    loss_length: int = Field(
        default=512,
        ge=1,
        description=f"{_CONSTANT}'s constant: agent tokens of a full trajectory. Far above that, "
        "gradients are so small that max_grad_norm never clips.",
    )
    importance_cap: float | None = Field(
        default=None,
        gt=0.0,
        description="Tokens of another policy than the one the ratio is taken to (stale ones, those of "
        "half-precision rollouts) get the weight pi_old / pi_sampler, at most this much. None: 2 with "
        "max_staleness, else no weight.",
    )
    entropy_coef: float = Field(
        default=0.0,
        ge=0.0,
        validation_alias=_alias("entropy_coef", "entropy_coefficient", "entropy_coeff"),
        description="Weight of the entropy bonus.",
    )

    # Advantages
    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = Field(
        default=DEFAULT_ESTIMATOR,
        description="Who gets the credit: a whole conversation against its group, a turn against its "
        "siblings' turns or against other ways on from where it stood, a turn or token against a critic "
        "(GAE), or the outcome against its group plus turn rewards by GAE; see docs/algorithms.md.",
    )
    baseline_type: Baseline = Field(
        default="group_mean", description="What a conversation's reward is compared with."
    )
    advantage_normalization: Scaling = Field(
        default="population",
        validation_alias=_alias("advantage_normalization", "scale_rewards"),
        description="Standard deviation that advantages are divided by; False is none, True the "
        f"estimator's own. {_UNBIASED} have none, with a critic it is batch (centred, too) or none.",
    )
    reward_clip: float = Field(
        default=10.0,
        gt=0.0,
        description="Rewards are clipped to ±this before comparison: a conversation's, or with per-turn "
        "credit each turn's.",
    )
    min_group_size: int = Field(
        default=2,
        ge=1,
        description=f"A group with fewer scored members is left out of the step; {_LONE} have 1.",
    )
    gamma: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Discount from one turn to the next; within a turn there is none.",
    )
    num_branches: int = Field(
        default=2,
        ge=1,
        description=f"Of {_BRANCHING}: other ways on that are played, to their end, from after every "
        "turn that is not the last of its conversation. They cost as much as conversations do.",
    )
    gae_lambda: float = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="GAE's trade of the critic's bias (0) for the rewards' noise (1).",
    )
    bootstrap_truncated: bool = Field(
        default=True,
        description="A conversation cut by a limit is worth what the critic expects after the cut, too; "
        "false where the limit is part of the task.",
    )

    # Critic, of the estimators that have one
    value_learning_rate: float = Field(default=1e-3, gt=0.0, description="Of the value head, constant.")
    value_iterations: int = Field(default=4, ge=1, description="Optimiser steps of the head on each batch.")
    value_clip: float | None = Field(
        default=0.2, gt=0.0, description="Values move at most this far in a step, in units of reward."
    )
    value_dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="Of the value head, in training.")

    # KL to the reference model
    beta: float = Field(
        default=0.1,
        ge=0.0,
        validation_alias=_alias("beta", "kl_coefficient", "kl_penalty_coeff", "kl_coef"),
        description="Weight of the KL to the reference (the weights at the start); 0 loads none.",
    )
    use_reference_model: bool = Field(default=True, description="False is the same as beta = 0.")
    kl_estimator: KLEstimator = Field(default="k3", description="Per-token estimator.")
    kl_placement: Literal["loss", "reward"] = Field(
        default="loss", description="In the loss (times the live ratio), or k1 subtracted from the reward."
    )
    kl_controller: KLControllerKind = Field(
        default="fixed", description="How beta moves: not at all, in steps, or in proportion to the error."
    )
    kl_target: float = Field(default=0.01, gt=0.0, description="KL per token that a moving beta steers to.")
    kl_horizon: int = Field(
        default=10000, ge=1, description="Conversations over which ziegler's beta adapts."
    )

    # Rollouts
    temperature: float = Field(
        default=1.0, gt=0.0, description="Of training rollouts; the log-probs follow it."
    )
    temperature_schedule: Literal["none", "adaptive"] = Field(
        default="none",
        description="adaptive: after each step whose mean reward reaches temperature_target the temperature "
        "is multiplied by temperature_decay, after any other by 1.01; it stays between temperature_min and "
        "`temperature`.",
    )
    temperature_min: float = Field(default=0.3, gt=0.0, description="Lowest temperature of the schedule.")
    temperature_decay: float = Field(
        default=0.995, gt=0.0, le=1.0, description="Factor on it after a step that reached the target."
    )
    temperature_target: float = Field(default=0.7, description="Mean reward from which it cools.")
    max_concurrent: int = Field(default=64, ge=1, description="Conversations at once.")
    scheduling: Literal["auto", "deterministic", "throughput"] = Field(
        default="auto",
        description="deterministic waits for every local reply before a decode step; auto is deterministic "
        "when the environment is local.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="0 plays, learns, plays again. From 1 on the next steps' conversations go on while an "
        "update runs, and what trains was begun at most so many steps before; see docs/overlap.md.",
    )
    max_resamples: int = Field(
        default=0,
        ge=0,
        description="Groups without signal (all members earned the same, or too few have a score) that the "
        "next scenarios replace in one step, DAPO's dynamic sampling; further ones train as they are.",
    )

    # Run folder
    output_dir: str = Field(default="runs", description="Where numbered run folders go.")
    run_name: str = Field(default="run", description="Part of the run folder's name.", pattern=r"^[\w.-]+$")
    save_steps: int = Field(
        default=50, ge=0, description="Checkpoint every so many steps; 0 only at the end."
    )
    save_total_limit: int = Field(default=2, ge=1, description="Checkpoints kept.")
    eval_steps: int = Field(
        default=0, ge=0, description="Evaluate on the validation split every so many steps."
    )
    eval_episodes: int = Field(
        default=100, ge=1, description="Most validation scenarios of one such evaluation."
    )
    metric_for_best: Literal["auto", "eval/success", "eval/reward"] = Field(
        default="auto",
        description="By which evaluation a checkpoint is the best; auto is eval/success where the "
        "environment gives a verdict, else eval/reward.",
    )
    early_stopping_patience: int = Field(
        default=0,
        ge=0,
        description="Evaluations in a row without improvement that end the training; 0 never does.",
    )
    early_stopping_threshold: float = Field(
        default=0.0, ge=0.0, description="An improvement is more than this above the best so far."
    )
    load_best_at_end: bool = Field(
        default=False,
        description="The agent ends with the best evaluation's weights instead of the last step's.",
    )
    log_rollouts: bool = Field(default=True, description="Write every conversation to rollouts.jsonl.")
    progress: bool = Field(
        default=True,
        description="Print step, reward, success and time left: a live line on a terminal, about twenty "
        "lines a run elsewhere. A program prints them on stderr, the command on stdout.",
    )
    report_to: tuple[TrackerName, ...] = Field(
        default=(),
        description="Trackers that get the metrics, too: tensorboard, wandb, trackio; one alone needs no "
        "list, and none is the empty one. See docs/trackers.md.",
    )

    def __init__(self, **settings: Any) -> None:
        """`settings` win over the loss's own clip range and the estimator's own loss, those over the
        profile's table."""
        given = canonical(settings, _CANONICAL)
        super().__init__(**{**defaults(given), **given})
        self.model_fields_set.intersection_update(given)  # what the user said, for with_recommended

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_tracker_alone(cls, value: Any) -> Any:
        if value == "none":  # as TRL has it
            return ()
        return (value,) if isinstance(value, str) else value

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def _constant_warms_up(cls, value: Any) -> Any:
        return "constant" if value == "constant_with_warmup" else value

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
        where the estimator that the user chose brings none.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set}
        taken = own.keys() | (_LENGTHS if _LENGTHS & own.keys() else set())
        if "loss_type" in estimator_defaults(own.get("advantage_estimator")):
            taken |= {"loss_type"}
        applied = {
            name: value for name, value in canonical(overrides, _CANONICAL).items() if name not in taken
        }
        config = type(self)(**{**applied, **own})
        config.model_fields_set.intersection_update(own)
        return config, applied

    @property
    def uses_reference(self) -> bool:
        return self.beta > 0 and self.use_reference_model

    @property
    def branches_per_turn(self) -> int:
        """`num_branches` where the estimator has branches played, else 0."""
        return self.num_branches if ESTIMATORS[self.advantage_estimator].branches else 0

    def episodes_per_step(self) -> int:
        """Scenarios of one step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_processes

    def num_steps(self) -> int:
        """Steps of the run: `max_steps`, or as many as `num_episodes` fill (the last may be short)."""
        if self.max_steps is not None:
            return self.max_steps
        return -(-self.num_episodes // self.episodes_per_step())


_CANONICAL: Mapping[str, str] = {
    alias: name
    for name, field in TrainingConfig.model_fields.items()
    for alias in getattr(field.validation_alias, "choices", ())
}
