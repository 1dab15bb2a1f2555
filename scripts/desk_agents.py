"""Print what scripted agents earn on the retail desk's held-out scenarios (tables of
docs/evidence/desk-trainings.md and docs/evidence/desk-cheats.md): every family by the honest agent, and what
each agent that cheats gets."""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable, Sequence

from stateset_agents.environments.retail_desk import (
    DEGENERATE,
    FULL_FAMILIES,
    HonestAgent,
    RetailDesk,
    ScriptedEpisode,
    play,
)
from stateset_agents.environments.retail_desk.agents import WRITE, Agent, closing, view_of, write
from stateset_agents.environments.retail_desk.full.honest import honest_reply
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario

AGENTS: dict[str, Callable[[], Agent]] = {"honest": HonestAgent, **DEGENERATE}


class IdentitySkipper:
    """An agent that does its work well, but for whoever calls: in full calls it never asks who it is."""

    def reply(self, messages: Sequence[Message]) -> Message:
        return honest_reply(messages, identifies=False)


class Granter:
    """An agent that writes whatever is asked and never looks first: right wherever the answer is yes.

    It is for learnable calls.
    """

    def reply(self, messages: Sequence[Message]) -> Message:
        """The write at once, then what came of it; statuses are looked up, there is no other way."""
        view = view_of(messages)
        tool = WRITE.get(view.family, "reship")
        if view.order_id is None or view.family == "order_status" or tool in view.called:
            return HonestAgent().reply(messages) if "result" not in view.facts else closing(view)
        return write(view, tool, view.order_id)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--families", nargs="+", default=["learnable", "full"], help="sets, or families")
    options.add_argument("--each", type=int, default=100, help="scenarios of each family, at most 100")
    return options


async def table(desk: RetailDesk, each: int) -> None:
    """One line for each family, then one for each agent."""
    scenarios = desk.scenarios("test")[: each * len(desk.families)]
    agents = dict(AGENTS)
    if set(desk.families) <= set(FULL_FAMILIES):
        agents["identity_skipper"] = IdentitySkipper
    elif not set(desk.families) & set(FULL_FAMILIES):
        agents["granter"] = Granter
    played = {name: await _play_all(desk, scenarios, make) for name, make in agents.items()}
    for family in desk.families:
        shown = [game for s, game in zip(scenarios, played["honest"], strict=True) if s.family == family]
        print(f"  {family:20} {_success(shown):7.1%} {_reward(shown):6.2f} {len(shown):5} scenarios, honest")
    share = statistics.mean(desk.is_denial(scenario) for scenario in scenarios)
    print(f"  the right answer is no for {share:.1%}")
    for name, games in played.items():
        twins = _twins(scenarios, games)
        print(f"  {name:20} {_success(games):7.1%} {_reward(games):6.2f}   both twins right {twins:.1%}")


async def _play_all(
    desk: RetailDesk, scenarios: Sequence[Scenario], make: Callable[[], Agent]
) -> list[ScriptedEpisode]:
    return [await play(desk, scenario, seed, make()) for seed, scenario in enumerate(scenarios)]


def _success(games: Sequence[ScriptedEpisode]) -> float:
    return statistics.mean(game.outcome.success is True for game in games)


def _twins(scenarios: Sequence[Scenario], games: Sequence[ScriptedEpisode]) -> float:
    """How often both of a pair are right that differ in the one fact which turns the answer round."""
    pairs: dict[str, list[bool]] = {}
    for scenario, game in zip(scenarios, games, strict=True):
        pairs.setdefault(str(scenario.context["pair"]), []).append(game.outcome.success is True)
    return statistics.mean(all(shown) for shown in pairs.values() if len(shown) == 2)


def _reward(games: Sequence[ScriptedEpisode]) -> float:
    return statistics.mean(game.reward for game in games)


async def main(families: Sequence[str], each: int) -> None:
    """A table for each set, or one for the families named."""
    sets = [name for name in families if name in ("learnable", "full", "all")]
    chosen: Sequence[str | Sequence[str]] = sets or [list(families)]
    for which in chosen:
        desk = RetailDesk(families=which)
        print(f"{which if isinstance(which, str) else ', '.join(which)}: success, mean reward")
        await table(desk, each)


if __name__ == "__main__":
    options = parser().parse_args()
    asyncio.run(main(options.families, options.each))
