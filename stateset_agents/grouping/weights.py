"""Weights of the parts in the loss: they are positive, sum to 1, and fall below no floor.

scores [.9, .4], performance: 1 - score [.1, .6] --> shares [1/7, 6/7] --> .05 + .9 share = [.179, .821]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stateset_agents.grouping.partitions import Bools, Floats, Labels
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
    taken = np.ones(labels.shape, dtype=np.bool_) if mask is None else mask
    counts = np.bincount(labels[taken], minlength=len(weights))
    present = np.where(counts > 0, weights, 0.0)
    if not present.any():
        return np.zeros(labels.shape)
    present = present / present.sum()
    factors = present * counts.sum() / np.maximum(counts, 1)
    return np.where(taken, factors[labels], 0.0)


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
        self._last = np.full(n_groups, np.nan)
        self._progress = np.zeros(n_groups)

    def compute_weights(self, scores: Sequence[float] | Floats) -> Floats:
        """[K] for this update's scores; NaN for a part without an episode, which keeps what it had."""
        now = np.asarray(scores, dtype=np.float64)
        if now.shape != (self.n_groups,):
            raise ConfigurationError(f"scores must be {self.n_groups}, one per part, got {list(now.shape)}")
        moved = np.isfinite(now) & np.isfinite(self._last)
        change = np.where(moved, np.abs(now - np.where(moved, self._last, 0.0)), 0.0)
        self._progress = np.where(moved, _MEMORY * self._progress + (1 - _MEMORY) * change, self._progress)
        self._last = np.where(np.isfinite(now), now, self._last)
        return part_weights(self.method, self._last, self._progress)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        last = [None if np.isnan(value) else value for value in self._last.tolist()]
        return {"last": last, "progress": self._progress.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._last = np.array(
            [np.nan if value is None else value for value in state["last"]], dtype=np.float64
        )
        self._progress = np.array(state["progress"], dtype=np.float64)
