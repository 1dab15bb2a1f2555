"""The parts of a training in each update: divide, normalise, weigh, and remember for the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from stateset_agents.grouping.advantages import (
    absolute_shares,
    normalise_by_part,
    part_statistics,
    sign_flip_share,
)
from stateset_agents.grouping.partitions import (
    STRATEGIES,
    Bools,
    Floats,
    GroupingStrategy,
    Labels,
    Parts,
    Trajectories,
    extract_features,
    kmeans,
    kmeans_parts,
    matched,
    nearest_centres,
    standardised,
)
from stateset_agents.grouping.weights import GroupWeightCalculator, step_weights
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

# ------------------------------------------------------------------------------------------ online parts


class AdaptiveGrouper:
    """Online k-means over features known before acting, whose part numbers keep their meaning.

    Each call clusters the last `history_window` trajectories twice, from k-means++ and from the previous
    centres, keeps what fits better, and numbers the new centres by the old ones that they are nearest to.
    """

    def __init__(self, history_window: int = 1000, n_groups: int = 4, *, seed: int = 0) -> None:
        expect_that(history_window >= 1, "history_window", "be at least 1", history_window)
        self.n_groups, self.history_window, self.seed = n_groups, history_window, seed
        self.history: deque[list[float]] = deque(maxlen=history_window)
        """Features of the last trajectories."""
        self._centres: Floats | None = None

    def update_groups(self, new_trajectories: Sequence[Any] | Floats) -> Labels:
        """[n] the parts of these trajectories, which it remembers: objects with `observations` [T, ...], or
        their features [n, d]."""
        if not isinstance(new_trajectories, np.ndarray):
            new_trajectories = extract_features(new_trajectories)
        return self.parts(new_trajectories).labels

    def parts(self, features: Floats) -> Parts:
        """Remember these trajectories' features [n, d] and say their parts, with centres."""
        if not len(features) and self._centres is None:
            return Parts(labels=np.zeros(0, dtype=np.int64), num_parts=self.n_groups, key="online")
        self.history.extend(features.astype(np.float64).tolist())
        rows, means, spreads = standardised(np.array(self.history))
        old = None if self._centres is None else (self._centres - means) / spreads
        centres = self._fitted(rows, old)
        self._centres = centres * spreads + means
        labels = nearest_centres((features.astype(np.float64) - means) / spreads, centres)
        return Parts(labels=labels, num_parts=self.n_groups, key="online", centres=self._centres)

    def _fitted(self, rows: Floats, old: Floats | None) -> Floats:
        """[K, d] centres of the window in the order of the old ones."""
        fresh = kmeans(rows, self.n_groups, seed=self.seed)
        if old is None or len(old) < len(fresh.centres):  # there was nothing to tell so many apart
            return fresh.centres
        warm = kmeans(rows, self.n_groups, centres=old)
        if len(old) > len(fresh.centres) or warm.inertia <= fresh.inertia:
            return warm.centres
        return fresh.centres[list(matched(old, fresh.centres))]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        return {
            "window": list(self.history),
            "centres": None if self._centres is None else self._centres.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.history = deque(state["window"], maxlen=self.history_window)
        self._centres = None if state["centres"] is None else np.array(state["centres"], dtype=np.float64)


def finer_parts(coarse: Parts, fine: Parts) -> Parts:
    """Each part of `coarse` divided by `fine`: part c * fine.num_parts + f."""
    return Parts(
        labels=coarse.labels * fine.num_parts + fine.labels,
        num_parts=coarse.num_parts * fine.num_parts,
        key=f"{coarse.key}, {fine.key}",
        outcome=coarse.outcome or fine.outcome,
        names=tuple(
            f"{coarse.name(c)}, {fine.name(f)}"
            for c in range(coarse.num_parts)
            for f in range(fine.num_parts)
        ),
    )


def hierarchical_advantages(
    advantages: Floats,
    scales: Sequence[Labels],
    shares: Sequence[float],
    mask: Bools | None = None,
) -> Floats:
    """The advantages normalised at each scale, added by `shares`, which are positive and sum to 1.

    With tasks as the first scale and clusters of starts within them as the second, a step is compared with
    its task and with what began like it.
    """
    if len(scales) != len(shares) or not scales:
        raise ConfigurationError(f"shares must be one per scale, {len(scales)}, got {len(shares)}")
    if min(shares) <= 0 or abs(sum(shares) - 1.0) > 1e-9:
        raise ConfigurationError(f"shares must be positive and sum to 1, got {list(shares)}")
    total = np.zeros(advantages.shape)
    for labels, share in zip(scales, shares, strict=True):
        total += share * normalise_by_part(advantages, labels, mask)
    return total


GROUP_STRATEGIES = (*STRATEGIES, "online", "hierarchical")
"""Strategies of a training: `online` clusters the last 1,000 trajectories by their starts and keeps the
parts' numbers; `hierarchical` compares each step half with its task and half with those of its task that
began like it."""
UNNUMBERED = ("auto", "auto_outcome", "random")
"""Strategies whose part k is another one in each update."""


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

    def __init__(
        self,
        strategy: str = "none",
        num_parts: int = 4,
        weight_method: str = "balanced",
        *,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`strategy`: one of GROUP_STRATEGIES; `state`: of the update before. Raises ConfigurationError for a
        strategy or method that is none."""
        self.strategy, self.num_parts = strategy, num_parts
        self.weight_method, self.seed = weight_method, seed
        self._online = AdaptiveGrouper(n_groups=num_parts) if strategy == "online" else None
        if strategy in STRATEGIES:
            self._grouping = GroupingStrategy(strategy, num_parts, seed=seed)
        elif strategy not in GROUP_STRATEGIES:
            raise ConfigurationError(
                f"group_strategy must be one of {', '.join(GROUP_STRATEGIES)}, got {strategy!r}"
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
        """The state for the next update and for a checkpoint, as JSON; empty if nothing is remembered."""
        state: dict[str, Any] = {}
        if self._weights is not None and self._weights.method != "balanced":
            state["weights"] = self._weights.state()
        if self._online is not None:
            state["online"] = self._online.state()
        return state

    def _divide(self, trajectories: Trajectories) -> tuple[Parts, Parts | None]:
        """The parts, and a finer division where there are two scales."""
        if self._online is not None:
            return self._online.parts(_features(trajectories)), None
        if self.strategy == "hierarchical":
            tasks = GroupingStrategy("task").parts(trajectories)
            return tasks, self._within(tasks, _features(trajectories))
        return self._grouping.parts(trajectories), None

    def _within(self, tasks: Parts, features: Floats) -> Parts:
        """Clusters of starts, task by task."""
        labels = np.zeros(len(features), dtype=np.int64)
        for task in range(tasks.num_parts):
            inside = tasks.labels == task
            clusters = kmeans_parts(features[inside], self.num_parts, seed=self.seed)
            labels[inside] = clusters.labels
        return finer_parts(tasks, Parts(labels=labels, num_parts=self.num_parts, key="start"))

    def _weigh(self, parts: Parts, scores: Floats) -> Floats:
        number = parts.num_parts
        self._weights = GroupWeightCalculator(self.weight_method, number)
        before = self._before.get("weights")
        if before is not None and len(before["progress"]) == number:
            self._weights.load(before)
        sums = np.bincount(parts.labels, weights=scores, minlength=number)
        means = np.where(parts.sizes > 0, sums / np.maximum(parts.sizes, 1), np.nan)
        return self._weights.weights(means)


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
    metrics = {
        "partition/sign_flips": sign_flip_share(raw, advantages, tasks, mask),
        "partition/outcome": float(parts.outcome),
        "partition/parts": float((parts.sizes > 0).sum()),
    }
    if tasks is not None:
        shares = absolute_shares(advantages, tasks, len(trajectories.task_names), mask)
        metrics |= {
            f"absolute_share/{name}": float(share)
            for name, share in zip(trajectories.task_names, shares, strict=True)
        }
    if parts.num_parts > 1:
        labels = np.broadcast_to(parts.labels, raw.shape)
        statistics = [part_statistics(values, labels, parts.num_parts, mask) for values in (raw, advantages)]
        for part, (before, after) in enumerate(zip(*statistics, strict=True)):
            values = {"weight": weights[part], "size": parts.sizes[part]}
            values |= {"raw_mean": before.mean, "raw_std": before.std, "raw_share": before.absolute_share}
            values |= {"mean": after.mean, "std": after.std, "share": after.absolute_share}
            metrics |= {f"part_{name}/{parts.name(part)}": float(value) for name, value in values.items()}
    return metrics
