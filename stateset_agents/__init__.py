"""Train multi-turn conversational agents with group-relative policy optimisation, in your own async program.

Importing this package loads neither torch nor transformers; public names load what they need on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stateset_agents.core.agent import AgentConfig as AgentConfig
    from stateset_agents.core.agent import MultiTurnAgent as MultiTurnAgent
    from stateset_agents.core.environment import ConversationEnvironment as ConversationEnvironment
    from stateset_agents.core.reward import CompositeReward as CompositeReward
    from stateset_agents.core.reward import EnvironmentReward as EnvironmentReward
    from stateset_agents.core.reward import RewardFunction as RewardFunction
    from stateset_agents.core.reward import RewardResult as RewardResult
    from stateset_agents.core.reward import reward_function as reward_function
    from stateset_agents.core.tools import ToolError as ToolError
    from stateset_agents.core.tools import tool as tool
    from stateset_agents.rewards.factories import (
        create_customer_service_reward as create_customer_service_reward,
    )
    from stateset_agents.runs.callbacks import Callback as Callback
    from stateset_agents.serving.chat_session import ChatSession as ChatSession
    from stateset_agents.training.config import TrainingConfig as TrainingConfig
    from stateset_agents.training.config import TrainingProfile as TrainingProfile
    from stateset_agents.training.sft.settings import SFTConfig as SFTConfig
    from stateset_agents.training.sft.trainer import SFTTrainer as SFTTrainer
    from stateset_agents.training.sft.trainer import sft as sft
    from stateset_agents.training.trainer import MultiTurnGRPOTrainer as MultiTurnGRPOTrainer
    from stateset_agents.training.trainer import train as train
    from stateset_agents.types.errors import StatesetError as StatesetError
    from stateset_agents.types.messages import Message as Message
    from stateset_agents.types.scenario import Scenario as Scenario
    from stateset_agents.types.trajectory import Trajectory as Trajectory
    from stateset_agents.types.trajectory import TrajectoryGroup as TrajectoryGroup

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
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
