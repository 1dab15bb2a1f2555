"""TRL's `GRPOConfig` as our settings: each field is taken, mapped, set aside or refused (grpo_config.yaml).

TRL counts conversations and optimiser steps where we count prompts and batches. With G generations, p per
device, a accumulated and mu iterations, a step has p a / G prompts here, and `max_steps` is theirs over mu.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.settings import require_trl
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect, expect_that

if TYPE_CHECKING:
    from trl import GRPOConfig

_log = get_logger(__name__)
FIELDS: Mapping[str, Mapping[str, str]] = read_yaml(Path(__file__).with_name("grpo_config.yaml"))
"""taken, mapped, refused, set_aside -> field of GRPOConfig -> our setting, how, or why."""
_NO_BOUND = 1e9
"""A bound that nothing reaches, where TRL has none."""
_SCALINGS = {"group": "sample", "batch": "batch", "none": "none"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "auto": "auto"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortedSettings:
    """A `GRPOConfig` as our settings."""

    training: TrainingConfig
    agent: Mapping[str, Any]
    """Arguments of `AgentConfig`, but for the model's name."""
    set_aside: Mapping[str, str]
    """The fields that were set and change nothing here -> why."""


def ported_settings(args: GRPOConfig, *, num_prompts: int | None) -> PortedSettings:
    """TRL's settings as ours, its defaults too, where ours differ.

    `num_prompts`: rows of the training dataset; None where `max_steps` says how long it is. Raises
    ConfigurationError for the first field that cannot be followed, with what to do instead. What is set aside
    is logged.
    """
    require_trl()
    from trl import GRPOConfig

    expect("args", args, GRPOConfig, "give the GRPOConfig that the script makes")
    default = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16, fp16=args.fp16)
    given = {name: value for name, value in vars(args).items() if value != getattr(default, name, value)}
    for name, why in FIELDS["refused"].items():
        _expect(name not in given or (name, str(given[name])) == ("optim", "adamw_torch"), args, name, why)
    set_aside = {name: why for name, why in FIELDS["set_aside"].items() if name in given}
    if set_aside:
        _log.warning("settings of GRPOConfig that change nothing here", **set_aside)
    sections: dict[str, dict[str, Any]] = {"training": {}, "agent": {}}
    for name, place in FIELDS["taken"].items():
        section, _, setting = place.partition(".")
        sections[section][setting] = getattr(args, name)
    training = {**sections["training"], **_loss(args), **_steps(args, num_prompts), **_run(args)}
    agent = {**sections["agent"], **_agent(args)}
    return PortedSettings(training=TrainingConfig(**training), agent=agent, set_aside=set_aside)


def _expect(holds: object, args: GRPOConfig, name: str, cure: str) -> None:
    if not holds:
        raise ConfigurationError(
            f"GRPOConfig: {name} {getattr(args, name)!r} cannot be followed here: {cure}"
        )


def _loss(args: GRPOConfig) -> dict[str, Any]:
    loss = args.loss_type
    if args.importance_sampling_level == "sequence":
        _expect(loss == "grpo", args, "importance_sampling_level", "with loss_type grpo it is gspo")
        loss = "gspo"
    known = loss in ("grpo", "dapo", "dr_grpo", "cispo", "gspo")
    _expect(known, args, "loss_type", "use grpo, dapo (bnpo but for its denominator), dr_grpo or cispo")
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if LOSSES[loss].clips == "above":
        _expect(high > 1, args, "epsilon_high", "cispo's bounds the ratio itself: give one above 1, say 5")
        high -= 1
    high_enough = args.delta is None or args.delta >= 1 + high
    _expect(high_enough, args, "delta", f"give at least 1 + epsilon_high, {1 + high:g}")
    of_tokens = not args.entropy_coef or LOSSES[loss].averaging == "token"
    _expect(of_tokens, args, "entropy_coef", "TRL's bonus is a mean over tokens: use dapo or cispo")
    corrects = args.use_bias_correction_kl or not args.beta
    _expect(corrects, args, "use_bias_correction_kl", "the KL always has the ratio: leave it true")
    return {
        "loss_type": loss,
        "clip_ratio_high": high,
        "entropy_coef": args.entropy_coef,
        "advantage_normalization": _SCALINGS[args.scale_rewards],
        "reward_clip": _NO_BOUND,
        "dropout": not args.disable_dropout,
        "max_grad_norm": args.max_grad_norm or _NO_BOUND,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        **({"loss_length": args.max_completion_length} if loss == "dr_grpo" else {}),
    }


def _steps(args: GRPOConfig, num_prompts: int | None) -> dict[str, Any]:
    """How long the run is, how much of it one step, and the learning rate's course."""
    one_each = args.steps_per_generation == args.gradient_accumulation_steps
    _expect(one_each, args, "steps_per_generation", "leave it and generation_batch_size out")
    per_pass, rest = divmod(args.per_device_train_batch_size, args.num_generations)
    passes = args.gradient_accumulation_steps
    if rest:  # a group lies in several of TRL's passes; here it is one pass
        per_pass, (passes, rest) = 1, divmod(passes * args.per_device_train_batch_size, args.num_generations)
        _expect(not rest, args, "per_device_train_batch_size", "make it a multiple of num_generations")
    prompts = per_pass * passes * args.world_size
    if args.max_steps > 0:
        updates = args.max_steps
    else:
        _expect(num_prompts is not None, args, "max_steps", "there is no dataset to count: set it")
        per_epoch = (num_prompts or 0) // prompts * args.num_iterations
        expect_that(per_epoch > 0, "train_dataset", f"have the {prompts} prompts of a step", num_prompts)
        updates = math.ceil(args.num_train_epochs * per_epoch)
    steps = math.ceil(updates / args.num_iterations)
    warmup = math.ceil(args.get_warmup_steps(updates) / args.num_iterations)
    kind, options = str(args.lr_scheduler_type.value), dict(args.lr_scheduler_kwargs or {})
    low = 0.0
    if kind == "cosine_with_min_lr":
        low = options.pop("min_lr_rate", None) or options.pop("min_lr", 0.0) / args.learning_rate
    _expect(not options, args, "lr_scheduler_kwargs", "only those of cosine_with_min_lr are")
    kinds = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr")
    known = kind in kinds or (kind == "inverse_sqrt" and warmup > 0)
    _expect(known, args, "lr_scheduler_type", f"use one of {', '.join(kinds)}, or inverse_sqrt with warm-up")
    return {
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": passes,
        "num_processes": args.world_size,
        "max_steps": steps,
        "lr_scheduler_type": "cosine" if kind == "cosine_with_min_lr" else kind,
        "lr_min_ratio": low,
        # half a step less, so that rounding up gives the same number
        "warmup_ratio": 0.0 if kind == "constant" else max(0.0, (warmup - 0.5) / steps),
    }


def _run(args: GRPOConfig) -> dict[str, Any]:
    saves, evaluates = args.save_strategy.value, args.eval_strategy.value
    _expect(saves in ("no", "steps"), args, "save_strategy", "use steps or no")
    _expect(evaluates in ("no", "steps"), args, "eval_strategy", "use steps or no")
    _expect(args.save_steps >= 1 and args.save_steps % 1 == 0, args, "save_steps", "give a number of steps")
    every = (args.eval_steps or args.logging_steps) if evaluates == "steps" else 0
    _expect(every % 1 == 0, args, "eval_steps", "give a number of steps")
    by_reward = args.metric_for_best_model in ("reward", "eval_reward")
    best = by_reward or not args.load_best_model_at_end
    _expect(best, args, "metric_for_best_model", "the best is by reward: give eval_reward")
    return {
        "save_steps": math.ceil(args.save_steps / args.num_iterations) if saves == "steps" else 0,
        "save_total_limit": args.save_total_limit or int(_NO_BOUND),
        "eval_steps": math.ceil(every / args.num_iterations),
        "metric_for_best": "eval/reward",
        "report_to": tuple(args.report_to),
        "progress": not args.disable_tqdm,
        **({} if args.run_name is None else {"run_name": args.run_name}),
    }


def _agent(args: GRPOConfig) -> dict[str, Any]:
    options = dict(args.model_init_kwargs or {})
    dtype = _DTYPES.get(str(options.pop("dtype", "float32")).removeprefix("torch."))
    _expect(not options and dtype, args, "model_init_kwargs", "give the model's folder, and dtype alone")
    device = {"device": "cpu"} if args.use_cpu else {}
    return {"dtype": dtype, "chat_template_kwargs": dict(args.chat_template_kwargs or {}), **device}
