"""TRL's `GRPOConfig` as our settings: each field is taken, mapped, set aside or refused (grpo_config.yaml).

TRL counts conversations and optimiser steps where we count prompts and batches. With G generations, p per
device, a accumulated and mu iterations, a step has p a / G prompts here, and `max_steps` is theirs over mu.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.settings import require_trl
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect, expect_that

_log = get_logger(__name__)
_TABLES = read_yaml(Path(__file__).with_name("grpo_config.yaml"))
FIELDS: Mapping[str, Mapping[str, str]] = _TABLES["fields"]
"""taken, mapped, refused, set_aside -> field of GRPOConfig -> our setting, how, or why."""
_OURS: Mapping[str, Mapping[str, str]] = _TABLES["values"]
"""Field of GRPOConfig -> its value -> ours; others are refused."""
TRAINER: Mapping[str, str] = _TABLES["trainer"]
"""Argument of GRPOTrainer that is not taken -> what to write instead."""
_NO_BOUND = 10**9
"""A bound that nothing reaches, where TRL has none."""


def ported_settings(args: Any, *, num_prompts: int | None) -> tuple[TrainingConfig, dict[str, Any]]:
    """A `GRPOConfig` as ours, its defaults too, and arguments of `AgentConfig`.

    `num_prompts`: rows of the training dataset; None where `max_steps` says how long it is. Raises
    ConfigurationError for the first field that cannot be followed, with what to do instead. What is set aside
    is logged.
    """
    require_trl()
    import trl

    kind: type[Any] = trl.GRPOConfig  # type: ignore[attr-defined]  # not in its __all__
    expect("args", args, kind, "give the GRPOConfig that the script makes")
    default = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu, bf16=args.bf16, fp16=args.fp16)
    names = {name for name, value in vars(args).items() if value != getattr(default, name, value)}
    for name, why in FIELDS["refused"].items():
        is_adamw = name == "optim" and args.optim == "adamw_torch"  # the default but for its kernel
        _expect(name not in names or is_adamw, args, name, why)
    if set_aside := {name: why for name, why in FIELDS["set_aside"].items() if name in names}:
        _log.warning("settings of GRPOConfig that change nothing here", **set_aside)
    sections: dict[str, dict[str, Any]] = {"training": {}, "agent": {}}
    for name, place in FIELDS["taken"].items():
        section, _, setting = place.partition(".")
        sections[section][setting] = getattr(args, name)
    training = {**sections["training"], **_loss(args), **_steps(args, num_prompts), **_run(args)}
    options = {"dtype": "float32", **(args.model_init_kwargs or {})}
    dtype = str(options.pop("dtype")).removeprefix("torch.")
    _expect(not options, args, "model_init_kwargs", "give dtype alone")
    agent = {"device": "cpu" if args.use_cpu else "auto", "history": "keep", **sections["agent"]}
    agent |= {"chat_template_kwargs": args.chat_template_kwargs or {}}
    return TrainingConfig(**training), {**agent, "dtype": _ours(args, "model_init_kwargs", dtype)}


def _ours(args: Any, name: str, value: str) -> str:
    """Our value of a field that has several."""
    _expect(value in _OURS[name], args, name, f"use one of {', '.join(_OURS[name])}")
    return _OURS[name][value]


def _expect(holds: object, args: Any, name: str, cure: str) -> None:
    if not holds:
        value = getattr(args, name)
        raise ConfigurationError(f"GRPOConfig: {name} {value!r} cannot be followed here: {cure}")


def _loss(args: Any) -> dict[str, Any]:
    level = args.importance_sampling_level
    _expect(level in ("token", "sequence"), args, "importance_sampling_level", "use token or sequence")
    by_sequence = level == "sequence"
    loss = _ours(args, "loss_type", args.loss_type + " by sequence" * by_sequence)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if LOSSES[loss].clips == "above":
        _expect(high > 1, args, "epsilon_high", "here it bounds the ratio itself: give one above 1, say 5")
        high -= 1
    beyond = args.delta is None or args.delta >= 1 + high
    _expect(beyond, args, "delta", f"give at least 1 + epsilon_high, {1 + high:g}")
    of_tokens = not args.entropy_coef or LOSSES[loss].averaging == "token"
    _expect(of_tokens, args, "entropy_coef", "TRL's bonus is a mean over tokens: use a loss that is one")
    corrects = args.use_bias_correction_kl or not args.beta
    _expect(corrects, args, "use_bias_correction_kl", "the KL always has the ratio: leave it true")
    settings = {"loss_length": args.max_completion_length} if LOSSES[loss].averaging == "constant" else {}
    return settings | {
        "loss_type": loss,
        "clip_ratio_high": high,
        "advantage_normalization": _ours(args, "scale_rewards", args.scale_rewards),
        "reward_clip": _NO_BOUND,
        "dropout": not args.disable_dropout,
        "max_grad_norm": args.max_grad_norm or _NO_BOUND,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    }


def _steps(args: Any, num_prompts: int | None) -> dict[str, Any]:
    """How long the run is, how much of it one step, and the learning rate's course."""
    passes, size, mu = args.gradient_accumulation_steps, args.num_generations, args.num_iterations
    _expect(args.steps_per_generation == passes, args, "steps_per_generation", "leave it at what it is unset")
    _expect(mu >= 1, args, "num_iterations", "give a whole number from 1 on")
    per_pass, rest = divmod(args.per_device_train_batch_size, size)
    if rest:  # a group lies in several of TRL's passes; here in one
        per_pass, (passes, rest) = 1, divmod(passes * args.per_device_train_batch_size, size)
    _expect(not rest, args, "per_device_train_batch_size", "make it a multiple of num_generations")
    prompts, updates = per_pass * passes * args.world_size, args.max_steps
    if updates <= 0:
        _expect(num_prompts is not None, args, "max_steps", "there is no dataset to count: set it")
        batches = (num_prompts or 0) // prompts
        expect_that(batches > 0, "train_dataset", f"have the {prompts} prompts of a step", num_prompts)
        _expect(0 < args.num_train_epochs < math.inf, args, "num_train_epochs", "give a number above 0")
        updates = math.ceil(args.num_train_epochs * batches * mu)
    steps, warmup = math.ceil(updates / mu), math.ceil(args.get_warmup_steps(updates) / mu)
    kind, options = str(args.lr_scheduler_type.value), dict(args.lr_scheduler_kwargs or {})
    low = 0.0
    if kind == "cosine_with_min_lr":
        _expect(args.learning_rate > 0, args, "learning_rate", "give one above 0")
        low = options.pop("min_lr_rate", None) or options.pop("min_lr", 0.0) / args.learning_rate
    _expect(not options, args, "lr_scheduler_kwargs", "only those of cosine_with_min_lr are")
    _expect(warmup <= steps, args, "warmup_steps", f"give at most the run's {steps}")
    warms = kind != "inverse_sqrt" or warmup > 0
    _expect(warms, args, "warmup_steps", "inverse_sqrt falls in units of the warm-up: give one")
    return {
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": passes,
        "num_processes": args.world_size,
        "max_steps": steps,
        "lr_scheduler_type": _ours(args, "lr_scheduler_type", kind),
        "lr_min_ratio": low,
        # half a step less, so that rounding up gives the same number
        "warmup_ratio": 0.0 if kind == "constant" else max(0.0, (warmup - 0.5) / steps),
    }


def _run(args: Any) -> dict[str, Any]:
    every: dict[str, int] = {}
    for name, steps in (("save", args.save_steps), ("eval", args.eval_steps or args.logging_steps)):
        strategy = str(getattr(args, f"{name}_strategy").value)
        _expect(strategy in ("no", "steps"), args, f"{name}_strategy", "use steps or no")
        _expect(steps >= 1 or strategy == "no", args, f"{name}_steps", "give a number of steps")
        every[f"{name}_steps"] = 0 if strategy == "no" else math.ceil(steps / args.num_iterations)
    by_reward = args.metric_for_best_model in ("reward", "eval_reward") or not args.load_best_model_at_end
    _expect(by_reward, args, "metric_for_best_model", "the best is by reward: give eval_reward")
    checkpoints = {"save_total_limit": args.save_total_limit or _NO_BOUND, "metric_for_best": "eval/reward"}
    return {**every, **checkpoints, "progress": not args.disable_tqdm, "run_name": args.run_name or "run"}
