"""What the next step plays, decided before it begins. The sources of rollouts ask `Curriculum.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.reward_parts import weighted
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.trajectory import TrajectoryGroup

__all__ = ["Curriculum", "StepPlan"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What holds for the groups of one step."""

    weights: Mapping[str, float]
    """Of the parts of the reward; empty where the score is the reward function's own."""


class Curriculum:
    """Plans each step from the settings."""

    def __init__(self, config: TrainingConfig, part_weights: Mapping[str, float]) -> None:
        """`part_weights`: the reward's own (`RewardFunction.part_weights`)."""
        self.config = config
        self._part_weights = part_weights
        self._warned: set[str] = set()

    def plan(self) -> StepPlan:
        """What the next step plays."""
        config = self.config
        weights = config.reward_weights
        if weights is None and config.multi_objective_aggregation == "normalize_then_sum":
            weights = dict(self._part_weights)
        return StepPlan(weights=weights or {})

    def put_together(self, groups: Sequence[TrajectoryGroup], plan: StepPlan) -> list[TrajectoryGroup]:
        """The groups with their rewards as the plan weighs them.

        Raises ConfigurationError where no scored conversation has any of the parts.
        """
        if plan.weights:
            self._check_parts(groups, plan.weights)
        return [weighted(group, plan.weights) for group in groups]

    def _check_parts(self, groups: Sequence[TrajectoryGroup], weights: Mapping[str, float]) -> None:
        scored = [member for group in groups for member in group.scored]
        there = dict.fromkeys(name for member in scored for name in member.breakdown)
        missing = [name for name, weight in weights.items() if weight and name not in there]
        has = f"its breakdown has {', '.join(there)}" if there else "it has no breakdown"
        if scored and len(missing) == sum(weight > 0 for weight in weights.values()):
            raise ConfigurationError(
                f"the reward has no part called {' or '.join(missing)}: {has}; name its parts in the weights"
            )
        for name in missing if scored else ():
            if name not in self._warned and name not in self._part_weights:
                self._warned.add(name)
                _log.warning(f"no conversation's reward had the part {name!r} yet, which has a weight: {has}")
