"""What agents get that know nothing: the floor under every figure of an environment that offers such agents.

A benchmark in which the right answer is often to do nothing pays an agent that has only learnt to refuse. So
its figures stand next to those of `environment.floor_agents`: names, and functions without arguments that
make an agent (`reply(messages) -> Message`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from stateset_agents.core.environment import Environment
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.rollout.time_limited_environment import TimeLimitedEnvironment
from stateset_agents.evaluation.degenerate_agents import ScriptedAgent
from stateset_agents.evaluation.evaluator import Evaluation, measured
from stateset_agents.evaluation.scripted_play import play
from stateset_agents.runtime.tasks import gather_or_cancel, in_thread
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import TrajectoryGroup


async def with_floors(
    evaluation: Evaluation,
    environment: Environment,
    scenarios: Sequence[Scenario],
    *,
    seed: int,
    limits: RolloutLimits | None = None,
) -> Evaluation:
    """The evaluation with the floors of its scenarios, each played once, with the same users; as it is where
    the environment has no `floor_agents`."""
    agents: Mapping[str, Callable[[], ScriptedAgent]] = getattr(environment, "floor_agents", None) or {}
    limits = limits or RolloutLimits()
    in_time = TimeLimitedEnvironment(environment, limits.turn_timeout)
    free = asyncio.Semaphore(limits.max_concurrent)

    async def group(make: Callable[[], ScriptedAgent], scenario: Scenario) -> TrajectoryGroup:
        async with free:
            played = await play(in_time, scenario, derive(seed, "user", 0, scenario.id), lambda tools: make())
        return TrajectoryGroup(key=scenario.id, trajectories=(played,))

    floors = {}
    for name, make in agents.items():
        groups = await gather_or_cancel(group(make, scenario) for scenario in scenarios)
        floors[name] = await in_thread(measured, groups, tries=1, temperature=0.0)
    return replace(evaluation, floors=floors)
