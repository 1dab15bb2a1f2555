"""The settings of a training that say how conversations become an update: passes, loss, advantages, KL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from stateset_agents.algorithms.advantages import BASELINES, Scaling
from stateset_agents.algorithms.distillation import TeacherCredit
from stateset_agents.algorithms.kl_settings import KLControllerKind, KLEstimator
from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.training.estimators import (
    DEFAULT_ESTIMATOR,
    ESTIMATORS,
    UNBIASED_LOSS,
    estimators_with,
)
from stateset_agents.types.settings import OneOf, Settings, alternatives

# Settings of distillation: a teacher that scores what the student says, or one that shows how it is done.


class DistillationSettings(Settings):
    """On-policy distillation: a teacher's log-probs of the student's own tokens become their advantages."""

    teacher: str
    """A model as `agent.model_name` names one, or a vLLM server (vllm:http://...); with the student's
    vocabulary."""
    weight: float = Field(default=1.0, gt=0.0)
    """Weight of log pi_T - log pi_S of a token, in nats, in its advantage."""
    reward_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the reward's advantage beside it; 0: the reward is measured and teaches nothing."""
    credit: TeacherCredit = "token"
    """Credit of a token by the teacher's word: its own, its own and all later ones' (to_go), or its turn's
    sum or mean; see docs/distillation.md."""
    device: str = "auto"
    """Device of the teacher: auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the teacher's weights; auto as for the agent's."""

    @field_validator("teacher")
    @classmethod
    def _teacher_is_named(cls, name: str) -> str:
        if not name.strip():
            raise ValueError("name a model, a run folder or vllm:URL")
        return name

    @property
    def is_served(self) -> bool:
        """True where the teacher runs on a server."""
        return self.teacher.startswith("vllm:")


class TraceSettings(Settings):
    """A teacher's traces for the student: its replies to train scenarios, where the reward verifies them."""

    teacher: AgentConfig
    """The teacher: a model's name, or settings as `agent` has them."""
    endpoint: str | None = None
    """OpenAI-compatible URL, the part before /chat/completions; `teacher.model_name` is then as it calls the
    model. Unset: the teacher is loaded here."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the endpoint's key."""
    episodes: int | None = Field(default=None, ge=1)
    """Train scenarios, one of each family in turn; all when unset."""
    samples: int = Field(default=1, ge=1)
    """Replies to each; with more than one set a temperature of about 1."""
    temperature: float = Field(default=0.1, ge=0.0)
    """Sampling temperature of the teacher's replies; 0 is greedy."""
    max_new_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one reply of the teacher."""
    min_reward: float = 1.0
    """Replies that earn less are not shown."""
    in_format: bool = True
    """Show only replies with one thought and one answer in their tags, see docs/reasoning.md."""
    seed: int = Field(default=0, ge=0)
    """Seed of the teacher's sampling."""

    @field_validator("teacher", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        settings = {"model_name": value} if isinstance(value, str) else value
        if isinstance(settings, Mapping) and "max_new_tokens" in settings:
            raise ValueError("max_new_tokens stands beside it, in traces: move it there")
        return settings


# The settings of an update's passes through the model, whatever the loss; fine-tuning has them, too.

# Settings of a LoRA adapter.


class LoraSettings(Settings):
    """An adapter's size and place."""

    rank: int = Field(default=16, ge=1)
    """Columns of A and B: how much each layer may change."""
    alpha: float = Field(default=32.0, gt=0.0, allow_inf_nan=False)
    """The adapter counts alpha / rank times."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the layers that get one, such as q_proj; all-linear is every linear layer but the output
    head."""

    quantization: Literal["4bit", "8bit"] | None = None
    """Hold the trainer's copy of the model's own linear layers, which are not trained, in so many bits by
    bitsandbytes (QLoRA), see docs/lora.md. Unset: as they are."""

    @model_validator(mode="before")
    @classmethod
    def _name_few_bits(cls, values: Any) -> Any:
        for name in ("load_in_4bit", "load_in_8bit", "quantization_config"):
            if isinstance(values, Mapping) and name in values:
                raise ValueError(f"write quantization: 4bit or quantization: 8bit instead of {name}")
        return values


class PassSettings(Settings):
    """Passes of an update's rows through the model, and the part of it that trains."""

    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Most tokens, padding included, in one forward; longer passes are split. Two passes run side by side, as
    in bf16 on several threads of a CPU, only where both together have no more. None: on a GPU as many as the
    plan of its memory has room for, at most 32768 (docs/memory.md), or 16384 where no plan is made; on a CPU
    as many as keep a gigabyte of activations, from 512 to 2048, and up to eight times that where rows of one
    conversation share a beginning. A longer row is a pass by itself; so is a longer conversation where the
    loss or the importance weights need one ratio of the whole conversation."""
    row_layout: Literal["auto", "packed", "padded"] = "auto"
    """Layout of conversations in an update's forward: packed behind one another, what several rows begin with
    computed once, or padded side by side. auto packs where the model, tried at the start, gives the same
    hidden states that way; the run's log says which."""
    fast_linears: bool = True
    """The update's fp32 matrix products by oneDNN on AMD processors, where torch's own take twice as long;
    and on a CPU in bf16 packed rows through the layers of Llama, Mistral and Qwen2 by hand. Both are compared
    at the start, and elsewhere nothing changes."""
    lora: LoraSettings | None = None
    """Train an adapter of these settings and leave the model's own weights alone, see docs/lora.md. Unset:
    all weights."""
    freeze_vision: bool = False
    """Leave the vision encoder of a vision-language model as it is: the projection of its features and the
    text model train."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast of the update, master weights stay fp32; auto is bf16 on GPUs that have it and, for models of
    100 million parameters and more, on CPUs with AMX, else fp32. The aliases bf16=True, fp16=True and use_amp
    are accepted."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass to save memory. auto: on a GPU where a pass of 8192 tokens
    would not fit otherwise; never on a CPU."""
    dropout: bool = False
    """Leave the model's own dropout on in updates. Rollouts have none, so the ratio of the first pass is then
    not 1 and may be clipped."""


def _loss_clips(side: Callable[[Clip], float]) -> str:
    """`dapo has 0.28, gspo 0.0004`: the losses whose clip is not the usual one on this side."""
    clips = {name: side(loss.clip) for name, loss in LOSSES.items() if side(loss.clip) != side(Clip())}
    return ", ".join(f"{name} {clip:g}" for name, clip in clips.items()).replace(" ", " has ", 1)


# What the descriptions list.
_LONE = alternatives(estimators_with(lambda estimator: estimator.group_default == 1), "and")
_UNBIASED = alternatives(estimators_with(lambda estimator: estimator.loss == UNBIASED_LOSS), "and")
_CONSTANT = alternatives((name for name, loss in LOSSES.items() if loss.averaging == "constant"), "and")


_OF_A_CRITIC = (
    *("gae_lambda", "value_learning_rate", "value_iterations", "value_clip", "value_dropout"),
    "bootstrap_truncated",
)


class UpdateSettings(PassSettings):
    """Passes over a batch, the policy's loss, its advantages, the critic, and the reference."""

    num_iterations: int = Field(
        default=1, ge=1, validation_alias=AliasChoices("num_iterations", "num_epochs")
    )
    """Optimiser steps on each batch (the first is on-policy)."""

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
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound for negative advantages: the loss is at most dual_clip * |A|."""
    loss_length: int = Field(
        default=512,
        ge=1,
        description=f"{_CONSTANT}'s constant: agent tokens of a full trajectory. Far above that, "
        "gradients are so small that max_grad_norm never clips.",
    )
    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Importance weights pi_old / pi_sampler where the log-probs of rollouts are not those of the update: in
    half precision, from a server, of stale conversations. They are of each token, which leaves little of a
    systematic gap's bias and adds no noise, or of each conversation, which leaves none and grows noisy with
    its length. auto: of conversations while the noise is small (the root mean square of the last step's gaps
    times the square root of a conversation's tokens is at most .3), else of tokens. See docs/overlap.md."""
    importance_cap: float | None = Field(
        default=None,
        gt=0.0,
        validation_alias=AliasChoices("importance_cap", "vllm_importance_sampling_clip_max"),
    )
    """The largest importance weight. None: 2 for a token, 5 for a conversation."""
    entropy_coef: float = Field(
        default=0.0,
        ge=0.0,
        validation_alias=AliasChoices("entropy_coef", "entropy_coefficient", "entropy_coeff"),
    )
    """Weight of the entropy bonus."""

    # Advantages
    advantage_estimator: Annotated[str, OneOf(ESTIMATORS)] = DEFAULT_ESTIMATOR
    """Unit of the credit: a whole conversation against its group, a turn against its siblings' turns or
    against other ways on from where it stood, a turn or token against a critic (GAE), or the outcome against
    its group plus turn rewards by GAE; see docs/algorithms.md."""
    baseline_type: Annotated[str, OneOf(BASELINES)] = "group_mean"
    """The baseline that a conversation's reward is compared with."""
    advantage_normalization: Scaling = Field(
        default="population",
        validation_alias=AliasChoices("advantage_normalization", "scale_rewards"),
        description="Standard deviation that advantages are divided by; False is none, True the "
        f"estimator's own. {_UNBIASED} have none, with a critic it is batch (centred, too) or none.",
    )
    group_strategy: Literal["none", "family"] = "none"
    """family: the deviation of advantage_normalization batch (with a critic the mean, too) is of the
    conversations of one family, so that no family's rewards drown another's; see docs/grouping.md."""
    reward_clip: float = Field(default=10.0, gt=0.0)
    """Rewards are clipped to ±this before comparison: a conversation's, or with per-turn credit each
    turn's."""
    advantage_clip: float | None = Field(default=None, gt=0.0)
    """Scaled advantages are clipped to ±this. Of G conversations compared with their own mean none is beyond
    the root of G - 1, so 3 acts only in groups of more than 10."""
    advantage_skip: float = Field(default=0.0, ge=0.0)
    """Tokens with an advantage nearer to 0 train nothing, no KL either: advantages then no longer sum to 0 in
    a group. 0 skips none."""
    min_group_size: int = Field(
        default=2,
        ge=1,
        description=f"A group with fewer scored members is left out of the step; {_LONE} have 1.",
    )
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount from one turn to the next; within a turn there is none."""
    gae_lambda: float = Field(default=0.95, ge=0.0, le=1.0)
    """GAE's trade of the critic's bias (0) for the rewards' noise (1)."""
    bootstrap_truncated: bool = True
    """A conversation cut by a limit is worth what the critic expects after the cut, too; false where the
    limit is part of the task."""

    # Critic, of the estimators that have one
    value_learning_rate: float = Field(default=1e-3, gt=0.0)
    """Learning rate of the value head, constant."""
    value_iterations: int = Field(default=4, ge=1)
    """Optimiser steps of the head on each batch."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Values move at most this far in a step, in units of reward."""
    value_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout of the value head, in training."""

    # KL to the reference model
    beta: float = Field(
        default=0.1,
        ge=0.0,
        validation_alias=AliasChoices("beta", "kl_coefficient", "kl_penalty_coeff", "kl_coef"),
    )
    """Weight of the KL to the reference (the weights at the start); 0 loads none."""
    use_reference_model: bool = True
    """False is the same as beta = 0."""
    kl_estimator: KLEstimator = "k3"
    """Per-token estimator."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """In the loss (times the live ratio), or k1 subtracted from the reward."""
    kl_controller: KLControllerKind = "fixed"
    """Movement of beta: not at all, in steps, or in proportion to the error."""
    kl_target: float = Field(default=0.01, gt=0.0)
    """KL per token that a moving beta steers to."""
    kl_horizon: int = Field(default=10000, ge=1)
    """Conversations over which ziegler's beta adapts."""

    distillation: DistillationSettings | None = Field(
        default=None,
        description="A teacher whose log-probs of the student's own tokens become their advantages, see "
        f"docs/distillation.md; brings loss_type {UNBIASED_LOSS} and beta 0. Unset: none.",
    )

    @model_validator(mode="after")
    def _fits_the_estimator(self) -> Self:
        """Refuse settings that differ from their default and mean nothing to the estimator."""
        name, estimator = self.advantage_estimator, ESTIMATORS[self.advantage_estimator]
        scaling = self.advantage_normalization
        if BASELINES[self.baseline_type].refuses_scaling and scaling != "none":
            raise ValueError(
                f"{self.baseline_type} is unbiased only unscaled: set advantage_normalization to none"
            )
        if scaling not in estimator.normalizations:
            allowed = " or ".join(estimator.normalizations)
            raise ValueError(
                f"advantage_normalization {scaling} does not go with advantage_estimator {name}: use "
                f"{allowed}"
            )
        if self.group_strategy != "none" and scaling != "batch":
            raise ValueError(
                f"group_strategy {self.group_strategy} divides the step's deviation among families, and "
                f"advantage_normalization {scaling} has none of the step: set it to batch"
            )
        if self.min_group_size < estimator.smallest_group:
            lone = alternatives(estimators_with(lambda other: other.group_default == 1))
            raise ValueError(
                f"advantage_estimator {name} compares conversations, and one alone has none to compare with: "
                f"min_group_size must be at least {estimator.smallest_group}, or use {lone}"
            )
        fields = UpdateSettings.model_fields
        changed = [field for field in fields if getattr(self, field) != fields[field].default]
        if "baseline_type" in changed and not estimator.baseline:
            raise ValueError(
                f"advantage_estimator {name} has a baseline of its own: leave baseline_type out, "
                f"or use {alternatives(estimators_with(lambda other: other.baseline))}"
            )
        if "gamma" in changed and estimator.per == "conversation":
            per_turn = estimators_with(lambda other: other.per != "conversation" and not other.critic)
            raise ValueError(
                f"gamma discounts between turns, which {name} does not tell apart: leave it at 1, "
                f"or set advantage_estimator to {alternatives([*per_turn, 'one with a critic'])}"
            )
        for field in _OF_A_CRITIC:
            if field in changed and estimator.critic is None:
                critics = ", ".join(estimators_with(lambda other: other.critic))
                raise ValueError(
                    f"advantage_estimator {name} has no critic: leave {field} out, or use one of {critics}"
                )
        return self

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        loss = LOSSES[self.loss_type]
        if self.kl_placement == "reward" and self.kl_estimator != "k1":
            raise ValueError("kl_placement reward is exact with k1 only: set kl_estimator to k1")
        if self.kl_controller != "fixed" and not self.uses_reference:
            raise ValueError("a moving beta needs beta > 0 and use_reference_model true")
        if self.dual_clip is not None and loss.clips != "both":
            raise ValueError(f"{self.loss_type} has no dual clip: leave dual_clip unset")
        if self.importance == "none" and self.importance_cap is not None:
            raise ValueError("importance_cap bounds weights, and importance none has none: leave one out")
        if self.distillation is not None and loss.level == "sequence":
            raise ValueError(
                f"distillation gives each token an advantage of its own, and {self.loss_type} weighs whole "
                f"conversations: leave loss_type at {UNBIASED_LOSS}"
            )
        return self

    @property
    def uses_reference(self) -> bool:
        return self.beta > 0 and self.use_reference_model
