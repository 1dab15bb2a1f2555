"""The exploit ceiling: the most that an environment and its reward pay to adversarial agents.

Training finds what a reward pays. So play agents that cheat before you train, and again whenever the reward
changes: `stateset-agents audit` does so and can be a gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stateset_agents.core.environment import Environment, optional_member
from stateset_agents.core.reward import Reward, as_reward, score_trajectories
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.scoring.base import with_score
from stateset_agents.core.sources.scenario_files import as_scenarios
from stateset_agents.evaluation.evaluator import Evaluation, measured
from stateset_agents.evaluation.scripted_agents import DEGENERATE, AgentFactory, ScriptedAgent, player
from stateset_agents.runtime.named_code import wanted_arguments
from stateset_agents.runtime.tasks import gather_or_cancel, in_thread
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.scenario import Scenario, Scenarios
from stateset_agents.types.settings import expect_that, nearest
from stateset_agents.types.trajectory import Status, TrajectoryGroup

MIN_SCORED = 0.9
"""Share of an agent's conversations that must have been played and scored for its figures to be a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most that any of the agents got."""

    success: float | None
    """Highest success; None where the environment gives no verdict."""
    successful: str | None
    """The agent that got it."""
    mean_reward: float | None
    """The highest; None where nothing was scored."""
    paid: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The results of each agent on the same scenarios, with the same users."""

    policies: Mapping[str, Evaluation]
    honest: Evaluation | None = None
    """The environment's own honest agent, where it offers one: `honest_agent`, which may ask for the
    `scenario`."""

    @property
    def ceiling(self) -> Ceiling:
        """The most that any of the agents got."""
        successful, success = _highest({name: played.success for name, played in self.policies.items()})
        paid, reward = _highest({name: played.mean_reward for name, played in self.policies.items()})
        return Ceiling(success=success, successful=successful, mean_reward=reward, paid=paid)

    def over(
        self,
        *,
        max_success: float | None = None,
        max_reward: float | None = None,
        allow: Mapping[str, float] | None = None,
    ) -> list[str]:
        """One line for every agent that got more than a limit; none given, none can.

        `allow` has another limit, for both, of agents that may have more: a refuser that is right wherever
        the right answer is no. Raises ConfigurationError for limits that say nothing (`expect_limits`) or
        cannot be checked, and for a name that was not played.
        """
        allow = allow or {}
        expect_limits(max_success=max_success, max_reward=max_reward, allow=allow)
        for name in allow:
            if name not in self.policies:
                raise ConfigurationError(
                    f"{name!r} is not among {', '.join(self.policies)}{nearest(name, self.policies)}"
                )
        lines = []
        for name, evaluation in self.policies.items():
            for quantity, value, limit in (
                ("success", evaluation.success, max_success),
                ("mean reward", evaluation.mean_reward, max_reward),
            ):
                if limit is None:
                    continue
                if value is None:
                    why = (
                        "the environment gives no verdict" if quantity == "success" else "nothing was scored"
                    )
                    raise ConfigurationError(f"a limit on the {quantity} of {name} cannot be checked: {why}")
                limit = max(limit, allow.get(name, limit))
                if value > limit:
                    lines.append(f"{name}: {quantity} {value:.3f} is over {limit:g}")
        return lines

    def lost(self, min_scored: float = MIN_SCORED) -> list[str]:
        """One line for every agent, the honest one included, of whose conversations too many broke.

        What failed or could not be scored is left out of success and reward, so an agent that breaks
        environment or reward would be found harmless. A reward that does not apply (None) is no loss.
        """
        honest = {} if self.honest is None else {"the honest agent": self.honest}
        lines = []
        for name, evaluation in {**self.policies, **honest}.items():
            played = sum(len(group.trajectories) for group in evaluation.groups)
            measured = played - evaluation.num_failed - evaluation.num_unscored
            if measured < min_scored * played:
                lines.append(
                    f"{name}: {measured} of {played} conversations were played and scored, fewer than "
                    f"{min_scored:.0%} ({evaluation.num_failed} failed, {evaluation.num_unscored} unscored; "
                    f"the first: {_first_error(evaluation)})"
                )
        return lines

    def summary(self) -> dict[str, Any]:
        """The results as plain JSON."""
        return {
            "ceiling": asdict(self.ceiling),
            "honest": None if self.honest is None else self.honest.summary(),
            "policies": {name: evaluation.summary() for name, evaluation in self.policies.items()},
        }


def _highest(values: Mapping[str, float | None]) -> tuple[str | None, float | None]:
    scores = {name: value for name, value in values.items() if value is not None}
    name = max(scores, key=scores.__getitem__, default=None)
    return name, None if name is None else scores[name]


def _first_error(evaluation: Evaluation) -> str:
    errors = (trajectory.error for group in evaluation.groups for trajectory in group.trajectories)
    return next(error for error in errors if error)


def expect_limits(
    *,
    max_success: float | None,
    max_reward: float | None,
    allow: Mapping[str, float],
    min_scored: float = MIN_SCORED,
) -> None:
    """Raises ConfigurationError for a limit that nothing can be over or under, and for an `allow` without
    any."""
    expect_that(0 <= min_scored <= 1, "min_scored", "be a share from 0 to 1", min_scored)
    if allow and max_success is None and max_reward is None:
        raise ConfigurationError(
            f"to allow {', '.join(allow)} more there must be a limit: give max_success or max_reward"
        )
    limits = {"max_success": max_success, "max_reward": max_reward, **allow}
    for name, limit in limits.items():
        expect_that(limit is None or math.isfinite(limit), f"the limit {name}", "be a finite number", limit)


def degenerate_agents_of(environment: Environment) -> dict[str, AgentFactory]:
    """The generic degenerate agents, and the environment's own, which stand in for those of their name.

    An environment offers its own by `degenerate_agents`: names, and functions without arguments that make an
    agent.
    """
    agents = optional_member(environment, "degenerate_agents") or {}
    return {**DEGENERATE, **{name: _ignoring_tools(make) for name, make in agents.items()}}


def _ignoring_tools(make: Callable[[], ScriptedAgent]) -> AgentFactory:
    return lambda tools: make()


async def audit(
    environment: Environment,
    reward_fn: Reward,
    scenarios: Scenarios,
    *,
    policies: Mapping[str, AgentFactory] | None = None,
    seed: int = 0,
    limits: RolloutLimits | None = None,
) -> Audit:
    """Let every degenerate agent (by default `degenerate_agents_of`) play every scenario once, not retried.

    Raises ConfigurationError for no scenario or no agent, and EnvironmentFailure where none of an agent's
    conversations could be played.
    """
    tasks = as_scenarios(scenarios)
    if not tasks:
        raise ConfigurationError("there is no scenario to play: give at least one")
    agents = degenerate_agents_of(environment) if policies is None else dict(policies)
    if not agents:
        raise ConfigurationError("there is no agent to play: give at least one")
    reward = as_reward(reward_fn)
    limits = limits or RolloutLimits()
    play = player(environment, seed=seed, limits=limits)

    async def play_one(make: AgentFactory, scenario: Scenario) -> TrajectoryGroup:
        played = await play(scenario, make)
        if played.status is not Status.FAILED:
            [result] = await score_trajectories(reward, [played], seconds=limits.reward_timeout)
            played, _ = with_score(played, result)
        return TrajectoryGroup(key=scenario.id, trajectories=(played,))

    async def evaluate(name: str, make_for: Callable[[Scenario], AgentFactory]) -> Evaluation:
        groups = await gather_or_cancel(play_one(make_for(scenario), scenario) for scenario in tasks)
        errors = [group.trajectories[0].error for group in groups]
        if all(group.trajectories[0].status is Status.FAILED for group in groups):
            raise EnvironmentFailure(
                f"none of {name}'s conversations could be played; the first: {errors[0]}"
            )
        return await in_thread(measured, groups, tries=1, temperature=0.0)

    results = {name: await evaluate(name, _for_all(make)) for name, make in agents.items()}
    honest = honest_agent_of(environment)
    return Audit(
        policies=results,
        honest=None if honest is None else await evaluate("the honest agent", honest),
    )


def _for_all(make: AgentFactory) -> Callable[[Scenario], AgentFactory]:
    return lambda scenario: make


def honest_agent_of(environment: Environment) -> Callable[[Scenario], AgentFactory] | None:
    """The function that makes the environment's `honest_agent` for a scenario; None where it offers none.

    The agent may ask for the `scenario`, to know what is right there.
    """
    make = optional_member(environment, "honest_agent")
    if make is None:
        return None
    if not wanted_arguments("honest_agent", make, ("scenario",)):
        return _for_all(_ignoring_tools(make))
    return lambda scenario: _ignoring_tools(lambda: make(scenario=scenario))


# Trivial baselines: where the right answer is often to do nothing, an agent that only refuses is paid


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
    agents = optional_member(environment, "floor_agents") or {}
    play = player(environment, seed=seed, limits=limits or RolloutLimits())
    floors = {}
    for name, make in agents.items():
        played = await gather_or_cancel(play(scenario, _ignoring_tools(make)) for scenario in scenarios)
        groups = [TrajectoryGroup(key=t.scenario.id, trajectories=(t,)) for t in played]
        floors[name] = await in_thread(measured, groups, tries=1, temperature=0.0)
    return replace(evaluation, floors=floors)
