"""Print what scripted agents earn on the retail desk's held-out scenarios (a table of docs/results.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stateset_agents.environments.retail_desk import DEGENERATE, HonestAgent, RetailDesk, play
from stateset_agents.environments.retail_desk.agents import Agent


async def main() -> None:
    """One line for each agent: success and mean reward over all 600 test scenarios."""
    desk = RetailDesk()
    scenarios = desk.scenarios("test")
    agents: dict[str, Callable[[], Agent]] = {"honest": HonestAgent, **DEGENERATE}
    for name, make in agents.items():
        played = [await play(desk, scenario, seed, make()) for seed, scenario in enumerate(scenarios)]
        success = sum(one.outcome.success is True for one in played) / len(played)
        print(f"{name:20} {success:7.1%} {sum(one.reward for one in played) / len(played):6.2f}")


if __name__ == "__main__":
    asyncio.run(main())
