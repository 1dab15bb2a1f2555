"""Our settings by TRL's names: every field of `TrainingConfig` is ours, mapped, or refused with a hint.

Notation: G is `num_generations`. TRL counts rows (conversations) and optimiser steps where we count episodes
(scenarios) and batches, so rows are G times episodes, and steps `num_iterations` times ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stateset_agents.algorithms.policy_losses import LOSSES, clipped_surrogate, clipped_weight
from stateset_agents.runtime.named_code import library
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS, estimators_with
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings, alternatives

if TYPE_CHECKING:
    import torch
    from torch import Tensor


INSTALL = 'pip install "trl>=1.16,<1.17"'


class TrlSettings(Settings):
    """Settings of TRL that `TrainingConfig` does not have."""

    generation: Literal["auto", "own", "trl"] = "auto"
    """The sampler: this package's engine on a copy of the weights (own), or TRL's own generation (trl). auto
    is trl where `options` ask for vLLM or continuous batching, else own."""
    options: Mapping[str, Any] = Field(default={})
    """GRPOConfig's arguments that no setting of `training` stands for, such as use_vllm, vllm_mode or
    report_to."""

    @property
    def generates(self) -> bool:
        """True where TRL samples."""
        batched = any(self.options.get(name) for name in ("use_vllm", "use_transformers_continuous_batching"))
        return self.generation == "trl" or (self.generation == "auto" and batched)


def require_trl() -> None:
    """Raises ConfigurationError where TRL is missing, or is another than the one this was written for."""
    trl = library("trl", f"training by TRL needs trl: {INSTALL}")
    if not trl.__version__.startswith("1.16."):
        raise ConfigurationError(
            f"training by TRL needs trl 1.16, and {trl.__version__} is installed: {INSTALL}"
        )


_BY_US = "or train with MultiTurnGRPOTrainer"
_FIXED_BETA = f"TRL's beta stands still: leave it out, {_BY_US}"
_FIXED_TEMPERATURE = f"TRL's temperature stands still: leave it out, {_BY_US}"

REFUSED: Mapping[str, str] = {
    "micro_batch_tokens": "TRL forwards whole passes: lower per_device_train_batch_size and raise "
    "gradient_accumulation_steps",
    "freeze_vision": f"pictures are not handed to TRL: leave it out, {_BY_US}",
    "dropout": f"rollouts have none, and TRL's ratio would see it: leave it out, {_BY_US}",
    "max_staleness": f"TRL's update and rollouts take turns: leave it at 0, {_BY_US}",
    "num_processes": f"this training holds the whole model in one: leave it at 1, {_BY_US}",
    "parallelism": f"it is of several processes: leave it out, {_BY_US}",
    "advantage_skip": f"TRL's loss has all tokens: leave it at 0, {_BY_US}",
    "group_sizes": f"TRL's groups are of one size: leave it at fixed, {_BY_US}",
    "log_learner_logprobs": f"TRL's passes keep theirs: leave it out, {_BY_US}",
    **dict.fromkeys(("call_bias", "call_bias_steps"), f"TRL's loss has no masks: leave it at 0, {_BY_US}"),
    "importance": f"TRL's weights have another form: leave it at auto, {_BY_US}",
    "importance_cap": f"TRL's weights have another form: leave it out, {_BY_US}",
    "entropy_coef": f"TRL averages its bonus in another way than its loss: leave it at 0, {_BY_US}",
    "kl_estimator": f"TRL has k3 only: leave it out, {_BY_US}",
    "kl_placement": f"TRL has it in the loss only: leave it out, {_BY_US}",
    "kl_controller": f"TRL's beta stands still: leave it at fixed, {_BY_US}",
    **dict.fromkeys(("kl_target", "kl_horizon"), _FIXED_BETA),
    **dict.fromkeys(
        ("temperature_schedule", "temperature_min", "temperature_decay", "temperature_target"),
        _FIXED_TEMPERATURE,
    ),
}
"""Fields that only fit at their default -> what to do instead."""

_TRL_LOSSES: Mapping[tuple[Callable[..., Tensor], str], str] = {
    (clipped_surrogate, "trajectory"): "grpo",
    (clipped_surrogate, "token"): "dapo",
    (clipped_surrogate, "constant"): "dr_grpo",
    (clipped_weight, "token"): "cispo",
}
"""(loss of a token, averaging) -> TRL's name; the level of its ratio is TRL's `importance_sampling_level`."""


def check_mappable(config: TrainingConfig, settings: TrlSettings) -> None:
    """Raises ConfigurationError, with a hint, for what TRL would do otherwise than `config` says."""
    values = dict(config)
    for name, hint in REFUSED.items():
        if values[name] != TrainingConfig.model_fields[name].default:
            raise ConfigurationError(f"{name} {values[name]!r} does not go with TRL; {hint}")
    if config.row_layout == "packed":
        raise ConfigurationError(
            f"row_layout 'packed' does not go with TRL, which pads: leave it out, {_BY_US}"
        )
    if config.num_generations < 2:
        raise ConfigurationError(
            f"num_generations {config.num_generations!r} does not go with TRL, which compares: at least 2"
        )
    _check_loss(config)
    owned = sorted(grpo_keys() & settings.options.keys())
    if owned:
        raise ConfigurationError(
            f"trl.options: {owned[0]} follows from the settings of `training`: leave it out"
        )
    hub = sorted(name for name in settings.options if "hub" in name or name == "log_completions")
    if hub:
        raise ConfigurationError(
            f"trl.options: {hub[0]} needs a folder of TRL's own, and a run has ours: its checkpoints/*/model "
            "is as the hub has models, its rollouts.jsonl has every conversation"
        )
    sharded = sorted({"deepspeed", "fsdp", "parallelism_config"} & settings.options.keys())
    if sharded or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        setting = f"trl.options: {sharded[0]}" if sharded else f"WORLD_SIZE {os.environ['WORLD_SIZE']}"
        raise ConfigurationError(
            f"{setting} is for several processes, and this training runs in one that holds the whole model: "
            "leave it out and start without a launcher"
        )
    if settings.generation == "own" and settings.options.get("use_vllm"):
        raise ConfigurationError("generation 'own' and use_vllm contradict each other: leave one out")


def _check_loss(config: TrainingConfig) -> None:
    loss = LOSSES[config.loss_type]
    if (loss.token_loss, loss.averaging) not in _TRL_LOSSES:
        raise ConfigurationError(
            f"loss_type {config.loss_type!r} does not go with TRL: use cispo or dapo, {_BY_US}"
        )
    per_turn = ESTIMATORS[config.advantage_estimator].per != "conversation"
    if loss.level == "sequence" and (config.uses_reference or per_turn):
        one_per_conversation = estimators_with(lambda estimator: estimator.per == "conversation")
        raise ConfigurationError(
            f"loss_type {config.loss_type!r} in TRL weighs KL and turns by the ratio of the whole sequence: "
            f"set beta to 0 and advantage_estimator to {alternatives(one_per_conversation)}, {_BY_US}"
        )
    if config.dual_clip is not None and config.dual_clip < 1 + _clips(config)[1]:
        raise ConfigurationError(
            f"dual_clip {config.dual_clip!r} does not go with TRL: give at least {1 + _clips(config)[1]:g}"
        )


def _clips(config: TrainingConfig) -> tuple[float, float]:
    low, high = config.clip_ratio, config.clip_ratio_high
    return low, low if high is None else high


_SAME_NAMES = (
    *("num_generations", "num_iterations", "gradient_accumulation_steps"),
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "temperature"),
)
"""Settings that TRL has by the same names."""


def grpo_arguments(
    config: TrainingConfig,
    settings: TrlSettings,
    *,
    device: torch.device,
    max_new_tokens: int,
    folder: str,
    num_parameters: int = 0,
) -> dict[str, Any]:
    """`GRPOConfig`'s arguments. `max_new_tokens` bounds one turn where TRL samples; `folder` is TRL's own;
    `num_parameters` are the model's.

    The learning rate's schedule is not among them: `ConversationTrainer` takes ours.
    """
    from stateset_agents.runs.optimizer import autocast_dtype

    low, high = _clips(config)
    loss = LOSSES[config.loss_type]
    half = str(autocast_dtype(config.precision, device, num_parameters)).removeprefix("torch.")
    return {
        **settings.options,
        **{name: getattr(config, name) for name in _SAME_NAMES},
        "gradient_checkpointing": config.gradient_checkpointing is True,
        "output_dir": folder,
        "seed": config.seed % 2**32,  # numpy's generators take no more
        "use_cpu": device.type == "cpu",
        "bf16": half == "bfloat16",
        "fp16": half == "float16",
        "max_steps": config.num_steps() * config.num_iterations,
        "per_device_train_batch_size": config.per_device_train_batch_size * config.num_generations,
        "loss_type": _TRL_LOSSES[loss.token_loss, loss.averaging],
        "importance_sampling_level": loss.level,
        "epsilon": low,
        "epsilon_high": 1 + high if loss.clips == "above" else high,  # there it bounds the ratio itself
        "delta": config.dual_clip,
        "beta": config.beta if config.uses_reference else 0.0,
        "use_bias_correction_kl": True,  # the live ratio times k3, as ours
        "top_p": 1.0,
        "top_k": 0,
        "max_completion_length": max_new_tokens,
        "disable_dropout": True,
        "scale_rewards": "none",  # advantages are ours
        "mask_truncated_completions": False,
        "shuffle_dataset": False,  # the scenarios come in our order
        "remove_unused_columns": False,
        "save_strategy": "no",  # checkpoints are ours
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": settings.options.get("report_to", "none"),
    }


def grpo_keys() -> frozenset[str]:
    """The arguments that `grpo_arguments` sets, and others of GRPOConfig with the same meaning."""
    import torch

    device = torch.device("cpu")
    mapped = grpo_arguments(TrainingConfig(), TrlSettings(), device=device, max_new_tokens=1, folder="")
    others = {"lr_scheduler_type", "lr_scheduler_kwargs", "warmup_ratio", "warmup_steps", "num_train_epochs"}
    others |= {"generation_batch_size", "steps_per_generation", "reward_weights", "min_p"}
    others |= {"repetition_penalty", "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile"}
    others |= {"off_policy_mask_threshold", "multi_objective_aggregation", "sync_ref_model"}
    return frozenset(mapped.keys() | others) - {"report_to"}
