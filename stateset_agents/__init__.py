"""Train multi-turn conversational agents with group-relative policy optimisation, in your own async program.

Importing this package loads neither torch nor transformers; public names load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
    from stateset_agents.core.environment import ConversationEnvironment
    from stateset_agents.core.reward import (
        CompositeReward,
        EnvironmentReward,
        RewardFunction,
        RewardResult,
        reward_function,
    )
    from stateset_agents.core.tools import ToolError, tool
    from stateset_agents.rewards.factories import create_customer_service_reward
    from stateset_agents.runs.callbacks import Callback
    from stateset_agents.serving.chat_session import ChatSession
    from stateset_agents.training.config import TrainingConfig, TrainingProfile
    from stateset_agents.training.sft.settings import SFTConfig
    from stateset_agents.training.sft.trainer import SFTTrainer, sft
    from stateset_agents.training.trainer import MultiTurnGRPOTrainer, train
    from stateset_agents.types.errors import StatesetError
    from stateset_agents.types.messages import Message
    from stateset_agents.types.scenario import Scenario
    from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

__all__ = [
    "AgentConfig",
    "Callback",
    "ChatSession",
    "CompositeReward",
    "ConversationEnvironment",
    "EnvironmentReward",
    "Message",
    "MultiTurnAgent",
    "MultiTurnGRPOTrainer",
    "RewardFunction",
    "RewardResult",
    "SFTConfig",
    "SFTTrainer",
    "Scenario",
    "StatesetError",
    "ToolError",
    "TrainingConfig",
    "TrainingProfile",
    "Trajectory",
    "TrajectoryGroup",
    "create_customer_service_reward",
    "reward_function",
    "sft",
    "tool",
    "train",
]

_HOMES = {
    "core.agent": ("AgentConfig", "MultiTurnAgent"),
    "serving.chat_session": ("ChatSession",),
    "core.environment": ("ConversationEnvironment",),
    "core.reward": (
        "CompositeReward",
        "EnvironmentReward",
        "RewardFunction",
        "RewardResult",
        "reward_function",
    ),
    "rewards.factories": ("create_customer_service_reward",),
    "types.scenario": ("Scenario",),
    "core.tools": ("ToolError", "tool"),
    "types.trajectory": ("Trajectory", "TrajectoryGroup"),
    "types.errors": ("StatesetError",),
    "types.messages": ("Message",),
    "runs.callbacks": ("Callback",),
    "training.config": ("TrainingConfig", "TrainingProfile"),
    "training.sft.settings": ("SFTConfig",),
    "training.sft.trainer": ("SFTTrainer", "sft"),
    "training.trainer": ("MultiTurnGRPOTrainer", "train"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
