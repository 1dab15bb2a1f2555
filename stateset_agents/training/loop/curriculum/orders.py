"""Orders of scenarios beside the shuffled one: every step has the strata in proportion, or what is neither
always nor never solved comes more often."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from stateset_agents.training.loop.scenario_order import Arrange
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive

UNIFORM_SHARE = 0.1
"""Of the draws by success: so often a scenario comes whatever its success is, or a rate that was bad luck
would never be measured again."""


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


class SuccessOrder:
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

    def take(self, first: int, number: int) -> list[Scenario]:
        """The episodes `first` to `first + number` of the run, none before the step's first."""
        return [self._at(episode - self._frontier) for episode in range(first, first + number)]

    def epoch_of(self, episode: int) -> int:
        """How often as many episodes as there are scenarios come before this one."""
        return episode // len(self._scenarios)

    def _at(self, offset: int) -> Scenario:
        number, place = divmod(offset, len(self._scenarios))
        if number not in self._rounds:
            generator = random.Random(derive(self._seed, "success", self._frontier, number))
            # By weight, without replacement: the earliest exponential arrivals (Efraimidis, Spirakis 2006).
            arrivals = [-math.log(1.0 - generator.random()) / chance for chance in self.chances]
            self._rounds[number] = sorted(range(len(arrivals)), key=arrivals.__getitem__)
        return self._scenarios[self._rounds[number][place]]
