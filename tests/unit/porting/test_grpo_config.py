"""TRL's GRPOConfig as our settings: every field of the installed one, its defaults, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.porting.grpo_config import FIELDS, TRAINER, ported_settings
from stateset_agents.porting.trl import TrlEnvironment, from_trl
from stateset_agents.runs.settings import schedule
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def ported(num_prompts: int | None = 100, **settings: Any) -> tuple[TrainingConfig, AgentConfig]:
    args = GRPOConfig(**{"output_dir": "out", "use_cpu": True, **settings})
    training, agent = ported_settings(args, num_prompts=num_prompts)
    return training, AgentConfig(**agent)


def test_every_field_of_the_installed_config_is_taken_mapped_set_aside_or_refused_once() -> None:
    named = [name for fields in FIELDS.values() for name in fields]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(GRPOConfig))
    assert FIELDS.keys() == {"taken", "mapped", "refused", "set_aside"}
    assert all(isinstance(text, str) and text for fields in FIELDS.values() for text in fields.values())
    sections = {"training": TrainingConfig.field_names(), "agent": AgentConfig.field_names()}
    for place in FIELDS["taken"].values():
        section, _, setting = place.partition(".")
        assert setting in sections[section], place


def test_trl_s_defaults_are_taken_where_ours_differ() -> None:
    training, agent = ported()
    assert {
        "learning_rate": 1e-6,
        "lr_scheduler_type": "linear",
        "warmup_ratio": 0.0,
        "weight_decay": 0.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "clip_ratio": 0.2,
        "clip_ratio_high": 0.2,  # our dapo has .28
        "advantage_normalization": "sample",
        "num_generations": 8,
        "per_device_train_batch_size": 1,  # a prompt, of 8 conversations
        "gradient_accumulation_steps": 1,
        "max_steps": 300,  # 3 epochs of 100 prompts
        "precision": "bf16",
        "gradient_checkpointing": True,
        "dropout": True,
        "seed": 42,
        "save_steps": 500,
        "eval_steps": 0,
        "output_dir": "out",
    }.items() <= dict(training).items()
    assert training.reward_clip == training.save_total_limit == 10**9
    assert (agent.max_new_tokens, agent.dtype, agent.device, agent.history) == (512, "fp32", "cpu", "keep")


TAKEN: list[tuple[str, Any, str]] = [
    ("learning_rate", 3e-5, "learning_rate"),
    ("weight_decay", 0.1, "weight_decay"),
    ("adam_beta1", 0.8, "adam_beta1"),
    ("adam_beta2", 0.95, "adam_beta2"),
    ("num_generations", 4, "num_generations"),
    ("num_iterations", 2, "num_iterations"),
    ("temperature", 0.7, "temperature"),
    ("beta", 0.04, "beta"),
    ("epsilon", 0.1, "clip_ratio"),
    ("delta", 4.0, "dual_clip"),
    ("multi_objective_aggregation", "normalize_then_sum", "multi_objective_aggregation"),
    ("output_dir", "elsewhere", "output_dir"),
    ("seed", 7, "seed"),
    ("gradient_checkpointing", False, "gradient_checkpointing"),
    ("entropy_coef", 0.01, "entropy_coef"),
    ("max_completion_length", 99, "max_new_tokens"),
    ("top_p", 0.9, "top_p"),
    ("top_k", 40, "top_k"),
    ("chat_template_kwargs", {"enable_thinking": False}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("name", "value", "setting"), TAKEN, ids=[name for name, *_ in TAKEN])
def test_a_field_that_is_taken_has_its_value_here(name: str, value: Any, setting: str) -> None:
    training, agent = ported(**{name: value})
    assert getattr(training if setting in TrainingConfig.field_names() else agent, setting) == value


def test_no_field_that_is_taken_is_left_out_of_that_test() -> None:
    elsewhere = {"load_best_model_at_end", "report_to"}
    assert FIELDS["taken"].keys() - elsewhere == {name for name, *_ in TAKEN} - {"chat_template_kwargs"}


MAPPED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"per_device_train_batch_size": 16}, {"per_device_train_batch_size": 2, "max_steps": 150}),
    (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "num_generations": 4},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 75},
    ),
    ({"num_train_epochs": 0.5}, {"max_steps": 50}),
    ({"max_steps": 10, "num_iterations": 2}, {"max_steps": 5}),
    ({"max_steps": 10, "lr_scheduler_type": "cosine"}, {"lr_scheduler_type": "cosine"}),
    ({"lr_scheduler_type": "constant_with_warmup"}, {"lr_scheduler_type": "constant"}),
    ({"lr_scheduler_type": "constant", "warmup_steps": 5}, {"warmup_ratio": 0.0}),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "cosine", "lr_min_ratio": 0.1},
    ),
    (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 5e-7}},
        {"lr_min_ratio": 0.5},
    ),
    ({"max_grad_norm": 0.3}, {"max_grad_norm": 0.3}),
    ({"max_grad_norm": 0.0}, {"max_grad_norm": 1e9}),
    ({"bf16": False}, {"precision": "fp32"}),
    ({"bf16": False, "fp16": True}, {"precision": "fp16"}),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"loss_type": "gspo"}),
    ({"loss_type": "dr_grpo", "max_completion_length": 77}, {"loss_type": "dr_grpo", "loss_length": 77}),
    ({"loss_type": "cispo", "epsilon_high": 5.0}, {"clip_ratio_high": 4.0}),
    ({"epsilon_high": 0.28}, {"clip_ratio": 0.2, "clip_ratio_high": 0.28}),
    ({"scale_rewards": False}, {"advantage_normalization": "none"}),
    ({"scale_rewards": "batch"}, {"advantage_normalization": "batch"}),
    ({"disable_dropout": True}, {"dropout": False}),
    ({"save_strategy": "no"}, {"save_steps": 0}),
    ({"save_steps": 20, "save_total_limit": 3}, {"save_steps": 20, "save_total_limit": 3}),
    ({"eval_strategy": "steps", "eval_steps": 5}, {"eval_steps": 5}),
    ({"eval_strategy": "steps"}, {"eval_steps": 10}),
    ({"eval_strategy": "steps", "eval_steps": 6, "num_iterations": 2}, {"eval_steps": 3}),
    ({"report_to": "tensorboard"}, {"report_to": ("tensorboard",)}),
    ({"run_name": "mine", "disable_tqdm": True}, {"run_name": "mine", "progress": False}),
    (
        {
            **{"eval_strategy": "steps", "eval_steps": 500, "metric_for_best_model": "eval_reward"},
            "load_best_model_at_end": True,
        },
        {"load_best_at_end": True, "metric_for_best": "eval/reward", "eval_steps": 500},
    ),
    ({"optim": "adamw_torch"}, {"learning_rate": 1e-6}),
]


@pytest.mark.parametrize(("given", "ours"), MAPPED, ids=[", ".join(given) for given, _ in MAPPED])
def test_fields_that_are_mapped(given: dict[str, Any], ours: dict[str, Any]) -> None:
    training, _ = ported(**given)
    assert ours.items() <= dict(training).items()


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [3, 0.25])
def test_the_learning_rate_s_course_is_transformers_one_warm_step_ahead(kind: str, warmup: float) -> None:
    import torch
    from transformers import get_scheduler

    training, _ = ported(max_steps=12, lr_scheduler_type=kind, warmup_steps=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=3, num_training_steps=12)
    theirs = []
    for _ in range(12):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = [training.lr_factor(step, 12) for step in range(12)]
    assert ours[:3] == pytest.approx([1 / 3, 2 / 3, 1])  # theirs: 0, 1/3, 2/3
    assert ours[3:] == pytest.approx(theirs[3:])
    assert schedule(0, 12, kind="linear", warmup_ratio=0.0) == 1.0


def test_the_model_s_dtype_and_device() -> None:
    assert ported(model_init_kwargs={"dtype": "bfloat16"})[1].dtype == "bf16"
    assert ported(model_init_kwargs={})[1].dtype == "fp32"
    assert ported(use_cpu=False, bf16=False)[1].device == "auto"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "bnpo"}, "loss_type 'bnpo' cannot be followed here: use one of grpo, dapo"),
    (
        {"importance_sampling_level": "sequence"},
        "loss_type 'dapo' cannot be followed here: .*grpo by sequence",
    ),
    ({"loss_type": "cispo"}, "epsilon_high None cannot be followed here: here it bounds the ratio itself"),
    ({"delta": 1.1}, r"delta 1\.1 cannot be followed here: give at least 1 \+ epsilon_high, 1\.2"),
    ({"loss_type": "grpo", "entropy_coef": 0.1}, "entropy_coef 0.1 .*use a loss that is one"),
    ({"beta": 0.1, "use_bias_correction_kl": False}, "use_bias_correction_kl False .*leave it true"),
    ({"steps_per_generation": 4}, "steps_per_generation 4 cannot"),
    ({"generation_batch_size": 16}, "steps_per_generation 2 cannot"),
    ({"num_iterations": 0}, "num_iterations 0 cannot be followed here: give a whole number from 1 on"),
    ({"num_train_epochs": 0}, "num_train_epochs 0 cannot be followed here: give a number above 0"),
    ({"num_train_epochs": math.nan}, "num_train_epochs nan cannot be followed here: give a number above 0"),
    ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type .*use one of constant"),
    ({"lr_scheduler_type": "inverse_sqrt"}, "warmup_steps 0 .*give one"),
    ({"scale_rewards": "foo"}, "scale_rewards 'foo' .*use one of group, batch, none"),
    ({"importance_sampling_level": "foo"}, "importance_sampling_level 'foo' .*use token or sequence"),
    (
        {
            "learning_rate": 0.0,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr": 1e-6},
        },
        "learning_rate 0.0 .*give one above 0",
    ),
    ({"max_steps": 5, "warmup_steps": 10}, "warmup_steps 10 .*at most the run's 5"),
    ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs {'power': 2} cannot"),
    ({"save_strategy": "epoch"}, "save_strategy .*use steps or no"),
    ({"eval_strategy": "epoch"}, "eval_strategy .*use steps or no"),
    ({"model_init_kwargs": {"attn_implementation": "eager"}}, "model_init_kwargs .*give dtype alone"),
    ({"model_init_kwargs": {"dtype": "float64"}}, "model_init_kwargs .*use one of float32, bfloat16"),
    (
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 500},
        "metric_for_best_model .*by reward",
    ),
]


@pytest.mark.parametrize(("given", "line"), REFUSED, ids=[", ".join(given) for given, _ in REFUSED])
def test_values_that_cannot_be_followed_are_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^GRPOConfig: {line}"):
        ported(**given)


BEYOND: dict[str, Any] = {
    "optim": "adafactor",
    "optim_args": "a=1",
    "optim_target_modules": "all-linear",
    "adam_epsilon": 1e-6,
    "neftune_noise_alpha": 5.0,
    "torch_compile": True,
    "remove_unused_columns": True,
    "resume_from_checkpoint": "checkpoint-10",
    "trust_remote_code": True,
    "router_aux_loss_coef": 0.1,
    "shuffle_dataset": False,
    "min_p": 0.1,
    "generation_kwargs": {"num_beams": 2},
    "repetition_penalty": 1.1,
    "use_vllm": True,
    "mask_truncated_completions": True,
    "sync_ref_model": True,
    "top_entropy_quantile": 0.2,
    "use_adaptive_entropy": True,
    "off_policy_mask_threshold": 0.5,
    "eval_on_start": True,
    "eval_delay": 2,
    "push_to_hub": True,
    "debug": "underflow_overflow",
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_field_that_is_refused_says_why(name: str) -> None:
    args = GRPOConfig(output_dir="out", use_cpu=True)
    setattr(args, name, BEYOND[name])  # some cannot even be made on this machine
    with pytest.raises(ConfigurationError) as refusal:
        ported_settings(args, num_prompts=100)
    value = BEYOND[name]
    assert str(refusal.value) == (
        f"GRPOConfig: {name} {value!r} cannot be followed here: {FIELDS['refused'][name]}"
    )


def test_the_others_that_are_refused_are_for_several_processes_and_the_hub() -> None:
    others = {"fsdp", "fsdp_config", "deepspeed", "parallelism_config", "accelerator_config"}
    assert FIELDS["refused"].keys() - BEYOND.keys() == others | {"log_completions_hub_repo"}


def test_what_changes_nothing_is_said_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    ported(logging_steps=1, dataloader_num_workers=2)
    (record,) = caplog.records
    assert "settings of GRPOConfig that change nothing here" in record.getMessage()
    assert "logging_steps=every step is logged" in record.getMessage()
    assert "dataloader_num_workers=prompts are in memory" in record.getMessage()


def test_a_dataset_too_small_for_a_step_and_no_dataset_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="train_dataset must have the 4 prompts of a step, got 3"):
        ported(3, per_device_train_batch_size=32)
    with pytest.raises(ConfigurationError, match="max_steps -1 cannot be followed here: there is no dataset"):
        ported(None)
    with pytest.raises(ConfigurationError, match="args must be a GRPOConfig, got dict"):
        ported_settings({"max_steps": 1}, num_prompts=1)


def test_every_argument_of_the_trainer_is_taken_or_refused_with_what_to_write_instead() -> None:
    taken = {*inspect.signature(from_trl).parameters, *inspect.signature(TrlEnvironment).parameters}
    theirs = inspect.signature(GRPOTrainer.__init__).parameters.keys() - {"self"}
    assert theirs - taken == TRAINER.keys()
    args = GRPOConfig(output_dir="out", use_cpu=True, max_steps=1)
    given: dict[str, Any] = {"args": args, "train_dataset": [{"prompt": "?"}] * 8, "reward_funcs": len}
    for name, instead in TRAINER.items():
        with pytest.raises(ConfigurationError) as refusal:
            from_trl(**given, **{name: {"a": "thing\n"}})
        line = f"from_trl: {name} must be left out, got {{'a': 'thing\\n'}}: {instead}"
        assert str(refusal.value) == line
    with pytest.raises(ConfigurationError, match=r"from_trl has no argument 'tool'.*did you mean 'tools'"):
        from_trl(**given, tool=[])
    config = from_trl(**given, peft_config=None).config
    assert TrainingConfig(**{**dict(config), "lora": {"rank": 16}}).lora is not None


@pytest.mark.parametrize("args", [None, {"max_steps": 1}])
def test_what_is_no_config_is_one_line(args: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^args must be a GRPOConfig, got .*: give the GRPOConfig"):
        from_trl(args=args, train_dataset=[{"prompt": "?"}])
