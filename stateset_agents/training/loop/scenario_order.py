"""Which scenarios a step plays: a function of seed and frontier alone, so a resume plays what is left."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive

__all__ = ["ScenarioOrder"]


class ScenarioOrder:
    """Every scenario once per epoch, each epoch in its own shuffled order."""

    def __init__(self, scenarios: Sequence[Scenario], seed: int) -> None:
        if not scenarios:
            raise ConfigurationError("the environment has no train scenario: give some split='train'")
        self._scenarios = scenarios
        self._seed = seed
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
            line = json.dumps(dataclasses.asdict(scenario), sort_keys=True, default=str)
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def at(self, episode: int) -> Scenario:
        """The scenario of an episode of the run, counted from 0."""
        epoch, offset = divmod(episode, len(self._scenarios))
        if epoch not in self._orders:
            if len(self._orders) == 2:
                del self._orders[next(iter(self._orders))]
            order = list(range(len(self._scenarios)))
            random.Random(derive(self._seed, "epoch", epoch)).shuffle(order)
            self._orders[epoch] = order
        return self._scenarios[self._orders[epoch][offset]]
