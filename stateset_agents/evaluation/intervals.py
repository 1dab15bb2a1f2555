"""How sure is a share of successes, and how often does at least one of k tries, or each, succeed?"""

from __future__ import annotations

from math import comb

from stateset_agents.algorithms.intervals import wilson

__all__ = ["pass_at_k", "pass_hat_k", "wilson"]


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
