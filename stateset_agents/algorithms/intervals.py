"""Confidence intervals of shares, means and interquartile means; pass@k and pass^k.

scripts/interval_coverage.py measures how often each interval holds the truth:
docs/evidence/interval-coverage.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import comb
from statistics import NormalDist, variance

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.seeds import derive


def wilson(successes: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share: [low, high] within [0, 1]; n = 0 gives [0, 1].

    Unlike p +- 1.96 se it stays honest at 0 % and 100 %: 0 of 10 gives [0, 0.278]. Counts may be effective
    ones and need not be whole (`share_interval`).
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


def pass_at_k(successes: int, n: int, k: int) -> float:
    """pass@k: the chance that at least one of k tries succeeds, 1 - C(n-c, k) / C(n, k).

    Unbiased from c successes in n tries (https://arxiv.org/abs/2107.03374, equation 1): the share of
    all choices of k among the n that hold a success. 1 of 4 gives .25, .5, .75, 1 for k = 1 to 4.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(successes, n, k)
    return 1 - comb(n - successes, k) / comb(n, k)


def pass_hat_k(successes: int, n: int, k: int) -> float:
    """pass^k: the chance that all of k tries succeed, C(c, k) / C(n, k).

    Unbiased from c successes in n tries (https://arxiv.org/abs/2406.12045, section 4). 3 of 4 gives
    .75, .5, .25, 0 for k = 1 to 4. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(successes, n, k)
    return comb(successes, k) / comb(n, k)


def _check(successes: int, n: int, k: int) -> None:
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and n, got {successes} of {n}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and n = {n}, got {k}")


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval of the mean: on each side the wider of Student's t and Hall's t for skewed values.

    Hall's is Student's after a cubic that takes the skewness out (Hall, Journal of the Royal Statistical
    Society B 54, 1992, pages 221-228). Give one value per scenario: tries of one scenario are not
    independent, so give their mean. None for fewer than two values and for equal values, whose spread is
    unknown. Raises ValueError for no value.
    """
    n = len(values)
    if n == 0:
        raise ValueError("there is no value to take the mean of")
    mean = math.fsum(values) / n
    squares = math.fsum((value - mean) ** 2 for value in values)
    if squares <= n * (1e-12 * mean) ** 2:  # rounding is no spread
        return None
    deviation = math.sqrt(squares / (n - 1))
    skewness = math.fsum((value - mean) ** 3 for value in values) / n / (squares / n) ** 1.5
    t = t_quantile(0.5 + confidence / 2, n - 1) / math.sqrt(n)
    low = mean - deviation * max(t, _skewed(t, skewness, n))
    high = mean + deviation * max(t, -_skewed(-t, skewness, n))
    return low, high


def _skewed(t: float, skewness: float, n: int) -> float:
    """(mean - truth) / deviation, x, where Hall's x + g x^2 / 3 + g^2 x^3 / 27 + g / 6n is t; g: skewness."""
    if abs(skewness) < 1e-6:
        return t
    return 3 / skewness * (math.cbrt(1 + skewness * (t - skewness / (6 * n))) - 1)


def crossed_interval(rows: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % interval of the mean of a table whose rows and columns are both random samples.

    For training runs of several seeds (rows) measured on the same scenarios (columns): another seed and
    another scenario would both have given other values. The variances of the row means and of the column
    means are added, which errs on the wide side (Owen, https://arxiv.org/abs/0712.1111), with Satterthwaite's
    degrees of freedom (Biometrics Bulletin 2, 1946). Three rows give 2 degrees of freedom where runs differ
    more than scenarios: wide, and 90 to 99 % hold the truth; two rows, 83 to 98 %. A single row holds no
    information on seeds: it gets `mean_interval` of its columns. None if nothing differs. Raises ValueError
    for an empty or ragged table.
    """
    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError("a table needs rows of one length with at least one value each")
    if len(rows) == 1:
        return mean_interval(rows[0])
    means = [[math.fsum(row) / len(row) for row in rows]]
    if len(rows[0]) > 1:
        means.append([math.fsum(column) / len(rows) for column in zip(*rows, strict=True)])
    variances = [(variance(values) / len(values), len(values) - 1) for values in means]
    mean = math.fsum(map(math.fsum, rows)) / (len(rows) * len(rows[0]))
    total = sum(value for value, _ in variances)
    if total == 0:
        return None
    freedom = total**2 / sum(value**2 / of_part for value, of_part in variances)
    half = t_quantile(0.975, freedom) * math.sqrt(total)
    return mean - half, mean + half


def share_interval(shares: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean of shares, one for each scenario, such as its share of successful tries.

    Wilson's interval over scenarios, with the design effect of the tries: if shares vary less than those of
    one try each, n scenarios hold as much information as n / effect scenarios with one try. The effect is
    variance / (p (1 - p)), at most 1, estimated with two additional scenarios of effect 1, because near 0 and
    1 the data says nearly nothing of it. With shares of only 0 and 1 the effect is 1 and the result Wilson's
    interval. Raises ValueError for no share.
    """
    if not shares:
        raise ValueError("there is no share to take the mean of")
    n = len(shares)
    mean = math.fsum(shares) / n
    if min(shares) == max(shares) and mean in (0, 1):
        return wilson(mean * n, n)
    effect = math.fsum((share - mean) ** 2 for share in shares) / n / (mean * (1 - mean))
    telling = min(sum(share < 1 for share in shares), sum(share > 0 for share in shares))
    effect = min(1.0, (effect * telling + 2) / (telling + 2))
    return wilson(mean * n / effect, n / effect)


def interquartile_mean(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter, each rounded down to whole values.

    As rliable defines it (https://arxiv.org/abs/2108.13264, section 4.3): outliers count less than in a mean,
    and less is thrown away than by a median. 0, 1, 2, 3, 100 give 2; of three values none is left out.
    Raises ValueError for no value.
    """
    if not values:
        raise ValueError("there is no value to take the mean of")
    cut = len(values) // 4
    middle = sorted(values)[cut : len(values) - cut]
    return math.fsum(middle) / len(middle)


def stratified_interval(
    strata: Mapping[str, Sequence[Sequence[float]]],
    measure: Callable[[Sequence[float]], float] = interquartile_mean,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, tuple[float, float] | None]:
    """The measure of all scores, and its 95 % interval by a percentile bootstrap within each stratum.

    strata: name -> [runs][tasks]; runs differ in their seed. rliable draws the runs of each task apart; here
    one run has a score for every task, so runs are drawn whole. For few runs the interval is too narrow: with
    normal scores three runs hold the truth in 75 % of the cases, five in 82 to 91 %, ten in 93 %. None where
    a stratum has fewer than three. Raises ConfigurationError without a score.
    """
    suites = [runs for runs in strata.values() if runs]
    if not suites:
        raise ConfigurationError("there is no run to measure: finish a cell first")
    centre = measure([score for runs in suites for run in runs for score in run])
    if min(len(runs) for runs in suites) < 3:
        return centre, None
    draw = random.Random(derive(seed, "stratified_interval"))
    estimates = sorted(
        measure([score for runs in suites for run in draw.choices(runs, k=len(runs)) for score in run])
        for _ in range(resamples)
    )
    cut = round(0.025 * resamples)
    return centre, (estimates[cut], estimates[-1 - cut])


@lru_cache(maxsize=1024)
def t_quantile(probability: float, freedom: float) -> float:
    """Student's t, for degrees of freedom rounded down to a whole number of at most 1000, which is wider.

    By bisection of the distribution function, which is a finite sum for whole degrees of freedom (Abramowitz
    and Stegun 1964, 26.7.3 and 26.7.4). Raises ValueError unless 0.5 <= probability < 1 and freedom >= 1.

    >>> round(t_quantile(0.975, 5), 4)
    2.5706
    """
    if not 0.5 <= probability < 1 or not freedom >= 1:
        raise ValueError(f"t needs 0.5 <= probability < 1 and freedom >= 1, got {probability}, {freedom}")
    degrees = min(1000, math.floor(freedom + 1e-9))
    low, high = 0.0, 1.0
    while _t_distribution(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, degrees) < probability else (low, middle)
    return high


def _t_distribution(t: float, freedom: int) -> float:
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for k in range((freedom - 1) // 2 if odd else freedom // 2):
        total += term
        term *= cosine**2 * (2 * k + 2) / (2 * k + 3) if odd else cosine**2 * (2 * k + 1) / (2 * k + 2)
    return 0.5 + ((angle + sine * total) / math.pi if odd else sine * total / 2)


def interval_text(interval: Sequence[float] | None, style: str) -> str:
    """` [0.412, 0.520]`, or nothing without an interval: if all values are equal, none is known."""
    if interval is None:
        return ""
    low, high = interval
    return f" [{low:{style}}, {high:{style}}]"
