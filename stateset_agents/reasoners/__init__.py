"""Models that learn to reason, from live objects: a policy, a reference, a tokenizer, a reward.

The names here are those that readers of DeepSeek's papers know; what they do is this package's own engine,
losses and learner. Whole trainings, with run folders and checkpoints, are `training.trainer`'s.
"""

from stateset_agents.reasoners.continual import ContinualGRPO
from stateset_agents.reasoners.groups import Group, normalize_rewards_per_group
from stateset_agents.reasoners.hierarchical import HierarchicalGRPO
from stateset_agents.reasoners.multimodal import MultiModalGRPO, PictureProblem
from stateset_agents.reasoners.processes import setup_distributed_grpo
from stateset_agents.reasoners.responses import batch_generate_responses
from stateset_agents.reasoners.trainer import GRPOTrainer
from stateset_agents.training.sft.distillation import ReasoningDistillation

__all__ = [
    "ContinualGRPO",
    "GRPOTrainer",
    "Group",
    "HierarchicalGRPO",
    "MultiModalGRPO",
    "PictureProblem",
    "ReasoningDistillation",
    "batch_generate_responses",
    "normalize_rewards_per_group",
    "setup_distributed_grpo",
]
