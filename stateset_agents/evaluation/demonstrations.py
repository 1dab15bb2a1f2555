"""Conversations of a scripted agent in OpenAI's chat format, for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.core.environment import Environment
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.sources.imports import with_call_ids
from stateset_agents.evaluation.audit import degenerate_agents_of, honest_agent_of
from stateset_agents.evaluation.scripted_agents import AgentFactory, ScriptedAgent, player
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.settings import nearest
from stateset_agents.types.trajectory import Status, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrated:
    """The conversations of a scripted agent."""

    chats: tuple[dict[str, Any], ...]
    """{"id", "family", "messages", "tools", "success"} each, in the order of the scenarios."""
    num_failed: int
    """Conversations that broke, or that the environment judged a failure."""


def scripted_agent_of(environment: Environment, name: str) -> Callable[[Scenario], AgentFactory]:
    """The maker of the environment's `honest_agent`, as "honest", or of one of `degenerate_agents_of` it.

    Raises ConfigurationError for a name that it does not have.
    """
    honest, agents = honest_agent_of(environment), degenerate_agents_of(environment)
    if name == "honest" and honest is not None:
        return honest
    if name not in agents:
        names = [*agents] if honest is None else ["honest", *agents]
        raise ConfigurationError(
            f"{type(environment).__name__} has no agent {name!r}{nearest(name, names)}: there are "
            f"{', '.join(names)}; one of your own is an environment's honest_agent"
        )
    make = agents[name]
    return lambda scenario: make


async def demonstrate(
    environment: Environment,
    scenarios: Sequence[Scenario],
    make: Callable[[Scenario], AgentFactory],
    *,
    seed: int = 0,
    keep_failures: bool = False,
    limits: RolloutLimits | None = None,
) -> Demonstrated:
    """Play every scenario once with the agent that `make` has for it.

    Without `keep_failures` a conversation that the environment judges a failure is left out. Raises
    ConfigurationError where none is left.
    """
    play = player(environment, seed=seed, limits=limits or RolloutLimits())

    async def play_one(scenario: Scenario) -> tuple[Trajectory, Sequence[Mapping[str, Any]]]:
        schemas: list[Mapping[str, Any]] = []

        def remember(tools: Sequence[Mapping[str, Any]]) -> ScriptedAgent:
            schemas.extend(tools)
            return make(scenario)(tools)

        return await play(scenario, remember), schemas

    played = await gather_or_cancel(play_one(scenario) for scenario in scenarios)
    chats = [
        chat_of(trajectory, tools)
        for trajectory, tools in played
        if trajectory.status is not Status.FAILED and (keep_failures or trajectory.success is not False)
    ]
    if not chats:
        errors = [trajectory.error for trajectory, _ in played if trajectory.error]
        why = f"; the first broke: {errors[0]}" if errors else ""
        raise ConfigurationError(f"none of {len(played)} conversations succeeded{why}")
    return Demonstrated(chats=tuple(chats), num_failed=len(played) - len(chats))


def chat_of(trajectory: Trajectory, tools: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A conversation as a line of a file for `sft`. What the assistant says in its opening has weight 0, and
    so has what is no example."""
    scenario = trajectory.scenario
    messages = []
    for index, message in enumerate(with_call_ids(trajectory.messages)):
        is_weighted = message.is_example and index >= len(trajectory.opening)
        weight = {} if is_weighted or message.role != "assistant" else {"weight": 0}
        messages.append({**message.to_record(), **weight})
    return {
        "id": scenario.id,
        "family": scenario.family,
        "messages": messages,
        **({"tools": [dict(tool) for tool in tools]} if tools else {}),
        **({} if trajectory.success is None else {"success": trajectory.success}),
    }
