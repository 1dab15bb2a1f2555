"""An engine from flat settings, those of its limits among them."""

from dataclasses import fields
from typing import Any

from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward
from stateset_agents.core.rollout.limits import RolloutLimits

_LIMITS = {field.name for field in fields(RolloutLimits)}


def engine_settings(**settings: Any) -> dict[str, Any]:
    """With those that are limits in a `RolloutLimits`."""
    limits = {name: settings.pop(name) for name in _LIMITS & settings.keys()}
    return {**settings, "limits": RolloutLimits(**limits)}


def make_engine(agent: Any, environment: Environment, reward: Reward, **settings: Any) -> ComputationalEngine:
    """`settings`: of the engine and of `RolloutLimits`."""
    return ComputationalEngine(agent, environment, reward, **engine_settings(**settings))
