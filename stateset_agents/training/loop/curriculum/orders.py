"""Orders of scenarios, which say what each episode of a run plays: shuffled, stratified, drawn by success, or
with replays.

An order is a function of seed and frontier (and of what was measured), so a resumed run plays what is left.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive

Arrange = Callable[[Sequence[Scenario], random.Random], list[int]]
"""Scenarios -> the order of one epoch, by their indices."""


def shuffled(scenarios: Sequence[Scenario], generator: random.Random) -> list[int]:
    """Every order is as likely."""
    order = list(range(len(scenarios)))
    generator.shuffle(order)
    return order


class Order(ABC):
    """Says which scenario each episode of the run plays."""

    @abstractmethod
    def at(self, episode: int) -> Scenario:
        """The scenario of an episode of the run, counted from 0."""

    @abstractmethod
    def epoch_of(self, episode: int) -> int:
        """The number of times that all scenarios come before this episode."""

    def take(self, first: int, number: int) -> list[Scenario]:
        """The episodes `first` to `first + number` of the run."""
        return [self.at(episode) for episode in range(first, first + number)]


class ScenarioOrder(Order):
    """Every scenario once per epoch, each epoch in an order of its own."""

    def __init__(self, scenarios: Sequence[Scenario], seed: int, arrange: Arrange = shuffled) -> None:
        if not scenarios:
            raise ConfigurationError("the environment has no train scenario: give some split='train'")
        self._scenarios = scenarios
        self._seed = seed
        self._arrange = arrange
        self._orders: dict[int, list[int]] = {}
        """Orders of the last two epochs that were asked for: a step may need both."""

    def epoch_of(self, episode: int) -> int:
        return episode // len(self._scenarios)

    def fingerprint(self) -> str:
        """SHA-256 over all scenarios: a checkpoint is of these and no others."""
        digest = hashlib.sha256()
        for scenario in self._scenarios:
            line = json.dumps(scenario.to_record(), sort_keys=True, default=str)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def at(self, episode: int) -> Scenario:
        epoch, offset = divmod(episode, len(self._scenarios))
        if epoch not in self._orders:
            if len(self._orders) == 2:
                del self._orders[next(iter(self._orders))]
            generator = random.Random(derive(self._seed, "epoch", epoch))
            self._orders[epoch] = self._arrange(self._scenarios, generator)
        return self._scenarios[self._orders[epoch][offset]]


UNIFORM_SHARE = 0.1
"""Share of the draws by success that is even: so often a scenario comes whatever its success is, or a rate
that was bad luck would never be measured again."""


def stratified(stratum_of: Callable[[Scenario], str]) -> Arrange:
    """An epoch in which each stretch has the strata in proportion.

    The j-th of a stratum's n scenarios stands at (j + 1/2) / n of the epoch, as seats are given out by
    Sainte-Lague; within a stratum, and where several stand at one place, chance decides.
    """

    def arrange(scenarios: Sequence[Scenario], generator: random.Random) -> list[int]:
        strata: dict[str, list[int]] = {}
        for index, scenario in enumerate(scenarios):
            strata.setdefault(stratum_of(scenario), []).append(index)
        places = []
        for members in strata.values():
            generator.shuffle(members)
            places += [
                ((2 * number + 1) / (2 * len(members)), generator.random(), index)
                for number, index in enumerate(members)
            ]
        return [index for _, _, index in sorted(places)]

    return arrange


class SuccessOrder(Order):
    """Draws for one step: a scenario of success p comes as often as p(1 - p) says, none twice before all.

    p(1 - p) is the variance of a success, which a group's signal comes from (after
    https://arxiv.org/abs/2502.12272). A function of seed, frontier and rates: a resumed run draws the same.
    """

    def __init__(
        self, scenarios: Sequence[Scenario], rates: Sequence[float], *, seed: int, frontier: int
    ) -> None:
        """`rates`: [scenarios] of success, none of them 0 or 1; `frontier`: the step's first episode."""
        worth = [rate * (1.0 - rate) for rate in rates]
        total, number = math.fsum(worth), len(scenarios)
        self._scenarios = scenarios
        self.chances = [(1 - UNIFORM_SHARE) * value / total + UNIFORM_SHARE / number for value in worth]
        """[scenarios] of the step's first draw."""
        self._seed = seed
        self._frontier = frontier
        self._rounds: dict[int, list[int]] = {}

    def epoch_of(self, episode: int) -> int:
        return episode // len(self._scenarios)

    def at(self, episode: int) -> Scenario:
        number, place = divmod(episode - self._frontier, len(self._scenarios))
        if number not in self._rounds:
            generator = random.Random(derive(self._seed, "success", self._frontier, number))
            # By weight, without replacement: the earliest exponential arrivals (Efraimidis, Spirakis 2006).
            arrivals = [-math.log(1.0 - generator.random()) / chance for chance in self.chances]
            self._rounds[number] = sorted(range(len(arrivals)), key=arrivals.__getitem__)
        return self._scenarios[self._rounds[number][place]]


# Scenarios of earlier domains among those of a new one, at a set share: an order made of two orders.

REPLAYED = "replayed"
"""The key of a scenario's context that is true for those of earlier domains."""


def is_replayed(scenario: Scenario) -> bool:
    """True for a scenario of an earlier domain."""
    return scenario.context.get(REPLAYED) is True


def num_replayed(episodes: int, share: float) -> int:
    """The number of replays among the first episodes of a run, spread evenly.

    >>> [num_replayed(episodes, 0.25) for episodes in range(9)]
    [0, 0, 0, 0, 1, 1, 1, 1, 2]
    """
    return math.floor(episodes * share)


class ReplayOrder(Order):
    """A share of the episodes goes through one order, the others through another, each in its own sequence.

    In any stretch of n episodes the replays are off from share times n by less than one. Which order an
    episode belongs to follows from its number alone, so that a resumed run goes on with both where it was.
    """

    def __init__(self, new: Order, replayed: Order, share: float) -> None:
        """`share`: of the episodes that are replays, from 0 to less than 1."""
        self._new = new
        self._replayed = replayed
        self._share = share

    def at(self, episode: int) -> Scenario:
        order, place = self._of(episode)
        return order.at(place)

    def epoch_of(self, episode: int) -> int:
        order, place = self._of(episode)
        return order.epoch_of(place)

    def _of(self, episode: int) -> tuple[Order, int]:
        """The order that plays an episode, and its number there."""
        before = num_replayed(episode, self._share)
        if num_replayed(episode + 1, self._share) > before:
            return self._replayed, before
        return self._new, episode - before
