"""How good is an agent on held-out scenarios: success with its interval, reward, and both per family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward
from stateset_agents.core.scenario import Scenario, expect_scenarios, expect_split
from stateset_agents.core.trajectory import Status, Trajectory, TrajectoryGroup
from stateset_agents.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.evaluation.intervals import wilson
from stateset_agents.settings import expect

__all__ = ["Evaluation", "FamilyResult", "evaluate", "held_out", "refuse_truncated_sampling", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyResult:
    """One family's share."""

    success: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one pass over the held-out scenarios showed."""

    success: float | None
    """Share of the judged conversations that succeeded; None where the environment judged none.
    Failed ones (environment or backend errors) are left out."""
    interval: tuple[float, float] | None
    """95 %, Wilson."""
    mean_reward: float | None
    """Over the scored conversations; None where none was scored."""
    n: int
    """Conversations that count: the judged ones, or all that were played where none was judged."""
    num_failed: int
    temperature: float
    families: Mapping[str, FamilyResult]
    groups: Sequence[TrajectoryGroup]

    def summary(self) -> dict[str, Any]:
        """As `summary.json` has it, without the conversations."""
        return {
            "success": self.success,
            "interval": None if self.interval is None else list(self.interval),
            "mean_reward": self.mean_reward,
            "n": self.n,
            "num_failed": self.num_failed,
            "temperature": self.temperature,
            "families": {name: {"success": r.success, "n": r.n} for name, r in self.families.items()},
        }


def held_out(environment: Environment, split: str, number: int | None) -> Sequence[Scenario]:
    """`number` scenarios of a split, one of each family in turn (all, as they stand, for None); the same in
    every run.

    Raises ConfigurationError when the environment has none there, or fewer than asked for.
    """
    expect(
        "split", split, str, "scenarios of your own are played by evaluate(agent, environment, reward, ...)"
    )
    scenarios = environment.scenarios(split)
    if not scenarios:
        expect_split(split)
        raise ConfigurationError(
            f"the environment has no {split} scenario: give some split={split!r}, or name another split"
        )
    if number is None:
        return scenarios
    if number < 1:
        raise ConfigurationError(f"the number of {split} scenarios must be at least 1, got {number!r}")
    if number > len(scenarios):
        raise ConfigurationError(
            f"the environment has {len(scenarios)} {split} scenarios, got {number} to play: ask for fewer"
        )
    return spread(scenarios, number)


def spread(scenarios: Sequence[Scenario], number: int) -> Sequence[Scenario]:
    """The first of each family, then the second of each, up to `number`; all, as they stand, where that is
    not more."""
    if number >= len(scenarios):
        return scenarios
    nth: dict[str, int] = {}
    rounds = []
    for scenario in scenarios:
        nth[scenario.family] = nth.get(scenario.family, -1) + 1
        rounds.append(nth[scenario.family])
    order = sorted(range(len(scenarios)), key=rounds.__getitem__)  # stable: families as they first come
    return [scenarios[index] for index in order[:number]]


def refuse_truncated_sampling(agent: MultiTurnAgent) -> None:
    """Rollouts, of training and evaluation alike, sample from the full distribution.

    Raises ConfigurationError for an agent with `top_k` or `top_p` set.
    """
    top_k, top_p = agent.config.top_k, agent.config.top_p
    if top_k or top_p < 1:
        raise ConfigurationError(
            "training and evaluation sample from the full distribution: leave AgentConfig.top_k at 0 and "
            f"top_p at 1, got {top_k} and {top_p}"
        )


async def evaluate(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: Reward,
    scenarios: Sequence[Scenario],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    max_concurrent: int = 64,
    deterministic: bool | None = None,
    turn_timeout: float | None = 300.0,
    reward_timeout: float | None = 300.0,
) -> Evaluation:
    """Play every scenario once at `temperature` (0 is greedy); the same seed meets the same users.

    `deterministic` and the time limits as in the engine; `deterministic` unset, it is what the environment's
    `local` says.
    Success is the environment's verdict; a conversation without one counts for the reward alone.

    Raises ConfigurationError for an empty list and for an agent with `top_k` or `top_p` set, and
    EnvironmentFailure where no conversation could be played at all.
    """
    expect_scenarios(scenarios)
    if not scenarios:
        raise ConfigurationError("there is no scenario to evaluate: give at least one")
    refuse_truncated_sampling(agent)
    engine = ComputationalEngine(
        agent,
        environment,
        reward_fn,
        num_generations=1,
        max_concurrent=max_concurrent,
        deterministic=environment.local if deterministic is None else deterministic,
        turn_timeout=turn_timeout,
        reward_timeout=reward_timeout,
    )
    groups = await engine.rollout(scenarios, seed=seed, step=0, temperature=temperature)
    played = [t for group in groups for t in group.trajectories if t.status is not Status.FAILED]
    if not played:
        raise EnvironmentFailure(
            f"none of {len(scenarios)} conversations could be played; the first failed with "
            f"{groups[0].trajectories[0].error}"
        )
    judged = [t.success for t in played if t.success is not None]
    rewards = [t.reward for t in played if t.reward is not None]
    return Evaluation(
        success=sum(judged) / len(judged) if judged else None,
        interval=wilson(sum(judged), len(judged)) if judged else None,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        n=len(judged) or len(played),
        num_failed=len(scenarios) - len(played),
        temperature=temperature,
        families=_families(played),
        groups=groups,
    )


def _families(played: Sequence[Trajectory]) -> dict[str, FamilyResult]:
    families: dict[str, list[bool]] = {}
    for trajectory in played:
        if trajectory.success is not None:
            families.setdefault(trajectory.scenario.family, []).append(trajectory.success)
    return {
        name: FamilyResult(success=sum(wins) / len(wins), n=len(wins))
        for name, wins in sorted(families.items())
    }
