"""Several environments as one: a new domain to learn, and earlier ones of which some prompts are replayed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from stateset_agents.core.environment import Conversation, Environment, expect_environment
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import nearest


class Domains:
    """Trains on one domain and on replayed prompts of others; held out are scenarios of all.

        Domains({"sums": sums, "equations": equations}, new="equations", replayed={"sums": remembered})

    A scenario's context names its `domain`, and of a replay says `replayed: true`; `replay_share` of the
    training says how often these come. Conversations, verdicts and rewards are those of the domain.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        *,
        new: str,
        replayed: Mapping[str, Sequence[Scenario]] | None = None,
    ) -> None:
        """
        Args:
            environments: Name -> environment of each domain.
            new: The one that is learned.
            replayed: Name -> train scenarios of other domains.

        Raises ConfigurationError for a domain that is not there, and for replays of the new one.
        """
        for environment in environments.values():
            expect_environment(environment)
        replayed = replayed or {}
        for name in (new, *replayed):
            if name not in environments:
                raise ConfigurationError(
                    f"no domain {name!r}{nearest(name, environments)}: there are {', '.join(environments)}"
                )
        if new in replayed:
            raise ConfigurationError(f"{new} is the domain that is learned: replay others")
        self._environments = dict(environments)
        self._new = new
        self._replayed = {name: tuple(scenarios) for name, scenarios in replayed.items()}
        self.local = all(environment.local for environment in environments.values())

    def scenarios(self, split: str) -> list[Scenario]:
        """The scenarios of a split: to train on, the new domain's and the replayed ones; held out, those of
        all domains, by turns, so that the first n are of each.

        Raises ConfigurationError where two domains have a scenario of one id.
        """
        if expect_split(split) == "train":
            new = self._environments[self._new].scenarios(split)
            scenarios = [_of(self._new, scenario) for scenario in new]
            for name, replayed in self._replayed.items():
                scenarios += [_of(name, scenario, replayed=True) for scenario in replayed]
        else:
            by_domain = [
                [_of(name, scenario) for scenario in environment.scenarios(split)]
                for name, environment in self._environments.items()
            ]
            turns = itertools.zip_longest(*by_domain)
            scenarios = [scenario for turn in turns for scenario in turn if scenario is not None]
        by_id: dict[str, Scenario] = {}
        for scenario in scenarios:
            if (other := by_id.setdefault(scenario.id, scenario)) is not scenario:
                raise ConfigurationError(
                    f"scenario {scenario.id!r} stands in {other.context['domain']} and in "
                    f"{scenario.context['domain']}: give it another id in one of them"
                )
        return scenarios

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Start the conversation in the domain that the scenario names."""
        name = scenario.context.get("domain")
        if name not in self._environments:
            raise ConfigurationError(
                f"scenario {scenario.id!r} has domain {name!r}, none of {', '.join(self._environments)}"
            )
        return await self._environments[name].start(scenario, seed)

    async def close(self) -> None:
        """Close the domains that have something to give back."""
        for environment in self._environments.values():
            close = getattr(environment, "close", None)
            if close is not None:
                await call_user_code(close)


def _of(domain: str, scenario: Scenario, *, replayed: bool = False) -> Scenario:
    marks = {"domain": domain} | ({"replayed": True} if replayed else {})
    return replace(scenario, context={**scenario.context, **marks})
