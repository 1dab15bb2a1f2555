"""Credit per turn from branches: what other continuations from the same state earned. Plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stateset_agents.algorithms.advantages import returns_to_go
from stateset_agents.types.errors import ConfigurationError

__all__ = ["branch_credit"]


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
    gradient stays unbiased; Q may, for the member's own way on is one more sample of what s_{k+1} is worth.
    A state without a branch (s_0 has none, and others may have lost theirs) is compared with the siblings'
    Q_k, of those that reached turn k: another member's words do not depend on this one's either. With no
    sibling left the baseline is 0. Q of a turn that no branch follows is the return-to-go itself. Nothing
    is divided by a spread, which would depend on the member's own return.

    `turn_rewards` is [members][turns] as in `per_turn_group_credit`: a whole-trajectory reward belongs on
    its last turn, None is an unscored member, who gets None and is nobody's sibling. `branches` is
    [members][turns][any number]: returns of the branches from the state before that turn, discounted from
    there; branches that failed or went unscored are left out. `gamma` discounts per turn.

    Two members, the first with two branches before its second turn:

    [[0, 1], [0]], [[[], [1, 0]], [[]]]
      ->  Q = [[mean(1, 0, 1), 1], [0]]
      ->  [[2/3 - 0, 1 - 1/2], [0 - 2/3]]
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigurationError(f"gamma must lie between 0 and 1, got {gamma!r}")
    worth = [
        None if rewards is None else _worth(rewards, own, gamma)
        for rewards, own in zip(turn_rewards, branches, strict=True)
    ]
    credit: list[list[float] | None] = []
    for member, own in enumerate(worth):
        if own is None:
            credit.append(None)
            continue
        siblings = [other for place, other in enumerate(worth) if place != member and other is not None]
        baselines = [
            branches[member][turn] or [other[turn] for other in siblings if turn < len(other)]
            for turn in range(len(own))
        ]
        credit.append(
            [value - (fmean(peers) if peers else 0.0) for value, peers in zip(own, baselines, strict=True)]
        )
    return credit


def _worth(rewards: Sequence[float], branches: Sequence[Sequence[float]], gamma: float) -> list[float]:
    """[turns] Q of what one member did: its turn's reward and the mean of all known ways on."""
    returns = returns_to_go(rewards, gamma=gamma)
    ways_on = [fmean([*others, own]) for others, own in zip(branches, returns, strict=True)]
    return [reward + gamma * after for reward, after in zip(rewards, [*ways_on[1:], 0.0], strict=True)]
