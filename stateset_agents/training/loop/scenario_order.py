"""Which scenarios a step plays: a function of seed and frontier alone, so a resume plays what is left."""

from __future__ import annotations

import hashlib
import json
import random
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


class ScenarioOrder:
    """Every scenario once per epoch, each epoch in an order of its own."""

    def __init__(self, scenarios: Sequence[Scenario], seed: int, arrange: Arrange = shuffled) -> None:
        if not scenarios:
            raise ConfigurationError("the environment has no train scenario: give some split='train'")
        self._scenarios = scenarios
        self._seed = seed
        self._arrange = arrange
        self._orders: dict[int, list[int]] = {}
        """Of the last two epochs that were asked for: a step may need both."""

    def take(self, frontier: int, number: int) -> list[Scenario]:
        """The episodes `frontier` to `frontier + number` of the run."""
        return [self.at(episode) for episode in range(frontier, frontier + number)]

    def epoch_of(self, episode: int) -> int:
        """How often all scenarios come before this episode."""
        return episode // len(self._scenarios)

    def fingerprint(self) -> str:
        """SHA-256 over all scenarios: a checkpoint is of these and no others."""
        digest = hashlib.sha256()
        for scenario in self._scenarios:
            line = json.dumps(scenario.to_record(), sort_keys=True, default=str)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def at(self, episode: int) -> Scenario:
        """The scenario of an episode of the run, counted from 0."""
        epoch, offset = divmod(episode, len(self._scenarios))
        if epoch not in self._orders:
            if len(self._orders) == 2:
                del self._orders[next(iter(self._orders))]
            generator = random.Random(derive(self._seed, "epoch", epoch))
            self._orders[epoch] = self._arrange(self._scenarios, generator)
        return self._scenarios[self._orders[epoch][offset]]
