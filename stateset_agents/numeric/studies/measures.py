"""Measures of runs with few seeds, after rliable (https://arxiv.org/abs/2108.13264), with their intervals."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive

_RESAMPLES = 2000


def probability_of_improvement(
    better: Mapping[str, Sequence[float]],
    than: Mapping[str, Sequence[float]],
    *,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> tuple[float, tuple[float, float] | None]:
    """How often a run of the one scores above a run of the other, ties counted half, mean over the suites.

    {"mix": [.9, .8]} against {"mix": [.7, .8]} is 3.5 of 4. The interval is as in `stratified_interval`, both
    sides drawn. Raises ConfigurationError where they have no suite in common.
    """
    suites = [name for name in better if better[name] and than.get(name)]
    if not suites:
        raise ConfigurationError("the two arms have no suite in common")

    def mean(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        return sum(_wins(ours, theirs) for ours, theirs in pairs) / len(pairs)

    pairs = [(better[name], than[name]) for name in suites]
    centre = mean(pairs)
    if min(len(side) for pair in pairs for side in pair) < 3:
        return centre, None
    draw = random.Random(derive(seed, "probability_of_improvement"))
    drawn = sorted(
        mean(
            [(draw.choices(ours, k=len(ours)), draw.choices(theirs, k=len(theirs))) for ours, theirs in pairs]
        )
        for _ in range(resamples)
    )
    cut = round(0.025 * resamples)
    return centre, (drawn[cut], drawn[-1 - cut])


def _wins(ours: Sequence[float], theirs: Sequence[float]) -> float:
    won = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in ours for b in theirs)
    return won / (len(ours) * len(theirs))


def performance_profile(scores: Sequence[float], thresholds: Sequence[float]) -> list[float]:
    """For each threshold the share of scores above it; [.2, .6] at [0, .5, 1] give 1, .5, 0."""
    if not scores:
        raise ConfigurationError("there is no score to draw a profile of")
    return [sum(score > threshold for score in scores) / len(scores) for threshold in thresholds]


def optimality_gap(scores: Sequence[float]) -> float:
    """How much is missing to a score of 1, in the mean; what is above 1 makes up for nothing."""
    if not scores:
        raise ConfigurationError("there is no score to measure a gap of")
    return sum(1.0 - min(1.0, score) for score in scores) / len(scores)


def area_under_curve(steps: Sequence[float], scores: Sequence[float], *, length: float) -> float:
    """The mean height of a curve from step 0, where the score is 0, to `length`, scores held within 0 and 1.

    A straight line from 0 to 1 has .5; a curve that ends early goes on level. Raises ConfigurationError for
    a curve without a point.
    """
    if not steps or len(steps) != len(scores):
        raise ConfigurationError(f"a curve needs as many scores as steps, got {len(scores)} and {len(steps)}")
    total, before, height = 0.0, 0.0, 0.0
    for step, score in zip([*steps, max(length, steps[-1])], [*scores, scores[-1]], strict=True):
        at, now = min(float(step), length), min(1.0, max(0.0, score))
        total += (at - before) * (height + now) / 2
        before, height = at, now
    return total / length


def worst_drawdown(scores: Sequence[float]) -> float:
    """The furthest that a curve fell below a height that it had reached; 0 for one that only rises."""
    highest, worst = float("-inf"), 0.0
    for score in scores:
        highest = max(highest, score)
        worst = max(worst, highest - score)
    return worst
