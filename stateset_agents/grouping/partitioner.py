"""What a training does with parts in each update: divide, normalise, weigh, and remember for the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stateset_agents.grouping.adaptive import AdaptiveGrouper, finer_parts, hierarchical_advantages
from stateset_agents.grouping.advantages import absolute_shares, normalise_by_part, sign_flip_share
from stateset_agents.grouping.partitions import (
    STRATEGIES,
    GroupingStrategy,
    Parts,
    Trajectories,
    kmeans_parts,
)
from stateset_agents.grouping.weights import GroupWeightCalculator, step_weights
from stateset_agents.types.errors import ConfigurationError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

GROUP_STRATEGIES = (*STRATEGIES, "online", "hierarchical")
"""For a training: `online` clusters the last 1,000 trajectories by their starts and keeps the parts' numbers;
`hierarchical` compares each step half with its task and half with those of its task that began like it."""
UNNUMBERED = ("auto", "auto_outcome", "random")
"""Whose part k is another one in each update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings:
    """How a training divides its batches."""

    strategy: str = "none"
    num_parts: int = 4
    weight_method: str = "balanced"
    seed: int = 0


class PartCredit(NamedTuple):
    """The advantages of an update, by parts."""

    advantages: Floats  # [T, n]
    parts: Parts
    weights: Floats  # [K]
    metrics: dict[str, float]


class Partitioner:
    """The parts of one update after another; what it remembers is in `state`.

    The parts count by their weights, however many steps each has; with a single part the advantages are
    PPO's, bit for bit.
    """

    def __init__(self, settings: PartSettings, state: Mapping[str, Any] | None = None) -> None:
        """`state`: of the update before. Raises ConfigurationError for a strategy or method that is none."""
        self.settings = settings
        self._online = AdaptiveGrouper(settings.num_parts) if settings.strategy == "online" else None
        if settings.strategy in STRATEGIES:
            self._strategy = GroupingStrategy(settings.strategy, settings.num_parts, seed=settings.seed)
        elif settings.strategy not in GROUP_STRATEGIES:
            raise ConfigurationError(
                f"group_strategy must be one of {', '.join(GROUP_STRATEGIES)}, got {settings.strategy!r}"
            )
        self._weights: GroupWeightCalculator | None = None
        self._before = dict(state or {})
        if self._online is not None and "online" in self._before:
            self._online.load(self._before["online"])

    def normalise(
        self, raw: Floats, mask: Bools, trajectories: Trajectories, scores: Floats, *, centred: bool = True
    ) -> PartCredit:
        """Raw advantages [T, n], of which those in `mask` train, to what the loss takes.

        `scores` [n]: each trajectory's normalised return, for weights by performance and progress.
        """
        parts, fine = self._divide(trajectories)
        labels = np.broadcast_to(parts.labels, raw.shape)
        if fine is None:
            normalised = normalise_by_part(raw, labels, mask, centred=centred)
        else:
            scales = [labels, np.broadcast_to(fine.labels, raw.shape)]
            normalised = hierarchical_advantages(raw, scales, [0.5, 0.5], mask)
        weights = self._weigh(parts, scores)
        advantages = normalised * step_weights(labels, weights, mask)
        return PartCredit(
            advantages, parts, weights, _metrics(raw, advantages, mask, trajectories, parts, weights)
        )

    def state(self) -> dict[str, Any]:
        """For the next update and for a checkpoint, as JSON; empty where nothing is remembered."""
        state: dict[str, Any] = {}
        if self._weights is not None and self._weights.method != "balanced":
            state["weights"] = self._weights.state()
        if self._online is not None:
            state["online"] = self._online.state()
        return state

    def _divide(self, trajectories: Trajectories) -> tuple[Parts, Parts | None]:
        """The parts, and a finer division where there are two scales."""
        if self._online is not None:
            return self._online.update_groups(_features(trajectories)), None
        if self.settings.strategy == "hierarchical":
            tasks = GroupingStrategy("task").group_trajectories(trajectories)
            return tasks, self._within(tasks, _features(trajectories))
        return self._strategy.group_trajectories(trajectories), None

    def _within(self, tasks: Parts, features: Floats) -> Parts:
        """Clusters of starts, task by task."""
        labels = np.zeros(len(features), dtype=np.int64)
        for task in range(tasks.num_parts):
            inside = tasks.labels == task
            found = kmeans_parts(features[inside], self.settings.num_parts, seed=self.settings.seed)
            labels[inside] = found.labels
        return finer_parts(tasks, Parts(labels=labels, num_parts=self.settings.num_parts, key="start"))

    def _weigh(self, parts: Parts, scores: Floats) -> Floats:
        number = parts.num_parts
        self._weights = GroupWeightCalculator(self.settings.weight_method, number)
        before = self._before.get("weights")
        if before is not None and len(before["progress"]) == number:
            self._weights.load(before)
        sums = np.bincount(parts.labels, weights=scores, minlength=number)
        means = np.where(parts.sizes > 0, sums / np.maximum(parts.sizes, 1), np.nan)
        return self._weights.compute_weights(means)


def _features(trajectories: Trajectories) -> Floats:
    if trajectories.features is None:
        raise ConfigurationError("parts by starts need features that are known before acting: give features")
    return trajectories.features


def _metrics(
    raw: Floats,
    advantages: Floats,
    mask: Bools,
    trajectories: Trajectories,
    parts: Parts,
    weights: Floats,
) -> dict[str, float]:
    tasks = None if trajectories.tasks is None else np.broadcast_to(trajectories.tasks, raw.shape)
    found = {
        "partition/sign_flips": sign_flip_share(raw, advantages, tasks, mask),
        "partition/outcome": float(parts.outcome),
        "partition/parts": float((parts.sizes > 0).sum()),
    }
    if tasks is not None:
        shares = absolute_shares(advantages, tasks, len(trajectories.task_names), mask)
        found |= {
            f"absolute_share/{name}": float(share)
            for name, share in zip(trajectories.task_names, shares, strict=True)
        }
    if parts.num_parts > 1:
        found |= {f"part_weight/{parts.name(part)}": float(weight) for part, weight in enumerate(weights)}
        found |= {f"part_size/{parts.name(part)}": float(size) for part, size in enumerate(parts.sizes)}
    return found
