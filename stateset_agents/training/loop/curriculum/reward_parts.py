"""The parts of a reward: whether it has them, and a group's rewards put together by other weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from stateset_agents.core.reward import RewardFunction
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup


def check_parts(reward: RewardFunction, config: TrainingConfig) -> None:
    """Raises ConfigurationError for weights of parts that the reward does not have, as far as it says so, and
    where its parts are to be normalised and it has none."""
    own, named = reward.part_weights, config.all_weights()
    if config.multi_objective_aggregation == "normalize_then_sum":
        for weights in [*named, *([] if config.reward_weights else [own])]:
            if len(weights) < 2:
                raise ConfigurationError(
                    "multi_objective_aggregation normalize_then_sum needs a reward of several parts, and "
                    f"{reward.name} has {', '.join(weights) or 'none that it names'}: use a composite "
                    "reward, or name parts of its breakdown in reward_weights"
                )
    for name in dict.fromkeys(name for weights in named for name in weights) if own else ():
        if name not in own and name.split("/")[0] not in own:
            raise ConfigurationError(
                f"reward {reward.name} has no part {name!r}{nearest(name, own)}: it has {', '.join(own)}"
            )


def weighted_score(breakdown: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The weighted sum of the parts; where some do not apply, the others share their weight.

    None where no part with a weight applies.

    >>> weighted_score({"format": 1.0, "answer": 0.5}, {"format": 0.5, "answer": 1.0})
    1.0
    >>> weighted_score({"answer": 0.5}, {"format": 0.5, "answer": 1.0})
    0.75
    """
    known = {name: weight for name, weight in weights.items() if name in breakdown}
    applicable = math.fsum(known.values())
    if not applicable:
        return None
    score = math.fsum(weight * breakdown[name] for name, weight in known.items())
    return score * (math.fsum(weights.values()) / applicable)


def weighted(group: TrajectoryGroup, weights: Mapping[str, float]) -> TrajectoryGroup:
    """The group with rewards made of its members' breakdowns, which stay as they are.

    Without weights it is the same group. An unscored member stays unscored; turn rewards, which no breakdown
    has, are gone.
    """
    if not weights:
        return group
    branches = tuple(
        replace(branch, trajectory=_weighted(branch.trajectory, weights)) for branch in group.branches
    )
    members = tuple(_weighted(member, weights) for member in group.trajectories)
    return replace(group, trajectories=members, branches=branches, reward_weights=dict(weights))


def _weighted(trajectory: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return replace(trajectory, reward=weighted_score(trajectory.breakdown, weights), turn_rewards=())
