"""Scenarios of earlier domains among those of a new one, at a set share: an order made of two orders."""

from __future__ import annotations

import math
from typing import Protocol

from stateset_agents.types.scenario import Scenario

REPLAYED = "replayed"
"""The key of a scenario's context that is true for those of earlier domains."""


class Order(Protocol):
    """Which scenario each episode of the run plays."""

    def take(self, first: int, number: int, /) -> list[Scenario]:
        """The episodes `first` to `first + number`."""
        ...

    def epoch_of(self, episode: int) -> int:
        """How often all scenarios come before this episode."""
        ...


def is_replayed(scenario: Scenario) -> bool:
    """Is it of an earlier domain?"""
    return scenario.context.get(REPLAYED) is True


def num_replayed(episodes: int, share: float) -> int:
    """How many of the first episodes of a run are replays, spread evenly.

    >>> [num_replayed(episodes, 0.25) for episodes in range(9)]
    [0, 0, 0, 0, 1, 1, 1, 1, 2]
    """
    return math.floor(episodes * share)


class ReplayOrder:
    """A share of the episodes goes through one order, the others through another, each in its own sequence.

    In any stretch of n episodes the replays are off from share times n by less than one. Which order an
    episode belongs to follows from its number alone, so that a resumed run goes on with both where it was.
    """

    def __init__(self, new: Order, replayed: Order, share: float) -> None:
        """`share`: of the episodes that are replays, from 0 to less than 1."""
        self._new = new
        self._replayed = replayed
        self._share = share

    def take(self, first: int, number: int) -> list[Scenario]:
        """The episodes `first` to `first + number` of the run."""
        return [self.at(episode) for episode in range(first, first + number)]

    def at(self, episode: int) -> Scenario:
        """The scenario of an episode of the run, counted from 0."""
        order, place = self._of(episode)
        (scenario,) = order.take(place, 1)
        return scenario

    def epoch_of(self, episode: int) -> int:
        """How often all scenarios of its own order come before this episode."""
        order, place = self._of(episode)
        return order.epoch_of(place)

    def _of(self, episode: int) -> tuple[Order, int]:
        """The order that plays an episode, and its number there."""
        before = num_replayed(episode, self._share)
        if num_replayed(episode + 1, self._share) > before:
            return self._replayed, before
        return self._new, episode - before
