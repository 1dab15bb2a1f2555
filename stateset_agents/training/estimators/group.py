"""`group`: a whole conversation against its group (GRPO, https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.training.estimators.base import Advantages, Estimator, PerMember, ScoredStep

__all__ = ["ESTIMATOR"]


def _credit(step: ScoredStep) -> Advantages:
    """Each conversation's reward against its group's, the same on all its tokens."""
    rewards = [
        [None if reward is None else step.clipped(reward) for reward in group.rewards]
        for group in step.groups.values()
    ]
    kind, scaling = step.config.baseline_type, step.config.advantage_normalization
    raw = group_advantages(rewards, baseline=kind, scaling="none")
    return Advantages(_tuples(raw), _tuples(group_advantages(rewards, baseline=kind, scaling=scaling)))


def _tuples(numbers: Sequence[Sequence[float | None]]) -> PerMember:
    """[groups][members] numbers, each as the one number of its conversation."""
    return [[None if number is None else (number,) for number in members] for members in numbers]


ESTIMATOR = Estimator(
    credit=_credit,
    per="conversation",
    sees_shaping=False,
    baseline=True,
    normalizations=("population", "sample", "batch", "none"),
    smallest_group=2,
)
