"""Scored groups become samples: each trajectory that trains, with one advantage per agent token.

`training.estimators` gives every scored member one number per conversation, turn or token; here each number
is spread over its agent tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import TypeVar

from stateset_agents.algorithms.advantages import broadcast_turns, clipped
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators.base import ScoredStep, ValueEstimate, flat, tokens_per_turn
from stateset_agents.training.estimators.registry import ESTIMATORS
from stateset_agents.training.update.batch import Sample
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Credited:
    """The samples that a step trains on, and what it leaves out."""

    samples: list[Sample]
    num_dropped_groups: int
    """Groups with fewer scored members than `min_group_size`."""

    advantages: list[list[tuple[float, ...] | None]]
    """[groups][members] advantages per agent token, None where a member does not train."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """advantage/mean and advantage/std, before they are scaled."""
    returns: list[Sequence[float]] = field(default_factory=list)
    """[samples][turns or agent tokens] the critic's targets; empty without one."""

    def by_member(self, values: Sequence[_T | None]) -> list[list[_T | None]]:
        """[groups][members] a value of each sample; None where a member does not train, or there are none."""
        left = iter(values)
        return [
            [None if advantages is None else next(left, None) for advantages in group]
            for group in self.advantages
        ]


def trainable(groups: Sequence[TrajectoryGroup], config: TrainingConfig) -> list[tuple[int, int]]:
    """(group, member) of the trajectories that train, in order: scored, with an agent token, in a group
    with at least `min_group_size` scored members."""
    return [
        (index, member)
        for index, group in enumerate(groups)
        if len(group.scored) >= config.min_group_size
        for member, trajectory in enumerate(group.trajectories)
        if trajectory.reward is not None and trajectory.num_agent_tokens
    ]


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    config: TrainingConfig,
    values: Mapping[tuple[int, int], ValueEstimate] | None = None,
) -> Credited:
    """`advantage_estimator`'s credit of every trajectory that trains, spread over its agent tokens.

    Unscored members train nothing and enter no baseline; a group with fewer than `min_group_size` scored
    members is left out. `values`: the critic's predictions for each of `trainable(groups)`.
    """
    used = {index: group for index, group in enumerate(groups) if len(group.scored) >= config.min_group_size}
    estimator = ESTIMATORS[config.advantage_estimator]
    estimate = estimator.credit(ScoredStep(used, config, values or {}))
    rows = {index: row for row, index in enumerate(used)}
    samples: list[Sample] = []
    returns: list[Sequence[float]] = []
    credit: list[list[tuple[float, ...] | None]] = [[None] * len(group.trajectories) for group in groups]
    for index, member in trainable(groups, config):
        numbers = estimate.scaled[rows[index]][member]
        assert numbers is not None  # it is scored
        group, trajectory = groups[index], groups[index].trajectories[member]
        numbers = [clipped(number, config.advantage_clip) for number in numbers]
        per_token = _broadcast(numbers, trajectory, estimator.per)
        credit[index][member] = per_token
        samples.append(Sample(trajectory=trajectory, advantages=per_token, weight=group.weight))
        if estimate.returns is not None:
            returns.append(estimate.returns[rows[index]][member] or ())
    raw = flat(estimate.raw)
    metrics = {"advantage/mean": fmean(raw), "advantage/std": pstdev(raw)} if raw else {}
    return Credited(samples, len(groups) - len(used), credit, metrics, returns)


def _broadcast(credit: Sequence[float], trajectory: Trajectory, per: str) -> tuple[float, ...]:
    """A conversation's, its turns' or its tokens' credit on each agent token."""
    match per:
        case "conversation":
            return (credit[0],) * trajectory.num_agent_tokens
        case "turn":
            return tuple(broadcast_turns(credit, tokens_per_turn(trajectory)))
        case _:
            return tuple(credit)
