"""Verdicts on paired results: which of two is better on the same scenarios.

Both functions take one difference for each scenario, B's mean over its tries minus A's. Tries of one scenario
are alike, so more of them make a difference more exact and are no more scenarios.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from stateset_agents.algorithms.intervals import mean_interval

Verdict = Literal["better", "worse", "unclear"]
"""The verdict on B, compared with A."""
FEWEST_SCENARIOS = 6
"""Scenarios that must differ for a verdict on shares: five of five fall to one side in 2 / 32 = 6 % of the
cases."""
FEWEST_REWARDS = 20
"""Scenarios that must differ for a verdict on rewards: 12 lognormal differences of no mean pass signs alone
in 14 % of the cases."""
_SURE = 0.98
"""Confidence of the interval that must confirm a verdict on rewards: at 95 % lognormal differences pass in 9
%."""
_LEVEL = 0.05
_Z = NormalDist().inv_cdf(1 - _LEVEL / 2)
_GRID = 1680
"""Divisible by every number of tries up to 8, and by 10, 12, 14 and 16, so that their sums stay exact."""
_MOST_SUMS = 5_000_000
"""Additions of the exact distribution, which take 10 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedMean:
    """The mean of B - A over scenarios, and what it shows."""

    mean: float
    interval: tuple[float, float] | None
    """95 %. It lies above (below) 0 where `verdict` is better (worse), and else holds 0. None of rewards that
    all differ by the same amount: their spread is unknown."""
    p_value: float
    """The p-value of `sign_flip_p`."""
    verdict: Verdict
    reason: str
    """Why it is unclear; else empty."""


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean of 0: how often random signs put the sum as far from 0 as it is.

    Fisher's randomisation test (The Design of Experiments, 1935, section 21). It is exact where a scenario's
    difference is as likely d as -d, so for two agents that are alike. With one try each it is McNemar's exact
    test. Where all differences have one sign only their number counts: k give 2 / 2^k, so another scenario
    or try that agrees never raises it. Differences are rounded to at least 1,680 steps of the largest, and
    the distribution of their sum is counted out; where that takes more than 10 ms (rewards of more than about
    100 scenarios) it is the saddlepoint's. No difference gives 1.

    >>> sign_flip_p([1.0] * 9 + [-1.0])
    0.021484375
    """
    largest = max(map(abs, differences), default=0.0)
    if largest < 1e-12:  # rounding is no difference
        return 1.0
    scale = _GRID * 2.0 ** math.ceil(-math.log2(largest))
    steps = [round(scale * difference) for difference in differences]
    unit = math.gcd(*steps)
    weights = [abs(step) // unit for step in steps if step]
    observed = abs(sum(steps)) // unit
    if observed == 0:
        return 1.0
    # Those with a minus sign sum up to at most this in half of the cases that count.
    most = (sum(weights) - observed) // 2
    exact = most * len(weights) <= _MOST_SUMS
    return min(1.0, 2 * (_chance_of_sum(weights, most) if exact else _saddlepoint_tail(weights, observed)))


def _chance_of_sum(weights: Sequence[int], most: int) -> float:
    """The chance that the weights which a fair coin picks sum up to at most `most`."""
    import numpy as np

    chances = np.zeros(most + 1)
    chances[0] = 1.0
    for weight in weights:
        chances /= 2
        if weight <= most:
            chances[weight:] += chances[: most + 1 - weight].copy()
    return float(chances.sum())


def _saddlepoint_tail(weights: Sequence[int], observed: int) -> float:
    """The chance that the weights with random signs sum up to at least `observed`, which is below their sum.

    Lugannani and Rice (Advances in Applied Probability 12, 1980), for random signs as Robinson has it
    (Journal of the Royal Statistical Society B 44, 1982, pages 91-101): the cumulants are sum log cosh(w t).
    """
    t = observed / math.fsum(weight * weight for weight in weights)
    for _ in range(100):  # Newton's steps from the left never pass the root, for tanh is concave there
        slopes = [math.tanh(weight * t) for weight in weights]
        missing = observed - math.fsum(w * slope for w, slope in zip(weights, slopes, strict=True))
        curvature = math.fsum(w * w * (1 - slope * slope) for w, slope in zip(weights, slopes, strict=True))
        t += missing / curvature
        if missing <= 1e-9 * observed:
            break
    cumulant = math.fsum(w * t + math.log1p(math.exp(-2 * w * t)) - math.log(2) for w in weights)
    root = math.sqrt(max(2 * (t * observed - cumulant), 0.0))
    normal = NormalDist()
    if root < 0.01:  # the two terms below cancel, and their difference is nearly 0
        return normal.cdf(-root)
    return normal.cdf(-root) + normal.pdf(root) * (1 / (t * math.sqrt(curvature)) - 1 / root)


def paired_shares(differences: Sequence[float]) -> PairedMean:
    """Compare shares of successful tries, whose differences are between -1 and 1.

    Better (worse) where `sign_flip_p` is at most 5 % and the mean is above (below) 0. The interval is that of
    `shares_interval`; its end next to 0 follows the verdict where the two disagree, in small samples.
    Raises ValueError without a difference and for one outside [-1, 1].
    """
    return _paired_mean(differences, shares_interval(differences), FEWEST_SCENARIOS)


def paired_rewards(differences: Sequence[float]) -> PairedMean:
    """Compare mean rewards, which may be any numbers.

    Better (worse) where at least 20 scenarios differ, `sign_flip_p` is at most 5 %, and, if any scenario
    disagrees, the 98 % `mean_interval` lies above (below) 0: signs alone err where differences are skewed.
    The interval is `mean_interval`; its end next to 0 follows the verdict where the two disagree.
    Raises ValueError without a difference.
    """
    sure = mean_interval(differences, confidence=_SURE)
    doubt = ""
    if sure is not None and sure[0] <= 0 <= sure[1] and min(differences) < 0 < max(differences):
        doubt = f"the {_SURE:.0%} interval of the mean, [{sure[0]:+.3f}, {sure[1]:+.3f}], holds 0"
    return _paired_mean(differences, mean_interval(differences), FEWEST_REWARDS, doubt)


def _paired_mean(
    differences: Sequence[float], interval: tuple[float, float] | None, fewest: int, doubt: str = ""
) -> PairedMean:
    """The verdict where at least `fewest` scenarios differ; `doubt` makes one unclear that is significant."""
    n, reason, p_value = len(differences), doubt, sign_flip_p(differences)
    num_differ = sum(abs(difference) > 1e-12 for difference in differences)
    if num_differ < fewest:
        reason = f"{num_differ} of {n} scenarios differ, at least {fewest} must"
    elif p_value > _LEVEL:
        reason = f"random signs give as much in {p_value:.0%} of the cases"
    mean = math.fsum(differences) / n
    verdict: Verdict = "unclear" if reason else "better" if mean > 0 else "worse"
    if interval is not None:
        low, high = interval
        least = min((abs(d) for d in differences if abs(d) > 1e-12), default=0.0) / n
        ends = {
            "unclear": (min(low, 0.0), max(high, 0.0)),
            "better": (max(low, least), high),
            "worse": (low, min(high, -least)),
        }
        interval = ends[verdict]
    return PairedMean(mean=mean, interval=interval, p_value=p_value, verdict=verdict, reason=reason)


def shares_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95 % score interval of the mean of differences between -1 and 1, one for each scenario.

    A mean t is kept where the sum is within 1.96 standard deviations of n t. Their variance is that of random
    signs, as in `sign_flip_p`, with either sign stretched so that nothing leaves [-1, 1]: (1 - t^2) sum r^2,
    where r is how far a difference is from t as a share of how far it could be. For n differences of 1 the
    result is Wilson's for n of n. It is at least n (s |t| - t^2), where s is the mean size of the differences
    that are not 0, weighted by size: a mean of t needs scenarios that differ, whether they were met or not.
    Raises ValueError without a difference and for one outside [-1, 1].
    """
    if not differences or max(map(abs, differences)) > 1 + 1e-9:
        raise ValueError("an interval of shares needs at least one difference, and all between -1 and 1")
    return -_upper_bound([-difference for difference in differences]), _upper_bound(differences)


def _upper_bound(differences: Sequence[float]) -> float:
    n, total, counts = len(differences), math.fsum(differences), Counter(differences)
    squares = math.fsum(difference * difference for difference in differences)
    size = (squares + 1) / (math.fsum(map(abs, differences)) + 1)  # one more that differs wholly

    def is_kept(t: float) -> bool:
        of_signs = (1 - t * t) * math.fsum(
            number * (max(difference - t, 0) / (1 - t) + max(t - difference, 0) / (1 + t)) ** 2
            for difference, number in counts.items()
        )
        return n * t - total <= _Z * math.sqrt(max(of_signs, n * (size * abs(t) - t * t)))

    low, high = max(-1.0, total / n), 1.0
    if high - low < 1e-12:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return high
