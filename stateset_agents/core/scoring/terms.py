"""Rewards made of rewards: how their terms are named, checked and broken down, and observe results."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from stateset_agents.core.scoring.base import RewardFunction, RewardResult
from stateset_agents.core.scoring.function_reward import Reward, as_reward
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

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
            shown = f"{name} alone: write [({name}, 1.0)]" if name else f"{pair!r:.60}"
            raise ConfigurationError(f"a {kind} takes (reward, {number}) pairs, got {shown}")
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
        [result] = await self.score_group([trajectory])
        if isinstance(result, RewardFailure):
            raise result
        return result

    @abstractmethod
    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[RewardResult | RewardFailure]:
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
