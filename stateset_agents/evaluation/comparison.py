"""Is one agent better than another? Both play the same scenarios with the same users, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any, Literal

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.core.trajectory import Trajectory
from stateset_agents.errors import ConfigurationError
from stateset_agents.evaluation.evaluator import Evaluation
from stateset_agents.evaluation.intervals import mean_interval
from stateset_agents.evaluation.measures import success_of_scenarios, tries_of

__all__ = ["Comparison", "Paired", "Verdict", "compare", "exact_mcnemar", "mean_interval", "paired_interval"]

Verdict = Literal["better", "worse", "unclear"]
"""Of B, against A."""
_FEWEST = 6
"""Scenarios that must differ for a verdict: a fair coin falls 5 times on one side in 2/32 = 6 % of the cases,
and drawing those few again never shows anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Success of two agents on the same scenarios; wins, losses and ties are B's."""

    n: int
    """Scenarios."""
    a: float
    """Share of A's successes."""
    b: float
    difference: float
    """b - a."""
    interval: tuple[float, float]
    """95 % of the difference: `paired_interval` with one try of each scenario, else as `bootstrap`."""
    bootstrap: tuple[float, float]
    """95 % of the difference by drawing scenarios, each with all that both did in it (`mean_interval`)."""
    p_value: float
    """Of no difference, see `exact_mcnemar`."""
    wins: int
    """Scenarios where B succeeded (with several tries: more often than A)."""
    losses: int
    ties: int

    @property
    def verdict(self) -> Verdict:
        """Better (worse) where both intervals lie above (below) 0 and at least six scenarios differ."""
        return _verdict(self.wins + self.losses, self.interval, self.bootstrap)

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "verdict": self.verdict}


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
    num_rewards_differ: int
    """Pairs in which one of them was paid more."""
    num_pairs: int
    """Scenarios that both played."""
    num_left_out: int
    """Scenarios that one of them did not: its conversation failed."""
    temperature: float

    @property
    def verdict(self) -> Verdict:
        """Is B better than A? Going by success, or by the reward where the environment gives no verdict."""
        if self.success is not None:
            return self.success.verdict
        if self.reward_interval is None:
            return "unclear"
        return _verdict(self.num_rewards_differ, self.reward_interval)

    def summary(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            **asdict(self),
            "verdict": self.verdict,
            "success": None if self.success is None else self.success.summary(),
            "families": {name: one.summary() for name, one in self.families.items()},
        }


def _verdict(num_differ: int, *intervals: tuple[float, float]) -> Verdict:
    if num_differ < _FEWEST:
        return "unclear"
    if all(low > 0 for low, _ in intervals):
        return "better"
    return "worse" if all(high < 0 for _, high in intervals) else "unclear"


def compare(a: Evaluation, b: Evaluation) -> Comparison:
    """Pair two evaluations by scenario; tries of one scenario are taken together.

    Raises ConfigurationError where they are of other scenarios, temperatures or numbers of tries, or no
    scenario was played by both.
    """
    if _scenarios(a) != _scenarios(b):
        raise ConfigurationError("two agents are compared on the same scenarios: evaluate both on those")
    for what, ours, theirs in (
        ("at the same temperature", a.temperature, b.temperature),
        ("on equally many tries", a.tries, b.tries),
    ):
        if ours != theirs:
            raise ConfigurationError(f"two agents are compared {what}, got {ours} and {theirs}")
    ours_by, theirs_by = tries_of(a.groups), tries_of(b.groups)
    pairs = [(ours_by[name], theirs_by[name]) for name in ours_by if name in theirs_by]
    if not pairs:
        raise ConfigurationError("no scenario was played by both agents: look at what failed")
    judged = []
    for own, others in pairs:
        shares = success_of_scenarios([own]), success_of_scenarios([others])
        if all(shares):
            judged.append((own[0].scenario.family, shares[0][0], shares[1][0]))
    rewards = [
        other - one
        for own, others in pairs
        if (one := _mean_reward(own)) is not None and (other := _mean_reward(others)) is not None
    ]
    families = sorted({family for family, _, _ in judged})
    single = all(
        len(own) == len(others) == 1 for own, others in pairs
    )  # a scenario may have been given twice
    return Comparison(
        success=_paired([(one, other) for _, one, other in judged], single) if judged else None,
        families={
            name: _paired([(one, other) for family, one, other in judged if family == name], single)
            for name in families
        },
        reward=math.fsum(rewards) / len(rewards) if rewards else None,
        reward_interval=mean_interval(rewards) if rewards else None,
        num_rewards_differ=sum(difference != 0 for difference in rewards),
        num_pairs=len(pairs),
        num_left_out=len(_scenarios(a)) - len(pairs),
        temperature=a.temperature,
    )


def _scenarios(evaluation: Evaluation) -> set[str]:
    return {one.scenario.id for group in evaluation.groups for one in group.trajectories}


def _mean_reward(tries: Sequence[Trajectory]) -> float | None:
    rewards = [one.reward for one in tries if one.reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def _paired(shares: Sequence[tuple[float, float]], single: bool) -> Paired:
    """Of each scenario A's and B's share of successful tries; 0 or 1 each where there was a single one."""
    n = len(shares)
    wins, losses = sum(b > a for a, b in shares), sum(a > b for a, b in shares)
    bootstrap = mean_interval([b - a for a, b in shares])
    both = sum(a == b == 1 for a, b in shares)
    return Paired(
        n=n,
        a=math.fsum(a for a, _ in shares) / n,
        b=math.fsum(b for _, b in shares) / n,
        difference=math.fsum(b - a for a, b in shares) / n,
        interval=paired_interval(both, wins, losses, n - both - wins - losses) if single else bootstrap,
        bootstrap=bootstrap,
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
