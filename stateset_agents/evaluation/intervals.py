"""How sure is a share or a mean over scenarios, and how often does one of k tries, or each, succeed?"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.streams import derive

__all__ = [
    "crossed_interval",
    "mean_interval",
    "pass_at_k",
    "pass_hat_k",
    "share_interval",
    "wilson",
]


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


def mean_interval(values: Sequence[float], *, resamples: int = 4000) -> tuple[float, float]:
    """95 % of the mean by the percentile bootstrap (Efron 1979), always the same for the same values.

    Give one value per scenario. Tries of one scenario are no independent draws, so they go in as their mean
    and are drawn together (a bootstrap clustered by task). Raises ValueError for no value.
    """
    import numpy as np

    if not values:
        raise ValueError("there is no value to take the mean of")
    given = np.asarray(values, dtype=float)
    draw = np.random.default_rng(derive(0, "bootstrap", len(given)))
    rows = max(1, 1_000_000 // len(given))  # at once, for the memory's sake
    means = [
        given[draw.integers(len(given), size=(min(rows, resamples - start), len(given)))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def crossed_interval(rows: Sequence[Sequence[float]], *, resamples: int = 4000) -> tuple[float, float]:
    """95 % of the mean of a table, by a bootstrap that draws its rows and its columns, each with replacement.

    For training runs of several seeds (rows) measured on the same scenarios (columns): another seed and
    another scenario would both have given other values, so both are drawn (the two-factor bootstrap of Owen,
    https://arxiv.org/abs/0712.1111, which errs on the wide side). A single row tells nothing of seeds: then
    only columns are drawn. Always the same for the same values. Raises ValueError for an empty or ragged
    table.
    """
    import numpy as np

    if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
        raise ValueError("a table needs rows of one length with at least one value each")
    given = np.asarray(rows, dtype=float)
    draw = np.random.default_rng(derive(0, "crossed bootstrap", *given.shape))
    means = []
    for _ in range(resamples):
        columns = draw.integers(given.shape[1], size=given.shape[1])
        of_row = given[:, columns].mean(axis=1)
        means.append(of_row[draw.integers(len(rows), size=len(rows))].mean())
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def share_interval(shares: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean of shares, one for each scenario: of its tries that succeeded, say.

    Where every share is 0 or 1, as with one try each, Wilson's, which also knows what is not known at 0 %
    and 100 %; else the bootstrap over scenarios. Equal shares leave nothing to draw from: Wilson's again.
    Raises ValueError for no share.
    """
    if not shares:
        raise ValueError("there is no share to take the mean of")
    if {*shares} <= {0.0, 1.0} or min(shares) == max(shares):
        return wilson(round(sum(shares)), len(shares))
    return mean_interval(shares)
