"""Which settings may change when a training resumes from a checkpoint."""

from __future__ import annotations

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.runs.compatibility import Compatibility
from stateset_agents.training.config import TrainingConfig

__all__ = ["MAY_DIFFER", "training_compatibility"]

MAY_DIFFER = frozenset(
    {
        "agent.model_name",
        "agent.device",
        "agent.temperature",
        "agent.seed",
        "training.max_steps",
        "training.parallelism",
        "training.num_episodes",
        "training.output_dir",
        "training.run_name",
        "training.rollout_sleep",
        "training.save_steps",
        "training.save_total_limit",
        "training.eval_steps",
        "training.eval_episodes",
        "training.early_stopping_patience",
        "training.early_stopping_threshold",
        "training.max_failed_steps",
        "training.load_best_at_end",
        "training.log_rollouts",
        "training.progress",
        "training.report_to",
        "training.turn_timeout",
        "training.reward_timeout",
        "training.episode_retries",
        "training.turn_retries",
        "training.reward_retries",
        "training.retry_backoff",
        "training.breaker_failures",
        "training.breaker_pause",
        "training.outage_patience",
        "training.episode_timeout",
    }
)


def training_compatibility() -> Compatibility:
    """Of the sections `agent` and `training` of a run's settings."""
    sections = {"agent": AgentConfig(model_name="any"), "training": TrainingConfig()}
    return Compatibility(
        may_differ=MAY_DIFFER,
        defaults={name: section.model_dump(mode="json") for name, section in sections.items()},
        step_size=("training.per_device_train_batch_size", "training.gradient_accumulation_steps"),
    )
