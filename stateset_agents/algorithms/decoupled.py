"""Advantages of rewards that are made of parts: each part is normalised before they are summed (GDPO).

`training.estimators.group` calls it. Plain lists, without torch, so that every number can be checked by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from stateset_agents.algorithms.advantages import Scaling, group_advantages, standardized

Scores = Sequence[Sequence[float | None]]
"""[groups][members], None where a member has none."""


def summed_advantages(
    parts: Mapping[str, Scores],
    weights: Mapping[str, float],
    *,
    baseline: str,
    scaling: Scaling,
) -> list[list[float | None]]:
    """[groups][members] each part's advantages within its groups, times its weight, summed over the parts.

    `parts` has the scores of every name in `weights`; `baseline` and `scaling` as in `group_advantages`. A
    member that lacks a part is not compared in it, and the part adds nothing for it; one that lacks all of
    them gets None. Raises as `group_advantages` does.
    """
    by_part = [
        [
            [None if value is None else weight * value for value in members]
            for members in group_advantages(parts[name], baseline=baseline, scaling=scaling)
        ]
        for name, weight in weights.items()
    ]
    return [
        [_sum_of_known(values) for values in zip(*members, strict=True)]
        for members in zip(*by_part, strict=True)
    ]


def decoupled_advantages(
    parts: Mapping[str, Scores],
    weights: Mapping[str, float],
    *,
    baseline: str,
    scaling: Scaling,
) -> list[list[float | None]]:
    """`summed_advantages`, centred and divided by their deviation over the whole batch.

        A_k = (r_k - mean of its group) / deviation of its group        A = sum of w_k A_k
        result = (A - mean of the batch) / (population deviation of the batch + 1e-8)

    GDPO (https://arxiv.org/abs/2601.05242). In a group of two, summed rewards (0, 1) and (0, 2) both give
    advantages of -1 and 1; by parts, whoever leads in two of them gets 2. The second line keeps the range
    where it was, however many parts there are. Where all groups tie in every part, the result is exactly 0.
    """
    summed = summed_advantages(parts, weights, baseline=baseline, scaling=scaling)
    scaled = iter(standardized([value for members in summed for value in members if value is not None]))
    return [[None if value is None else next(scaled) for value in members] for members in summed]


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
