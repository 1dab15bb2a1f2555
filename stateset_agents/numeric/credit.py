"""The credit of each step of a rollout; a new `advantage_estimator` is a line in ESTIMATORS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.algorithms.group_arrays import (
    branch_credit_array,
    deviation_array,
    gae_array,
    group_advantages_array,
    returns_to_go_array,
    sibling_credit_array,
    tied_groups_array,
)
from stateset_agents.grouping.advantages import normalise_by_part
from stateset_agents.grouping.partitioner import Partitioner
from stateset_agents.grouping.partitions import Trajectories, scores_within
from stateset_agents.numeric.environments.base import map_observations
from stateset_agents.numeric.rollout import Rollout

LoneSteps = Literal["return", "zero"]
"""The credit of a step at which no sibling lives: its return, which is unbiased and outweighs all others, or
0, which is biased and calm."""

_Steps = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A critic's values of a rollout."""

    before: _Steps  # [T, B]
    final: _Steps  # [B]
    """Value of the state after each row's last step."""


@dataclass(frozen=True, slots=True, eq=False)
class StepCredit:
    """A rollout's advantages."""

    advantages: _Steps  # [T, B]
    """0 where no step was taken, and in groups that take no part."""
    trained: NDArray[np.bool_]  # [T, B]
    """Steps that take part: of the groups with enough members."""
    returns: _Steps | None
    """[T, B] the critic's targets, where there is one."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimator:
    """One entry of ESTIMATORS."""

    credit: Callable[[Rollout, float, Scaling], _Steps] | None
    """(rollout, gamma, scaling) -> [T, B] raw advantages; None: GAE by a critic."""
    scalings: tuple[Scaling, ...] = ("batch", "none")
    """Values of `advantage_normalization` that it knows."""
    lone_steps: tuple[LoneSteps, ...] = ("return",)
    """Values of that setting that it knows."""
    in_group: bool = True
    """True if members are compared, so that a group needs two."""
    branches: bool = False
    """True if branches are played from its states."""


def _by_episode(rollout: Rollout, gamma: float, scaling: Scaling) -> _Steps:
    """The whole discounted return against its group's mean, for every step alike."""
    returns = returns_to_go_array(rollout.rewards, rollout.alive, gamma=gamma)[0]
    whole = rollout.grouped(rollout.lengths > 0)
    advantages = group_advantages_array(rollout.grouped(returns), whole, scaling=scaling)
    return np.where(rollout.alive, advantages.reshape(-1), 0.0)


def _by_step(rollout: Rollout, gamma: float, scaling: Scaling) -> _Steps:
    """Return-to-go against the mean of that of the siblings that live at the same step."""
    rewards, alive = rollout.grouped(rollout.rewards), rollout.grouped(rollout.alive)
    return _flat(sibling_credit_array(rewards, alive, gamma=gamma))


def _by_branches(rollout: Rollout, gamma: float, scaling: Scaling) -> _Steps:
    """The return after an action against that of branches from the same state."""
    branches = rollout.branches
    assert branches is not None  # collect_branches played them
    rewards, alive = rollout.grouped(rollout.rewards), rollout.grouped(rollout.alive)
    means, counts = rollout.grouped(branches.means), rollout.grouped(branches.counts)
    return _flat(branch_credit_array(rewards, means, counts, alive, gamma=gamma))


ESTIMATORS: Mapping[str, StepEstimator] = {
    "step_group": StepEstimator(credit=_by_step, lone_steps=("return", "zero")),
    "group": StepEstimator(credit=_by_episode, scalings=("population", "sample", "batch", "none")),
    "branch": StepEstimator(credit=_by_branches, branches=True),
    "gae": StepEstimator(credit=None, in_group=False),
}


def credit(
    rollout: Rollout,
    name: str,
    *,
    gamma: float,
    gae_lambda: float = 0.95,
    scaling: Scaling = "batch",
    lone_steps: LoneSteps = "return",
    values: Values | None = None,
    partitioner: Partitioner | None = None,
) -> StepCredit:
    """The advantages of a rollout, scaled. `values`: of a critic, which `gae` needs.

    With `batch` scaling raw advantages are divided by their deviation over all trained steps, with a critic
    centred, too; with a `partitioner` over those of the step's part, and multiplied by the part's weight. A
    group with fewer than two members that did not fail takes no part, unless the estimator compares no
    members.
    """
    estimator = ESTIMATORS[name]
    members = rollout.grouped(~rollout.failed).sum(axis=1)
    smallest = 2 if estimator.in_group else 1
    trained = rollout.alive & np.repeat(members >= smallest, rollout.group_size)
    returns = None
    if estimator.credit is None:
        assert values is not None  # the trainer asks the critic
        estimate = gae_array(
            rollout.rewards,
            values.before,
            trained,
            gamma=gamma,
            lam=gae_lambda,
            terminated=rollout.terminated,
            final_values=values.final,
        )
        raw, returns = estimate.advantages, estimate.returns
    else:
        raw = estimator.credit(rollout, gamma, scaling)
    if lone_steps == "zero":
        num_living = np.repeat(rollout.grouped(rollout.alive).sum(axis=2), rollout.group_size, axis=1)
        raw = np.where(num_living > 1, raw, 0.0)
    raw = np.where(trained, raw, 0.0)
    metrics = {"credit/std": float(deviation_array(raw, trained))}
    if estimator.in_group:
        metrics |= _group_metrics(rollout, members)
    if values is not None and returns is not None and trained.any():
        metrics["value/explained_variance"] = _explained(returns[trained], values.before[trained])
    advantages = raw
    if scaling == "batch" and name != "group":
        centred = estimator.credit is None
        if partitioner is None:
            advantages = normalise_by_part(raw, np.zeros(raw.shape, dtype=np.int64), trained, centred=centred)
        elif trained.any():
            rows = trained.any(axis=0)
            trajectories, scores = _trajectories(rollout, rows)
            by_parts = partitioner.normalise(
                raw[:, rows], trained[:, rows], trajectories, scores, centred=centred
            )
            advantages = np.zeros_like(raw)
            advantages[:, rows] = by_parts.advantages
            metrics |= by_parts.metrics
    return StepCredit(advantages, trained, returns, metrics)


def _group_metrics(rollout: Rollout, members: NDArray[Any]) -> dict[str, float]:
    """Numbers of groups with nothing to compare."""
    tied = tied_groups_array(rollout.grouped(rollout.returns), rollout.grouped(~rollout.failed))
    has_members = members > 0
    return {
        "group/zero_variance": float(tied[has_members].mean()) if has_members.any() else 0.0,
        "group/dropped": float((members < 2).sum()),
    }


def _trajectories(rollout: Rollout, rows: NDArray[np.bool_]) -> tuple[Trajectories, _Steps]:
    """The trajectories of these rows, by which parts are made, and their normalised returns: by their task's
    references, or within the rollout."""
    returns, tasks = rollout.returns[rows], rollout.tasks
    first = map_observations(lambda part: part[0, rows].reshape(int(rows.sum()), -1), rollout.observations)
    columns = [first[name] for name in sorted(first)] if isinstance(first, Mapping) else [first]
    scores = scores_within(returns) if tasks is None else tasks.scores(rollout.returns)[rows]
    return Trajectories(
        returns=returns,
        lengths=rollout.lengths[rows],
        tasks=None if tasks is None else tasks.ids[rows],
        task_names=() if tasks is None else tasks.names,
        features=np.concatenate(columns, axis=1).astype(np.float64),
    ), scores


def _explained(returns: NDArray[Any], values: NDArray[Any]) -> float:
    """1 is all of the returns' variance, below 0 is worse than a constant."""
    spread = float(returns.var())
    return 1.0 - float((returns - values).var()) / spread if spread else 0.0


def _flat(values: _Steps) -> _Steps:
    """[T, groups, G] -> [T, B]."""
    return values.reshape(len(values), -1)
