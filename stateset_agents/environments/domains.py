"""Several environments as one: a new domain to learn, and earlier ones of which some prompts are replayed."""

from __future__ import annotations

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
                    f"there is no domain {name!r}{nearest(name, environments)}: there are "
                    f"{', '.join(environments)}"
                )
        if new in replayed:
            raise ConfigurationError(f"{new} is the domain that is learned: replay others")
        self._environments = dict(environments)
        self._new = new
        self._replayed = {name: tuple(scenarios) for name, scenarios in replayed.items()}
        self.local = all(environment.local for environment in environments.values())

    def scenarios(self, split: str) -> list[Scenario]:
        """To train on: the new domain's and the replayed ones. Held out: those of all domains, by turns, so
        that the first n are of each.

        Raises ConfigurationError where two domains have a scenario of one id.
        """
        if expect_split(split) == "train":
            drawn = [[_of(self._new, one) for one in self._environments[self._new].scenarios(split)]]
            for name, scenarios in self._replayed.items():
                drawn.append([_of(name, one, replayed=True) for one in scenarios])
            found = [one for scenarios in drawn for one in scenarios]
        else:
            held_out = [
                [_of(name, one) for one in environment.scenarios(split)]
                for name, environment in self._environments.items()
            ]
            places = range(max(map(len, held_out), default=0))
            found = [scenarios[place] for place in places for scenarios in held_out if place < len(scenarios)]
        by_id: dict[str, Scenario] = {}
        for one in found:
            if (other := by_id.setdefault(one.id, one)) is not one:
                raise ConfigurationError(
                    f"scenario {one.id!r} stands in {other.context['domain']} and in "
                    f"{one.context['domain']}: give it another id in one of them"
                )
        return found

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """As the domain that the scenario names starts it."""
        name = scenario.context.get("domain")
        if name not in self._environments:
            raise ConfigurationError(
                f"scenario {scenario.id!r} is of the domain {name!r}: its context must name one of "
                f"{', '.join(self._environments)}"
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
