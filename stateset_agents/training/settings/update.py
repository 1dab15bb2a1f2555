"""The settings of a training that say how conversations become an update: passes, loss, advantages, KL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.algorithms.baselines import BASELINES
from stateset_agents.algorithms.kl.controllers import KLControllerKind
from stateset_agents.algorithms.kl.estimators import KLEstimator
from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.training.estimators.base import UNBIASED_LOSS
from stateset_agents.training.estimators.registry import DEFAULT_ESTIMATOR, ESTIMATORS, estimators_with
from stateset_agents.training.settings.distillation import DistillationSettings
from stateset_agents.training.settings.passes import PassSettings
from stateset_agents.types.settings import OneOf, alternatives


def _loss_clips(side: Callable[[Clip], float]) -> str:
    """`dapo has 0.28, gspo 0.0004`: the losses whose clip is not the usual one on this side."""
    clips = {name: side(loss.clip) for name, loss in LOSSES.items() if side(loss.clip) != side(Clip())}
    return ", ".join(f"{name} {clip:g}" for name, clip in clips.items()).replace(" ", " has ", 1)


# What the descriptions list.
_LONE = alternatives(estimators_with(lambda estimator: estimator.group_default == 1), "and")
_UNBIASED = alternatives(estimators_with(lambda estimator: estimator.loss == UNBIASED_LOSS), "and")
_CONSTANT = alternatives((name for name, loss in LOSSES.items() if loss.averaging == "constant"), "and")


class UpdateSettings(PassSettings):
    """How often a batch is gone through, the policy's loss, its advantages, the critic, and the reference."""

    num_iterations: int = Field(
        default=1,
        ge=1,
        validation_alias=AliasChoices("num_iterations", "num_epochs"),
        description="Optimiser steps on each batch (the first is on-policy).",
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
        validation_alias=AliasChoices("clip_ratio", "clip_epsilon"),
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
        validation_alias=AliasChoices("entropy_coef", "entropy_coefficient", "entropy_coeff"),
        description="Weight of the entropy bonus.",
    )

    # Advantages
    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = Field(
        default=DEFAULT_ESTIMATOR,
        description="Who gets the credit: a whole conversation against its group, a turn against its "
        "siblings' turns or against other ways on from where it stood, a turn or token against a critic "
        "(GAE), or the outcome against its group plus turn rewards by GAE; see docs/algorithms.md.",
    )
    baseline_type: Annotated[str, OneOf(BASELINES)] = Field(
        default="group_mean", description="What a conversation's reward is compared with."
    )
    advantage_normalization: Scaling = Field(
        default="population",
        validation_alias=AliasChoices("advantage_normalization", "scale_rewards"),
        description="Standard deviation that advantages are divided by; False is none, True the "
        f"estimator's own. {_UNBIASED} have none, with a critic it is batch (centred, too) or none.",
    )
    group_strategy: Literal["none", "family"] = Field(
        default="none",
        description="family: the deviation of advantage_normalization batch (with a critic the mean, too) is "
        "of the conversations of one family, so that no family's rewards drown another's; see "
        "docs/grouping.md.",
    )
    reward_clip: float = Field(
        default=10.0,
        gt=0.0,
        description="Rewards are clipped to ±this before comparison: a conversation's, or with per-turn "
        "credit each turn's.",
    )
    advantage_clip: float | None = Field(
        default=None,
        gt=0.0,
        description="Scaled advantages are clipped to ±this. Of G conversations compared with their own mean "
        "none is beyond the root of G - 1, so 3 acts only in groups of more than 10.",
    )
    advantage_skip: float = Field(
        default=0.0,
        ge=0.0,
        description="Tokens with an advantage nearer to 0 train nothing, no KL either: advantages then no "
        "longer sum to 0 in a group. 0 skips none.",
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
        validation_alias=AliasChoices("beta", "kl_coefficient", "kl_penalty_coeff", "kl_coef"),
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

    distillation: DistillationSettings | None = Field(
        default=None,
        description="A teacher whose log-probs of the student's own tokens become their advantages, see "
        f"docs/distillation.md; brings loss_type {UNBIASED_LOSS} and beta 0. Unset: none.",
    )

    @property
    def uses_reference(self) -> bool:
        return self.beta > 0 and self.use_reference_model
