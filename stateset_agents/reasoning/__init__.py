"""Models that learn to reason, from live objects: a policy, a reference, a tokenizer, a reward.

The names here are those that readers of DeepSeek's papers know; what they do is this package's own engine,
losses and learner. Whole trainings, with run folders and checkpoints, are `training.trainer`'s.
"""

from stateset_agents.algorithms.group_sizes import adaptive_group_size
from stateset_agents.answers.agreement import math_agreement
from stateset_agents.core.chat.replies.thoughts import (
    Reasoned,
    answer_of,
    num_steps,
    read_reasoned,
    split_reasoning,
)
from stateset_agents.evaluation.response_cache import ResponseCache
from stateset_agents.reasoning.continual import ContinualGRPO
from stateset_agents.reasoning.hierarchical import HierarchicalGRPO
from stateset_agents.reasoning.kl_controller import AdaptiveKLController
from stateset_agents.reasoning.multimodal import MultiModalGRPO, PictureProblem
from stateset_agents.reasoning.trainer import (
    Group,
    GRPOTrainer,
    batch_generate_responses,
    normalize_rewards_per_group,
    setup_distributed_grpo,
)
from stateset_agents.rewards.reasoning import DeepSeekRewardFunction
from stateset_agents.training.loop.step import TemperatureScheduler
from stateset_agents.training.sft.distillation import ReasoningDistillation

__all__ = [
    "AdaptiveKLController",
    "ContinualGRPO",
    "DeepSeekRewardFunction",
    "GRPOTrainer",
    "Group",
    "HierarchicalGRPO",
    "MultiModalGRPO",
    "PictureProblem",
    "Reasoned",
    "ReasoningDistillation",
    "ResponseCache",
    "TemperatureScheduler",
    "adaptive_group_size",
    "answer_of",
    "batch_generate_responses",
    "math_agreement",
    "normalize_rewards_per_group",
    "num_steps",
    "read_reasoned",
    "setup_distributed_grpo",
    "split_reasoning",
]
