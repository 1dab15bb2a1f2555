"""Names of settings and reward arguments in other libraries, and ours; for "did you mean" hints.

`docs/trl.md` shows the table. A test compares TRL's names with the installed GRPOConfig, and ours with our
settings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

Origin = Literal["TRL", "verifiers", "common"]


@dataclass(frozen=True, slots=True)
class ForeignName:
    """One name of another library, or one that several use."""

    origin: Origin
    here: str = ""
    """Our setting, with its section: "training.clip_ratio"; empty where there is none."""
    note: str = ""
    """A remark, in a few words."""


def _named(origin: Origin, here: str, note: str, *names: str) -> dict[str, ForeignName]:
    return {name: ForeignName(origin, here, note) for name in names}


_trl, _verifiers, _common = (partial(_named, origin) for origin in get_args(Origin))

_FULL = "rollouts sample from the full distribution"
_ALL_LOGGED = "every conversation stands in rollouts.jsonl and the report"
_NO_SUCH_LOSS = "it belongs to a loss that is not among ours"

SETTINGS: Mapping[str, ForeignName] = {
    # GRPOConfig's own
    **_trl("agent.max_new_tokens", "", "max_completion_length"),
    **_trl("training.clip_ratio", "", "epsilon"),
    **_trl("training.clip_ratio_high", "", "epsilon_high"),
    **_trl("training.dual_clip", "", "delta"),
    **_trl("training.loss_type", "gspo is `sequence`, the others `token`", "importance_sampling_level"),
    **_trl("training.loss_type", _NO_SUCH_LOSS, "sapo_temperature_neg", "sapo_temperature_pos"),
    **_trl("training.loss_type", _NO_SUCH_LOSS, "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    **_trl("training.loss_type", _NO_SUCH_LOSS, "vespo_lambda_neg"),
    **_trl(
        "training.per_device_train_batch_size",
        "TRL counts conversations, here it is scenarios",
        "generation_batch_size",
    ),
    **_trl("training.gradient_accumulation_steps", "", "steps_per_generation"),
    **_trl("evaluation.tries", "", "num_generations_eval"),
    **_trl(
        "training.importance_cap", "", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"
    ),
    **_trl("training.importance_cap", "", "vllm_importance_sampling_correction"),
    **_trl("training.importance_cap", "weights are those of tokens", "vllm_importance_sampling_mode"),
    **_trl("training.max_staleness", "no sequence is masked", "off_policy_mask_threshold"),
    **_trl("training.importance_cap", "there is no lower bound", "vllm_importance_sampling_clip_min"),
    **_trl("", "the KL in the loss always has the ratio", "use_bias_correction_kl"),
    **_trl("training.entropy_coef", "it is constant", "use_adaptive_entropy", "entropy_coef_min"),
    **_trl("training.entropy_coef", "it is constant", "entropy_coef_max", "entropy_coef_delta"),
    **_trl("training.entropy_coef", "it is constant", "entropy_target"),
    **_trl("", "every trained token counts", "top_entropy_quantile"),
    **_trl("", "cut conversations are scored and trained on", "mask_truncated_completions"),
    **_trl("", "the reference is the model that the training began with", "sync_ref_model"),
    **_trl("", "the reference is the model that the training began with", "ref_model_mixup_alpha"),
    **_trl("", "the reference is the model that the training began with", "ref_model_sync_steps"),
    **_trl("", f"AgentConfig has it for people; {_FULL}", "top_p", "top_k"),
    **_trl("", f"{_FULL} at training.temperature", "min_p", "generation_kwargs", "repetition_penalty"),
    **_trl("agent.chat_template_kwargs", "", "chat_template_kwargs"),
    **_trl("environment.max_turns", "", "max_tool_calling_iterations"),
    **_trl("training.log_rollouts", "", "log_completions"),
    **_trl("training.log_rollouts", _ALL_LOGGED, "num_completions_to_print", "log_unique_prompts"),
    **_trl("training.log_rollouts", _ALL_LOGGED, "log_completions_hub_repo", "log_multimodal"),
    **_trl("agent.model_name", "vllm:URL lets a vLLM server sample, see docs/vllm.md", "use_vllm"),
    **_trl("agent.model_name", "vllm:URL, see docs/vllm.md", "vllm_server_base_url", "vllm_server_host"),
    **_trl("agent.model_name", "vllm:URL, see docs/vllm.md", "vllm_server_port", "vllm_mode"),
    **_trl("", "the vLLM server's own option, see docs/vllm.md", "vllm_model_impl", "vllm_enable_sleep_mode"),
    **_trl("", "the vLLM server's own option, see docs/vllm.md", "vllm_gpu_memory_utilization"),
    **_trl("", "the vLLM server's own option, see docs/vllm.md", "vllm_max_model_length"),
    **_trl("", "the vLLM server's own option, see docs/vllm.md", "vllm_tensor_parallel_size"),
    **_trl("", "the vLLM server's own option, see docs/vllm.md", "vllm_group_port", "vllm_server_timeout"),
    **_trl("", _FULL, "vllm_structured_outputs_regex"),
    **_trl("agent.engine", "", "use_transformers_continuous_batching", "use_transformers_paged"),
    **_trl("agent.engine", "", "transformers_continuous_batching_config", "cache_implementation"),
    **_trl("agent.dtype", "what else a model needs stands in its folder", "model_init_kwargs"),
    **_trl("", "code that a model brings along is never run", "trust_remote_code"),
    **_trl("training.dropout", "", "disable_dropout"),
    **_trl("", "the LM head and the loss are always in fp32", "cast_lm_head_to_fp32"),
    **_trl("", "no auxiliary loss is added", "router_aux_loss_coef"),
    **_trl("training.parallelism", "", "ds3_gather_for_generation"),
    **_trl("training.seed", "scenarios are drawn by it", "shuffle_dataset"),
    **_trl("training.row_layout", "", "pad_to_multiple_of"),
    # TrainingArguments, as far as they are often set
    **_trl("training.max_steps", "", "num_train_epochs"),
    **_trl("training.warmup_ratio", "", "warmup_steps"),
    **_trl("training.lr_min_ratio", "", "lr_scheduler_kwargs"),
    **_trl("", "AdamW, with torch's own epsilon", "optim", "adam_epsilon"),
    **_trl("", "every step is logged", "logging_steps", "logging_strategy", "logging_first_step"),
    **_trl("training.eval_steps", "", "eval_strategy"),
    **_trl("training.save_steps", "", "save_strategy"),
    **_trl("evaluation.max_concurrent", "", "per_device_eval_batch_size"),
    **_trl("training.load_best_at_end", "", "load_best_model_at_end"),
    **_trl("training.metric_for_best", "", "metric_for_best_model"),
    **_trl("", "stateset-agents train --resume RUN", "resume_from_checkpoint"),
    **_trl("training.gradient_checkpointing", "", "gradient_checkpointing_kwargs"),
    **_trl("training.parallelism", "", "fsdp", "fsdp_config", "deepspeed"),
    **_trl("training.scheduling", "", "full_determinism"),
    **_trl("agent.device", "", "use_cpu"),
    **_trl("", "see docs/sharing.md", "push_to_hub", "hub_model_id"),
    # verifiers 0.4: agents, evaluations, tasks
    **_verifiers("environment.max_turns", "", "max_turns"),
    **_verifiers("agent.max_new_tokens", "", "max_output_tokens"),
    **_verifiers("agent.max_context_tokens", "", "max_input_tokens", "max_total_tokens"),
    **_verifiers("training.num_generations", "in an evaluation `tries`", "num_rollouts"),
    **_verifiers("training.num_generations", "in an evaluation `tries`", "rollouts_per_example"),
    **_verifiers("training.episode_retries", "", "max_retries"),
    **_verifiers("training.temperature", "and agent.max_new_tokens", "sampling"),
    **_verifiers("", "name them in the reward: {name: composite, terms: [...]}", "rewards", "judges"),
    # of several libraries
    **_common("training.learning_rate", "", "lr"),
    **_common("training.per_device_train_batch_size", "scenarios of one batch", "batch_size"),
    **_common("training.per_device_train_batch_size", "scenarios of one batch", "train_batch_size"),
    **_common("training.micro_batch_tokens", "it counts tokens", "micro_batch_size", "mini_batch_size"),
    **_common("training.max_steps", "", "steps", "num_steps", "total_steps", "epochs"),
    **_common("training.num_iterations", "", "ppo_epochs", "update_epochs", "mu"),
    **_common("training.clip_ratio", "", "clip_eps", "clip_range", "cliprange", "clip_ratio_low"),
    **_common("training.beta", "", "kl_beta", "kl_penalty", "init_kl_coef"),
    **_common("training.max_grad_norm", "", "grad_clip", "clip_grad_norm"),
    **_common("training.gae_lambda", "", "lam"),
    **_common("training.gamma", "", "discount"),
    **_common("training.lora", "", "peft_config", "lora_r", "lora_rank", "lora_alpha"),
    **_common("training.report_to", "", "use_wandb", "wandb_project"),
    **_common("training.max_concurrent", "", "num_workers"),
    **_common("agent.model_name", "", "model", "model_name_or_path", "model_path", "model_id"),
    **_common("agent.max_new_tokens", "", "max_new_tokens", "max_tokens", "max_completion_tokens"),
    **_common("agent.max_context_tokens", "", "max_prompt_length", "max_length", "max_seq_length"),
    **_common("agent.max_context_tokens", "", "max_seq_len", "seq_len", "max_model_len", "context_length"),
    **_common("agent.system_prompt", "", "system", "system_message", "instructions"),
    **_common("evaluation.episodes", "", "num_eval_examples", "num_examples"),
}
"""By name in other libraries. A name that one of our sections has, too, is for the other sections."""

ARGUMENTS: Mapping[str, ForeignName] = {
    **_trl("replies", "", "completions"),
    **_trl("messages", "", "prompts"),
    **_trl("trajectory", "it has the token ids", "completion_ids", "completions_ids", "prompt_ids"),
    **_trl("context", "a scenario's facts; there is no trainer state", "trainer_state"),
    **_verifiers("replies", "", "completion"),
    **_verifiers("messages", "", "prompt"),
    **_verifiers("context", "the answer is context['answer']", "answer"),
    **_verifiers("context", "", "info"),
    **_verifiers("trajectory", "", "trace"),
    **_verifiers(
        "trajectory",
        "an environment's state is given to `success`, which may return Outcome(reward=...)",
        "state",
    ),
    **_verifiers("scenario", "", "task"),
}
"""Arguments of reward functions, by name in other libraries."""

_CLASSES = {"TrainingConfig": "training", "AgentConfig": "agent", "EvaluationConfig": "evaluation"}


def setting_hint(name: str, section: str = "") -> str | None:
    """` (did you mean 'learning_rate'?)` for a name of another library; None for one that is not known.

    `section`: the class that was given it; empty for the top of a file, where every name needs its section.
    """
    known = SETTINGS.get(name)
    if known is None:
        return None
    note = f"; {known.note}" if known.note else ""
    if not known.here:
        return f" (of {known.origin}; {known.note})"
    home, _, field = known.here.partition(".")
    if home == _CLASSES.get(section):
        return f" (did you mean {field!r}?{note})"
    return f" (did you mean {known.here!r}?{note})"


def argument_hint(name: str, offered: Collection[str]) -> str:
    """` (of TRL; here it is 'replies')`, or nothing where that is not offered."""
    known = ARGUMENTS.get(name)
    if known is None or known.here not in offered:
        return ""
    return f" (of {known.origin}; here it is {known.here!r}{f'; {known.note}' if known.note else ''})"
