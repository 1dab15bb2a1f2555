"""Weights of the parts in the loss: they are positive, sum to 1, and fall below no floor.

scores [.9, .4], performance: 1 - score [.1, .6] --> shares [1/7, 6/7] --> .05 + .9 share = [.179, .821]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stateset_agents.grouping.partitions import Bools, Floats, Labels, described, scores_within
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_one_of, expect_that

FLOOR = 0.05
"""No part's weight is below it, or below 1 / K where that is less."""
_MEMORY = 0.9
"""Share of the moving average of progress that stays at each update."""

_Raw = Callable[[Floats, Floats], Floats]
"""(scores [K], progress [K]) -> [K] how much each part asks for, 0 or more; NaN where it is not known."""

PART_WEIGHTS: Mapping[str, _Raw] = {
    "balanced": lambda scores, progress: np.ones(len(scores)),
    "performance": lambda scores, progress: 1.0 - np.clip(scores, 0.0, 1.0),
    "adaptive": lambda scores, progress: progress,
}
"""balanced: all alike; performance: those that are far from 1; adaptive: those that move (after PLR,
https://arxiv.org/abs/2010.03934, whose score is an error of the value; here it is |progress|)."""


def part_weights(
    method: str, scores: Sequence[float] | Floats, progress: Sequence[float] | Floats | None = None
) -> Floats:
    """[K] positive weights that sum to 1.

    `scores`: normalised returns, 0 for a random policy and 1 for a solved part, NaN where nobody knows;
    `progress`: moving averages of |change of score|, 0 or more, for `adaptive`. Weight = f + (1 - K f) share,
    where f is the smaller of FLOOR and 1 / K and share what the part asks for by the sum of all. A part
    that is not known asks for the mean of the others; where nobody asks for anything, all are alike.
    """
    expect_one_of("group_weight_method", method, PART_WEIGHTS)
    values = np.asarray(scores, dtype=np.float64)
    moved = np.zeros(len(values)) if progress is None else np.asarray(progress, dtype=np.float64)
    if not len(values):
        raise ConfigurationError("weights need at least one part, got none")
    raw = PART_WEIGHTS[method](values, moved)
    is_known = np.isfinite(raw)
    raw = np.where(is_known, raw, raw[is_known].mean() if is_known.any() else 1.0)
    number = len(raw)
    total = raw.sum()
    shares = raw / total if total > 0 else np.full(number, 1.0 / number)
    floor = min(FLOOR, 1.0 / number)
    return floor + (1.0 - number * floor) * shares


def step_weights(labels: Labels, weights: Floats, mask: Bools | None = None) -> Floats:
    """Factors of each step's loss, so that a mean over all steps is the weighted mean of the
    parts' means: w of the part, by its share of the steps.

    Weights of parts without a step go to the others in proportion. 0 where `mask` is False; with one part
    exactly 1.
    """
    step_mask = np.ones(labels.shape, dtype=np.bool_) if mask is None else mask
    counts = np.bincount(labels[step_mask], minlength=len(weights))
    present = np.where(counts > 0, weights, 0.0)
    if not present.any():
        return np.zeros(labels.shape)
    present = present / present.sum()
    factors = present * counts.sum() / np.maximum(counts, 1)
    return np.where(step_mask, factors[labels], 0.0)


def group_fairness(scores: Sequence[float] | Floats) -> float:
    """The worst normalised return by the mean one: 1 where all are alike, 0 where one is at its random
    policy's. Scores below 0 count as 0; 0 where the mean is 0. Raises ConfigurationError for no score."""
    floored = np.maximum(np.asarray(scores, dtype=np.float64), 0.0)
    if not len(floored):
        raise ConfigurationError("fairness needs at least one score, got none")
    mean = float(floored.mean())
    return float(floored.min()) / mean if mean else 0.0


class GroupWeightCalculator:
    """Weights over the updates of a training; it remembers the last scores and how fast they moved."""

    def __init__(self, method: str = "balanced", n_groups: int = 4) -> None:
        part_weights(method, [0.0])  # refuses an unknown name
        expect_that(n_groups >= 1, "n_groups", "be at least 1", n_groups)
        self.method, self.n_groups = method, n_groups
        self._last: dict[Any, float] = {}
        self._progress: dict[Any, float] = {}

    def compute_weights(
        self, grouped_rollouts: Mapping[Any, Sequence[Any]], group_advantages: Mapping[Any, Any]
    ) -> dict[Any, float]:
        """{part: weight} of the parts of this update, which sum to 1.

        A part's score is the mean of its trajectories' `score`; where one has none, of their returns, from 0
        at the lowest of all to 1 at the highest. Raises ConfigurationError for advantages of other parts.
        """
        if grouped_rollouts.keys() != group_advantages.keys():
            names = [sorted(map(str, each)) for each in (grouped_rollouts, group_advantages)]
            raise ConfigurationError(f"advantages must be of the same parts, got {names[0]} and {names[1]}")
        members = [member for group in grouped_rollouts.values() for member in group]
        own_scores = [getattr(member, "score", None) for member in members]
        scores = scores_within(described(members).returns) if None in own_scores else np.array(own_scores)
        ends = np.cumsum([len(group) for group in grouped_rollouts.values()])[:-1]
        means = [float(part.mean()) for part in np.split(scores, ends)]
        return dict(zip(grouped_rollouts, self._weigh(grouped_rollouts, means).tolist(), strict=True))

    def weights(self, scores: Sequence[float] | Floats) -> Floats:
        """[K] for this update's scores; NaN for a part without an episode, which keeps what it had."""
        if len(scores) != self.n_groups:
            raise ConfigurationError(f"scores must be {self.n_groups}, one per part, got {len(scores)}")
        return self._weigh(range(self.n_groups), scores)

    def _weigh(self, parts: Iterable[Any], scores: Iterable[float]) -> Floats:
        parts = list(parts)
        for part, now in zip(parts, scores, strict=True):
            if not np.isfinite(now):
                continue
            if part in self._last:
                change = abs(now - self._last[part])
                self._progress[part] = _MEMORY * self._progress.get(part, 0.0) + (1 - _MEMORY) * change
            self._last[part] = float(now)
        last, progress = self._remembered(parts, np.nan)
        return part_weights(self.method, last, progress)

    def _remembered(self, parts: Iterable[Any], absent: float | None) -> tuple[list[Any], list[float]]:
        pairs = [(self._last.get(part, absent), self._progress.get(part, 0.0)) for part in parts]
        return [last for last, _ in pairs], [progress for _, progress in pairs]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        last, progress = self._remembered(range(self.n_groups), None)
        return {"last": last, "progress": progress}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._last = {part: value for part, value in enumerate(state["last"]) if value is not None}
        self._progress = dict(enumerate(state["progress"]))
