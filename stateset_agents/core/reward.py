"""Rewards: what a finished conversation is worth.

A reward function alone sets `trajectory.reward`. A score of None means "not applicable"; a reward that
breaks leaves its member unscored (`RewardFailure`), never with a made-up number. The engine scores a
group by `score_trajectories`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from numbers import Real
from typing import Any

from stateset_agents.core.scoring.base import Result, turn_rewards
from stateset_agents.core.scoring.base import RewardFunction as RewardFunction
from stateset_agents.core.scoring.base import RewardResult as RewardResult
from stateset_agents.core.scoring.base import Scope as Scope
from stateset_agents.core.scoring.base import score_trajectories as score_trajectories
from stateset_agents.core.scoring.base import score_trajectory as score_trajectory
from stateset_agents.core.scoring.function_reward import FunctionReward as FunctionReward
from stateset_agents.core.scoring.function_reward import Reward as Reward
from stateset_agents.core.scoring.function_reward import as_reward as as_reward
from stateset_agents.core.scoring.function_reward import reward_function as reward_function
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory


def __getattr__(name: str) -> Any:
    """The ready rewards of `rewards.factories`, which stands above this room, under their documented path."""
    if name.startswith("create_"):
        return getattr(import_module("stateset_agents.rewards.factories"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class EnvironmentReward(RewardFunction):
    """The environment's own reward: its turn rewards plus its outcome's. None where it gives neither."""

    name = "environment"
    local = True

    async def score(self, trajectory: Trajectory) -> RewardResult:
        outcome = trajectory.outcome
        return RewardResult(
            score=trajectory.environment_reward,
            breakdown={} if outcome is None else outcome.breakdown,
            turn_rewards=tuple(turn.reward or 0.0 for turn in trajectory.turns)
            if any(turn.reward is not None for turn in trajectory.turns)
            else (),
        )


# Rewards made of rewards: how their terms are named, checked and broken down, and observe results.

Term = tuple[Reward, float]
"""A reward, or a plain function, and its number: a weight here, a threshold in a gate."""


def named_terms(
    kind: str, rewards: Mapping[str, Term] | Sequence[Term], number: str = "weight"
) -> list[tuple[str, RewardFunction, float]]:
    """Name, reward and number of each term; a sequence's terms are called as their rewards are.

    Raises ConfigurationError where a term is no pair, a name stands twice, a number is not positive, or
    nothing may be put over a reward.
    """
    if not isinstance(rewards, Mapping | Sequence) or not rewards:
        raise ConfigurationError(f"a {kind} needs at least one (reward, {number}), got {rewards!r:.60}")
    named = isinstance(rewards, Mapping)
    terms: list[tuple[str, RewardFunction, float]] = []
    for key, pair in rewards.items() if isinstance(rewards, Mapping) else enumerate(rewards):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            name = getattr(pair, "name", None) or getattr(pair, "__name__", None)
            description = f"{name} alone: write [({name}, 1.0)]" if name else f"{pair!r:.60}"
            raise ConfigurationError(f"a {kind} takes (reward, {number}) pairs, got {description}")
        reward, value = as_term(kind, pair[0]), pair[1]
        name = str(key) if named else reward.name
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
            raise ConfigurationError(f"the {number} of reward {name!r} must be positive, got {value!r}")
        terms.append((name, reward, float(value)))
    names = [name for name, _, _ in terms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"reward {twice!r} stands twice: name the terms by a mapping, {{name: (reward, {number})}}"
        )
    return terms


def as_term(kind: str, value: Reward) -> RewardFunction:
    """`as_reward` for a part of another reward; ConfigurationError for one that must stand outermost."""
    reward = as_reward(value)
    if reward.outermost:
        raise ConfigurationError(
            f"a {kind} cannot be put over {reward.name}, which would lose its meaning: put that one outside"
        )
    return reward


def parts_of(name: str, result: RewardResult) -> dict[str, float]:
    """A term's share of a breakdown: its score under its name, its own parts under `name/part`."""
    parts = {f"{name}/{part}": value for part, value in result.breakdown.items()}
    return parts if result.score is None else {**parts, name: result.score}


class RewardOfRewards(RewardFunction):
    """Base of rewards made of others; a subclass writes `score_group`.

    Its breakdown must hold `parts_of` every term that was asked: `observe` reads the terms' scores there.
    """

    made_of_others = True

    def __init__(self, name: str, terms: Mapping[str, RewardFunction]) -> None:
        self.name = name
        self.terms = dict(terms)
        self.scope = "group" if any(term.scope == "group" for term in terms.values()) else "trajectory"
        self.local = all(term.local for term in terms.values())

    async def score(self, trajectory: Trajectory) -> RewardResult:
        return await self.score_as_group(trajectory)

    async def results_of_terms(self, trajectories: Sequence[Trajectory]) -> list[tuple[Result, ...]]:
        """Return for each member the results of the terms, in their order; all terms are asked at once."""
        by_term = await gather_or_cancel(
            score_trajectories(term, trajectories) for term in self.terms.values()
        )
        return list(zip(*by_term, strict=True))

    @abstractmethod
    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        """One result per member, in order; the failure of one leaves the others scored."""

    def check_scenario(self, scenario: Scenario) -> None:
        for term in self.terms.values():
            term.check_scenario(scenario)

    def observe(self, results: Sequence[RewardResult]) -> None:
        for name, term in self.terms.items():
            own_results = []
            for result in results:  # its turn rewards are not in the breakdown
                parts = {key: value for key, value in result.breakdown.items() if key.startswith(f"{name}/")}
                breakdown = {key.removeprefix(f"{name}/"): value for key, value in parts.items()}
                own_results.append(RewardResult(score=result.breakdown.get(name), breakdown=breakdown))
            term.observe(own_results)

    def state(self) -> dict[str, Any]:
        states = {name: term.state() for name, term in self.terms.items()}
        return {name: state for name, state in states.items() if state}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, term in self.terms.items():
            if name in state:
                term.restore(state[name])


class CompositeReward(RewardOfRewards):
    """The weighted mean of several rewards, over those that apply.

        CompositeReward([(EnvironmentReward(), 0.7), (create_customer_service_reward(), 0.3)])

    Where a term is not applicable the others share its weight; where one fails, the member is
    unscored. The breakdown holds each term under its name and the term's own parts under `name/part`.
    Turn rewards are combined by the same weights. A plain function may stand for a reward.
    """

    def __init__(self, rewards: Mapping[str, Term] | Sequence[Term], *, name: str = "composite") -> None:
        """Weights must be positive (let a penalty return negative scores) and need not sum to 1."""
        self._terms = named_terms("composite reward", rewards)
        super().__init__(name, {term: reward for term, reward, _ in self._terms})

    @property
    def part_weights(self) -> Mapping[str, float]:
        total = sum(weight for _, _, weight in self._terms)
        return {name: weight / total for name, _, weight in self._terms}

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        return [
            self._combined(results, num_turns=len(trajectory.turns))
            for trajectory, results in zip(
                trajectories, await self.results_of_terms(trajectories), strict=True
            )
        ]

    def _combined(self, results: Sequence[Result], *, num_turns: int) -> Result:
        total = weights = 0.0
        breakdown: dict[str, float] = {}
        turns = [0.0] * num_turns
        any_turn_rewards = False
        for (name, _, weight), result in zip(self._terms, results, strict=True):
            if isinstance(result, RewardFailure):
                return result
            breakdown.update(parts_of(name, result))
            if result.score is not None:
                total += weight * result.score
                weights += weight
                any_turn_rewards = any_turn_rewards or bool(result.turn_rewards)
                try:
                    earned_by_turn = turn_rewards(result, num_turns)
                except RewardFailure as failure:  # this member's alone
                    return RewardFailure(f"reward {name}: {failure}")
                turns = [
                    sum_so_far + weight * reward
                    for sum_so_far, reward in zip(turns, earned_by_turn, strict=True)
                ]
        if not weights:
            return RewardResult(score=None, breakdown=breakdown)
        turn_means = tuple(reward / weights for reward in turns) if any_turn_rewards else ()
        return RewardResult(score=total / weights, breakdown=breakdown, turn_rewards=turn_means)
