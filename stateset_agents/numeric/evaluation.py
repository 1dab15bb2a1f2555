"""Evaluations of numeric policies: episodes from given seeds, and two policies on the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.algorithms.paired import paired_rewards
from stateset_agents.numeric.environments.base import BatchedEnvironment, Rule
from stateset_agents.numeric.policy import NumericPolicy
from stateset_agents.numeric.rollout import Rollout, action_keys, collect, collect_by
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvaluation:
    """Returns and lengths of episodes from some starts."""

    seeds: tuple[int, ...]
    returns: tuple[float | None, ...]
    """Undiscounted sums of rewards, one per seed; None where the episode failed."""
    lengths: tuple[int, ...]
    components: Mapping[str, float]
    """Means over the episodes that did not fail."""
    rollout: Rollout

    @property
    def scored(self) -> list[float]:
        """The returns of the episodes that did not fail."""
        return [value for value in self.returns if value is not None]

    @property
    def mean(self) -> float | None:
        """Mean return; None where every episode failed."""
        return float(np.mean(self.scored)) if self.scored else None

    def summary(self) -> dict[str, Any]:
        """The values for summary.json and the command line."""
        scored = self.scored
        return {
            "n": len(self.seeds),
            "num_failed": self.returns.count(None),
            "mean_reward": self.mean,
            "reward_interval": mean_interval(scored),
            "lowest": min(scored, default=None),
            "highest": max(scored, default=None),
            "mean_length": float(np.mean(self.lengths)),
            "components": dict(self.components),
        }

    def metrics(self) -> dict[str, float]:
        """Metrics for logs: eval/reward, its extremes and 95 % interval, eval/length, eval/failed."""
        scored, metrics = self.scored, {"eval/failed": float(self.returns.count(None))}
        if not scored:
            return metrics
        metrics |= {"eval/reward": float(np.mean(scored)), "eval/reward_min": min(scored)}
        metrics |= {"eval/reward_max": max(scored), "eval/length": float(np.mean(self.lengths))}
        interval = mean_interval(scored)
        if interval is not None:
            metrics |= {"eval/reward_low": interval[0], "eval/reward_high": interval[1]}
        return metrics | {f"eval/{name}": value for name, value in self.components.items()}


def evaluation_seeds(seed: int, number: int) -> list[int]:
    """Starts that no training of this seed plays."""
    return [derive(seed, "evaluate", index) for index in range(number)]


def evaluate(
    policy: NumericPolicy,
    environment: BatchedEnvironment,
    seeds: Sequence[int],
    *,
    deterministic: bool = True,
    seed: int = 0,
) -> ControlEvaluation:
    """One episode from each of `seeds`, all at once. Blocking; dropout is off.

    `deterministic`: always the likeliest action; else actions are drawn, from streams of `seed`.
    """
    if not seeds:
        raise ConfigurationError("an evaluation needs at least one seed, got none")
    policy.train(False)
    keys = None if deterministic else action_keys(derive(seed, "evaluate"), 0, len(seeds), 1)
    return _evaluation(collect(policy, environment, seeds, group_size=1, keys=keys))


def evaluate_rule(rule: Rule, environment: BatchedEnvironment, seeds: Sequence[int]) -> ControlEvaluation:
    """One episode from each of `seeds` by a rule, all at once. Blocking."""
    if not seeds:
        raise ConfigurationError("an evaluation needs at least one seed, got none")
    return _evaluation(collect_by(rule, environment, seeds))


def _evaluation(rollout: Rollout) -> ControlEvaluation:
    whole = ~rollout.failed
    sums = {name: part.sum(axis=0, where=rollout.alive) for name, part in rollout.components.items()}
    return ControlEvaluation(
        seeds=tuple(rollout.seeds),
        returns=tuple(
            float(value) if is_whole else None for value, is_whole in zip(rollout.returns, whole, strict=True)
        ),
        lengths=tuple(rollout.lengths.tolist()),
        components={name: float(part[whole].mean()) for name, part in sums.items()} if whole.any() else {},
        rollout=rollout,
    )


def paired_difference(
    better: ControlEvaluation, than: ControlEvaluation
) -> tuple[float, tuple[float, float] | None]:
    """Mean of the differences of returns from the same starts, and its 95 % interval (`paired_rewards`; None
    where they are all equal). Episodes that failed in either are left out.

    Raises ConfigurationError where the starts differ, or none is left.
    """
    result = paired_rewards(paired_differences(better, than))
    return result.mean, result.interval


def against(ours: ControlEvaluation, rule: ControlEvaluation) -> dict[str, Any]:
    """The summary of a rule's episodes, and by how much a policy's were better."""
    difference, interval = paired_difference(ours, rule)
    return {**rule.summary(), "difference": difference, "difference_interval": interval}


def paired_differences(better: ControlEvaluation, than: ControlEvaluation) -> list[float]:
    """The differences of returns, start by start; raises as `paired_difference` does."""
    if better.seeds != than.seeds:
        raise ConfigurationError(
            "the two evaluations have other seeds: evaluate both policies on the same ones"
        )
    pairs = zip(better.returns, than.returns, strict=True)
    differences = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
    if not differences:
        raise ConfigurationError(
            "every episode failed in one of the two evaluations: look at the environment"
        )
    return differences
