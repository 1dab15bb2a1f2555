"""Is one agent better than another? Both play the same scenarios with the same users, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.core.trajectory import Status, Trajectory
from stateset_agents.errors import ConfigurationError
from stateset_agents.evaluation.evaluator import Evaluation
from stateset_agents.streams import derive

__all__ = ["Comparison", "Paired", "compare", "exact_mcnemar", "mean_interval", "paired_interval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Success of two agents on the same scenarios; wins, losses and ties are B's."""

    n: int
    a: float
    """Share of A's successes."""
    b: float
    difference: float
    """b - a."""
    interval: tuple[float, float]
    """95 % of the difference, see `paired_interval`."""
    p_value: float
    """Of no difference, see `exact_mcnemar`."""
    wins: int
    """Scenarios where B alone succeeded."""
    losses: int
    ties: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Agent B against agent A."""

    success: Paired | None
    """None where the environment gives no verdict."""
    families: Mapping[str, Paired]
    reward: float | None
    """Mean of B's reward minus A's over the pairs where both are scored; None without any."""
    reward_interval: tuple[float, float] | None
    """95 % of that mean, see `mean_interval`."""
    num_pairs: int
    """Scenarios that both played."""
    num_left_out: int
    """Scenarios that one of them did not: its conversation failed."""
    temperature: float

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def compare(a: Evaluation, b: Evaluation) -> Comparison:
    """Pair two evaluations by scenario.

    Raises ConfigurationError where they are of other scenarios or temperatures, or no scenario was played by
    both.
    """
    ours, theirs = _by_scenario(a), _by_scenario(b)
    if ours.keys() != theirs.keys():
        raise ConfigurationError("two agents are compared on the same scenarios: evaluate both on those")
    if a.temperature != b.temperature:
        raise ConfigurationError(
            f"two agents are compared at the same temperature, got {a.temperature} and {b.temperature}"
        )
    pairs = [(ours[name], theirs[name]) for name in ours]
    played = [pair for pair in pairs if all(one.status is not Status.FAILED for one in pair)]
    if not played:
        raise ConfigurationError("no scenario was played by both agents: look at what failed")
    judged = [
        (one.scenario.family, one.success, other.success)
        for one, other in played
        if one.success is not None and other.success is not None
    ]
    rewards = [
        other.reward - one.reward
        for one, other in played
        if one.reward is not None and other.reward is not None
    ]
    families = sorted({family for family, _, _ in judged})
    return Comparison(
        success=_paired([(one, other) for _, one, other in judged]) if judged else None,
        families={
            name: _paired([(one, other) for family, one, other in judged if family == name])
            for name in families
        },
        reward=math.fsum(rewards) / len(rewards) if rewards else None,
        reward_interval=mean_interval(rewards) if rewards else None,
        num_pairs=len(played),
        num_left_out=len(pairs) - len(played),
        temperature=a.temperature,
    )


def _by_scenario(evaluation: Evaluation) -> dict[str, Trajectory]:
    return {t.scenario.id: t for group in evaluation.groups for t in group.trajectories}


def _paired(verdicts: Sequence[tuple[bool, bool]]) -> Paired:
    n = len(verdicts)
    both = sum(a and b for a, b in verdicts)
    losses = sum(a and not b for a, b in verdicts)
    wins = sum(b and not a for a, b in verdicts)
    return Paired(
        n=n,
        a=(both + losses) / n,
        b=(both + wins) / n,
        difference=(wins - losses) / n,
        interval=paired_interval(both, wins, losses, n - both - wins - losses),
        p_value=exact_mcnemar(wins, losses),
        wins=wins,
        losses=losses,
        ties=n - wins - losses,
    )


def exact_mcnemar(wins: int, losses: int) -> float:
    """Two-sided p-value of "as often won as lost": a fair coin on the pairs that differ (McNemar 1947).

    9 wins and 1 loss give 2 (1 + 10) / 1024 = .021; no pair that differs gives 1.
    """
    n, fewer = wins + losses, min(wins, losses)
    return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / (1 << n))


def paired_interval(both: int, wins: int, losses: int, neither: int) -> tuple[float, float]:
    """95 % of the difference b - a of two paired shares, from the four counts.

    Newcombe's square-and-add of the two Wilson intervals, corrected for their correlation (Statistics in
    Medicine 17, 1998, pages 2635-2650, method 10). Unlike p +- 1.96 se it keeps its level for few pairs and
    for shares near 0 and 1. Raises ValueError without a pair.
    """
    n = both + wins + losses + neither
    if n == 0:
        raise ValueError("there is no pair to compare")
    a, b = (both + losses) / n, (both + wins) / n
    (a_low, a_high), (b_low, b_high) = wilson(both + losses, n), wilson(both + wins, n)
    margins = (both + losses) * (wins + neither) * (both + wins) * (losses + neither)
    covariance: float = both * neither - wins * losses
    if covariance > 0:
        covariance = max(covariance - n / 2, 0)  # Newcombe's continuity correction
    phi = covariance / math.sqrt(margins) if margins else 0.0

    def half(own: float, other: float) -> float:
        return math.sqrt(max(0.0, own * own - 2 * phi * own * other + other * other))

    low = b - a - half(b - b_low, a_high - a)
    high = b - a + half(b_high - b, a - a_low)
    return max(-1.0, low), min(1.0, high)


def mean_interval(values: Sequence[float], *, resamples: int = 4000) -> tuple[float, float]:
    """95 % of the mean by the percentile bootstrap over scenarios (Efron 1979), always the same for the same
    values; rewards need not be normal. Raises ValueError for no value."""
    import numpy as np

    if not values:
        raise ValueError("there is no value to take the mean of")
    given = np.asarray(values)
    draw = np.random.default_rng(derive(0, "bootstrap", len(values)))
    means = [given[draw.integers(len(given), size=len(given))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
