"""Every reward by one import: the ready ones of core, and rewards made of rewards.

from stateset_agents.rewards import GatedReward, create_correctness_reward, create_conciseness_reward
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stateset_agents.core.reward import (
        CompositeReward,
        EnvironmentReward,
        RewardFunction,
        RewardResult,
        as_reward,
        reward_function,
    )
    from stateset_agents.rewards.code import CodeReward, create_code_reward
    from stateset_agents.rewards.composites import (
        GatedReward,
        NormalizedReward,
        ProductReward,
        ScaledReward,
        apply_reward_scaling,
    )
    from stateset_agents.rewards.factories import (
        create_customer_service_reward,
        create_domain_reward,
        create_engagement_reward,
        create_helpful_reward,
        create_task_completion_reward,
        create_task_reward,
        create_tutoring_reward,
    )
    from stateset_agents.rewards.formats import (
        create_pattern_reward,
        create_schema_reward,
        create_similarity_reward,
    )
    from stateset_agents.rewards.judge import Agreement, JudgeReward, create_judge_reward, measure_agreement
    from stateset_agents.rewards.reasoning import (
        DeepSeekRewardFunction,
        MathAnswerReward,
        ReasoningFormatReward,
        ReasoningReward,
        create_math_answer_reward,
        create_reasoning_format_reward,
        create_reasoning_reward,
    )
    from stateset_agents.rewards.shaping import PotentialShaping
    from stateset_agents.rewards.verifiable import (
        create_conciseness_reward,
        create_correctness_reward,
        create_safety_reward,
    )

__all__ = [
    "Agreement",
    "CodeReward",
    "CompositeReward",
    "DeepSeekRewardFunction",
    "EnvironmentReward",
    "GatedReward",
    "JudgeReward",
    "MathAnswerReward",
    "NormalizedReward",
    "PotentialShaping",
    "ProductReward",
    "ReasoningFormatReward",
    "ReasoningReward",
    "RewardFunction",
    "RewardResult",
    "ScaledReward",
    "apply_reward_scaling",
    "as_reward",
    "create_code_reward",
    "create_conciseness_reward",
    "create_correctness_reward",
    "create_customer_service_reward",
    "create_domain_reward",
    "create_engagement_reward",
    "create_helpful_reward",
    "create_judge_reward",
    "create_math_answer_reward",
    "create_pattern_reward",
    "create_reasoning_format_reward",
    "create_reasoning_reward",
    "create_safety_reward",
    "create_schema_reward",
    "create_similarity_reward",
    "create_task_completion_reward",
    "create_task_reward",
    "create_tutoring_reward",
    "measure_agreement",
    "reward_function",
]

_MODULES = (
    "core.reward",
    "rewards.code",
    "rewards.composites",
    "rewards.factories",
    "rewards.formats",
    "rewards.judge",
    "rewards.reasoning",
    "rewards.shaping",
    "rewards.verifiable",
)


def __getattr__(name: str) -> Any:
    """The name from its module, loaded when first asked for: a training needs few of them."""
    for module in _MODULES if name in __all__ else ():
        loaded = importlib.import_module(f"stateset_agents.{module}")
        if hasattr(loaded, name):
            return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
