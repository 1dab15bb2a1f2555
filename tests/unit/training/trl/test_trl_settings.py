"""Every training setting is ours in a training by TRL, mapped to TRL's words, or refused with a cure."""

from __future__ import annotations

import sys

import pytest
import torch

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trl.settings import (
    REFUSED,
    TrlSettings,
    check_mappable,
    grpo_arguments,
    require_trl,
)
from stateset_agents.types.errors import ConfigurationError

CHANGED = {
    "seed": {"seed": 5},
    "num_episodes": {"num_episodes": 8},
    "max_steps": {"max_steps": 3},
    "num_generations": {"num_generations": 4},
    "per_device_train_batch_size": {"per_device_train_batch_size": 3},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "weight_decay": {"weight_decay": 0.3},
    "adam_beta1": {"adam_beta1": 0.8},
    "adam_beta2": {"adam_beta2": 0.95},
    "max_grad_norm": {"max_grad_norm": 0.2},
    "num_iterations": {"num_iterations": 2},
    "precision": {"precision": "bf16"},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "loss_type": {"loss_type": "dapo"},
    "clip_ratio": {"clip_ratio": 0.1},
    "clip_ratio_high": {"clip_ratio_high": 0.3},
    "dual_clip": {"dual_clip": 3.0},
    "beta": {"beta": 0.5},
    "use_reference_model": {"use_reference_model": False},
    "temperature": {"temperature": 0.8},
}
"""What each mapped setting is changed to; loss_length, the trainer's constant, has the gradients' test."""

MAPPED = {*CHANGED, "loss_length"}

OURS = frozenset(
    {
        *("profile", "lora", "row_layout", "fast_linears", "learning_rate", "lr_scheduler_type"),
        "rollout_sleep",
        *("lr_min_ratio", "warmup_ratio", "advantage_estimator", "baseline_type", "advantage_normalization"),
        "group_strategy",
        *(
            "reward_clip",
            "advantage_clip",
            "min_group_size",
            "gamma",
            "num_branches",
            "gae_lambda",
            "bootstrap_truncated",
        ),
        *("value_learning_rate", "value_iterations", "value_clip", "value_dropout"),
        *("max_concurrent", "scheduling", "episode_retries", "turn_timeout", "reward_timeout"),
        *("turn_retries", "reward_retries", "retry_backoff", "breaker_failures", "breaker_pause"),
        *("outage_patience", "max_failed_steps", "output_dir", "run_name", "save_steps"),
        *("save_total_limit", "eval_steps"),
        *("eval_episodes", "metric_for_best", "early_stopping_patience", "early_stopping_threshold"),
        *("multi_objective_aggregation", "reward_weights", "scenario_order", "strata", "difficulty"),
        *("success_memory", "stages", "track_success", "replay_share", "distillation"),
        *("load_best_at_end", "log_rollouts", "progress", "report_to", "episode_timeout", "max_resamples"),
    }
)
"""Fields that this package's own code reads in a training by TRL, too."""

UNFIT = {
    "group_sizes": "success",
    "micro_batch_tokens": 4096,
    "dropout": True,
    "freeze_vision": True,
    "max_staleness": 1,
    "num_processes": 2,
    "parallelism": "fsdp2",
    "log_learner_logprobs": True,
    "call_bias": 2.0,
    "call_bias_steps": 5,
    "importance": "token",
    "importance_cap": 2.0,
    "entropy_coef": 0.1,
    "kl_estimator": "k2",
    "advantage_skip": 0.1,
    "kl_placement": "reward",
    "kl_controller": "adaptive",
    "kl_target": 0.5,
    "kl_horizon": 5,
    "temperature_schedule": "adaptive",
    "temperature_min": 0.5,
    "temperature_decay": 0.9,
    "temperature_target": 0.1,
}


def arguments(**settings):
    config = TrainingConfig(**settings)
    check_mappable(config, TrlSettings())
    return grpo_arguments(
        config, TrlSettings(), device=torch.device("cpu"), max_new_tokens=9, folder="somewhere"
    )


def test_every_setting_stands_in_one_of_the_three_tables():
    assert OURS | MAPPED | REFUSED.keys() == TrainingConfig.model_fields.keys()
    assert len(OURS) + len(MAPPED) + len(REFUSED) == len(TrainingConfig.model_fields)


@pytest.mark.parametrize("name", sorted(MAPPED - {"loss_length"}))
def test_a_mapped_setting_changes_what_trl_is_told(name):
    assert arguments(**CHANGED[name]) != arguments()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_setting_that_trl_cannot_follow_is_refused_with_a_cure(name):
    given = {name: UNFIT[name]} | ({"kl_estimator": "k1"} if name == "kl_placement" else {})
    given |= {"num_processes": 2} if name == "parallelism" else {}
    given |= {"call_bias": 2.0, "call_bias_steps": 5} if name.startswith("call_bias") else {}
    with pytest.raises(ConfigurationError, match=r"does not go with TRL; .*(leave it|lower)") as refusal:
        arguments(**given)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_type": "reinforce"}, "use cispo or dapo"),
        ({"loss_type": "gspo"}, "set beta to 0"),
        (
            {"loss_type": "gspo", "beta": 0.0, "advantage_estimator": "turn_group"},
            "advantage_estimator to group",
        ),
        ({"dual_clip": 1.1}, "at least 1.2"),
        ({"row_layout": "packed"}, "which pads"),
        ({"num_generations": 1, "advantage_estimator": "turn_gae"}, "at least 2"),
    ],
)
def test_values_that_trl_cannot_follow_are_refused_with_a_cure(settings, said):
    with pytest.raises(ConfigurationError, match=said):
        arguments(**settings)


def test_counts_are_in_trl_s_units():
    made = arguments(
        max_steps=10,
        num_iterations=2,
        num_generations=4,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
    )
    assert made["max_steps"] == 20  # optimiser steps
    assert made["per_device_train_batch_size"] == 12  # conversations
    assert made["gradient_accumulation_steps"] == 5


def test_options_are_passed_through_and_must_not_say_what_a_setting_says():
    passed = TrlSettings(options={"use_vllm": True, "vllm_mode": "server"})
    config = TrainingConfig()
    check_mappable(config, passed)
    made = grpo_arguments(config, passed, device=torch.device("cpu"), max_new_tokens=9, folder="x")
    assert (made["use_vllm"], made["vllm_mode"]) == (True, "server")
    for name in ("beta", "output_dir", "scale_rewards", "warmup_ratio", "steps_per_generation"):
        with pytest.raises(ConfigurationError, match=f"trl.options: {name} follows from the settings"):
            check_mappable(config, TrlSettings(options={name: 1}))


def test_what_needs_a_folder_of_trl_s_own_is_refused():
    for name in ("push_to_hub", "hub_model_id", "log_completions"):
        with pytest.raises(ConfigurationError, match=rf"trl\.options: {name} needs a folder of TRL's own"):
            check_mappable(TrainingConfig(), TrlSettings(options={name: True}))


def test_several_processes_are_refused(monkeypatch):
    for name in ("deepspeed", "fsdp"):
        with pytest.raises(ConfigurationError, match=rf"trl\.options: {name} is for several processes"):
            check_mappable(TrainingConfig(), TrlSettings(options={name: "on"}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE 2 is for several processes"):
        check_mappable(TrainingConfig(), TrlSettings())


def test_a_missing_or_another_trl_gives_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(
        ConfigurationError, match=r'^training by TRL needs trl: pip install "trl>=1.16,<1.17"$'
    ):
        require_trl()
    monkeypatch.delitem(sys.modules, "trl")
    monkeypatch.setattr("trl.__version__", "1.17.0")
    with pytest.raises(ConfigurationError, match=r"1\.17\.0 is installed: pip install"):
        require_trl()
