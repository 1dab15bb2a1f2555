"""Scored groups become samples: each trajectory that trains, with one advantage per agent token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.core.trajectory import TrajectoryGroup
from stateset_agents.training.batch import Sample
from stateset_agents.training.config import TrainingConfig

__all__ = ["Credited", "assign_credit"]


@dataclass(frozen=True, slots=True)
class Credited:
    """What a step trains on, and what it left out."""

    samples: list[Sample]
    num_dropped_groups: int
    """Groups with fewer scored members than `min_group_size`."""

    advantages: list[list[tuple[float, ...] | None]]
    """[groups][members] advantages per agent token, None where a member does not train."""


def assign_credit(groups: Sequence[TrajectoryGroup], config: TrainingConfig) -> Credited:
    """Whole-trajectory credit: a trajectory's advantage over its group, on each of its agent tokens.

    Unscored members train nothing and enter no baseline; a group with fewer than `min_group_size` scored
    members is left out whole.
    """
    used = {place: group for place, group in enumerate(groups) if len(group.scored) >= config.min_group_size}
    bound = config.reward_clip
    values = group_advantages(
        [
            [None if r is None else max(-bound, min(bound, r)) for r in group.rewards]
            for group in used.values()
        ],
        baseline=config.baseline_type,
        scaling=config.advantage_normalization,
    )
    samples: list[Sample] = []
    credit: list[list[tuple[float, ...] | None]] = [[None] * len(group.trajectories) for group in groups]
    for (place, group), own in zip(used.items(), values, strict=True):
        for member, (trajectory, advantage) in enumerate(zip(group.trajectories, own, strict=True)):
            if advantage is None or not trajectory.num_agent_tokens:
                continue
            per_token = (advantage,) * trajectory.num_agent_tokens
            credit[place][member] = per_token
            samples.append(Sample(trajectory=trajectory, advantages=per_token, weight=group.weight))
    return Credited(samples, len(groups) - len(used), credit)
