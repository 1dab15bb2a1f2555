"""Credit per turn from branches, which are other continuations of the same state. Plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stateset_agents.algorithms.advantages import returns_to_go
from stateset_agents.types.errors import ConfigurationError


def branch_credit(
    turn_rewards: Sequence[Sequence[float] | None],
    branches: Sequence[Sequence[Sequence[float]]],
    *,
    gamma: float = 1.0,
) -> list[list[float] | None]:
    """One credit per turn of every member of one group, by Monte Carlo values of the states between turns
    (after VinePPO, https://arxiv.org/abs/2410.01679).

        Q_k = r_k + gamma mean(branches from s_{k+1}, and the member's own return from turn k+1 on)
        A_k = Q_k - V(s_k),   V(s_k) = mean(branches from s_k)

    where s_k is the state before turn k. V never sees what the member itself did from s_k on, so the
    gradient stays unbiased; Q may, since the member's own continuation is one more sample of V(s_{k+1}).
    A state without a branch (s_0 has none, and others may have lost theirs) is compared with the siblings'
    Q_k, of those that reached turn k: another member's words do not depend on this one's either. With no
    sibling left the baseline is 0. Q of a turn that no branch follows is the return-to-go itself. Nothing
    is divided by a spread, which would depend on the member's own return.

    `turn_rewards` is [members][turns] as in `per_turn_group_credit`: a whole-trajectory reward belongs on
    its last turn, None is an unscored member, which gets None and is no sibling of others. `branches` is
    [members][turns][any number]: returns of the branches from the state before that turn, discounted from
    there; branches that failed or went unscored are left out. `gamma` discounts per turn.

    Two members, the first with two branches before its second turn:

    [[0, 1], [0]], [[[], [1, 0]], [[]]]
      ->  Q = [[mean(1, 0, 1), 1], [0]]
      ->  [[2/3 - 0, 1 - 1/2], [0 - 2/3]]
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigurationError(f"gamma must lie between 0 and 1, got {gamma!r}")
    q_values = [
        None if rewards is None else _q_values(rewards, of_member, gamma)
        for rewards, of_member in zip(turn_rewards, branches, strict=True)
    ]
    credit: list[list[float] | None] = []
    for member, values in enumerate(q_values):
        if values is None:
            credit.append(None)
            continue
        siblings = [sibling for i, sibling in enumerate(q_values) if i != member and sibling is not None]
        baselines = [
            branches[member][turn] or [sibling[turn] for sibling in siblings if turn < len(sibling)]
            for turn in range(len(values))
        ]
        credit.append(
            [value - (fmean(peers) if peers else 0.0) for value, peers in zip(values, baselines, strict=True)]
        )
    return credit


def _q_values(rewards: Sequence[float], branches: Sequence[Sequence[float]], gamma: float) -> list[float]:
    """[turns] of one member: each turn's reward plus the mean return of all known continuations."""
    returns = returns_to_go(rewards, gamma=gamma)
    values = [fmean([*branched, value]) for branched, value in zip(branches, returns, strict=True)]
    return [reward + gamma * after for reward, after in zip(rewards, [*values[1:], 0.0], strict=True)]
