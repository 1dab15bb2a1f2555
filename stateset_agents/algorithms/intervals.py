"""Confidence intervals for a share of successes. Evaluation and reports use it."""

from __future__ import annotations

import math
from statistics import NormalDist

__all__ = ["wilson"]


def wilson(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share: [low, high] within [0, 1]; n = 0 gives [0, 1].

    Unlike p +- 1.96 se it stays honest at 0 % and 100 %: 0 of 10 gives [0, 0.278]. Counts may be effective
    ones and need not be whole (`evaluation.intervals.share_interval`).
    Raises ValueError unless 0 <= successes <= n and 0 < confidence < 1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n, got {successes} of {n}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence!r}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, z2 = successes / n, z * z
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high
