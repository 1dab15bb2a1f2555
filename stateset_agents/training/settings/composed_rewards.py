"""Rewards made of rewards, as a YAML file writes them down. `training/components.py` calls it.

reward:
  name: gated
  gates:
    - {name: safety, threshold: 0.9}
    - {name: correctness, threshold: 1.0}
  then: {name: composite, terms: [{name: conciseness, weight: 0.7}, {name: helpful, weight: 0.3}]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.core.reward import CompositeReward, RewardFunction
from stateset_agents.rewards.composites import GatedReward, NormalizedReward, ProductReward, ScaledReward
from stateset_agents.rewards.shaping import PotentialShaping
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

Make = Callable[[Mapping[str, Any]], RewardFunction]
"""Makes a reward of its spec."""
Find = Callable[[str], Any]
"""The object that "module:name" leads to."""


@dataclass(frozen=True, slots=True)
class _Spec:
    """One reward that is made of others, as it is written down."""

    name: str
    arguments: Mapping[str, Any]
    make: Make
    find: Find

    def reward(self, argument: str) -> RewardFunction:
        """The reward that it has as this argument."""
        return self.make(_named(argument, self.arguments[argument]))

    def terms(self, argument: str, number: str) -> dict[str, tuple[RewardFunction, float]]:
        """The rewards that it has as this argument, each with its `number`, by name."""
        terms, name = self.arguments[argument], self.name
        if not isinstance(terms, Sequence) or isinstance(terms, str) or not terms:
            raise ConfigurationError(
                f"{argument} of reward {name!r} must be {_EXAMPLES[argument]}, got {terms!r:.60}"
            )
        rewards: dict[str, tuple[RewardFunction, float]] = {}
        for term in terms:
            spec = dict(_named(f"a term of {name}", term))
            value, called = spec.pop(number, 1.0), spec.pop("called", None)
            other = "threshold" if number == "weight" else "weight"
            if other in spec:
                raise ConfigurationError(f"a term of reward {name!r} takes {number}, not {other}")
            reward = self.make(spec)
            key = reward.name if called is None else str(called)
            if key in rewards:
                raise ConfigurationError(
                    f"reward {key!r} stands twice in {name!r}: give one of them a name, called: another_{key}"
                )
            rewards[key] = (reward, value)
        return rewards

    def potential(self) -> Callable[..., Any]:
        """The function that it names."""
        if not isinstance(self.arguments.get("potential"), str):
            raise ConfigurationError(f"reward {self.name!r} needs potential: {_EXAMPLES['potential']}")
        function: Callable[..., Any] = self.find(self.arguments["potential"])
        return function

    def settings(self, *names: str) -> dict[str, Any]:
        """The values of these arguments, where they are given."""
        return {name: self.arguments[name] for name in names if name in self.arguments}


@dataclass(frozen=True, slots=True)
class _Composed:
    make: Callable[[_Spec], RewardFunction]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ()
    """Further arguments."""


COMPOSED: Mapping[str, _Composed] = {
    "composite": _Composed(lambda spec: CompositeReward(spec.terms("terms", "weight")), ("terms",)),
    "product": _Composed(lambda spec: ProductReward(spec.terms("terms", "weight")), ("terms",)),
    "gated": _Composed(
        lambda spec: GatedReward(spec.terms("gates", "threshold"), then=spec.reward("then")),
        ("gates", "then"),
    ),
    "normalized": _Composed(lambda spec: NormalizedReward(spec.reward("of")), ("of",)),
    "scaled": _Composed(
        lambda spec: ScaledReward(spec.reward("of"), **spec.settings("reward_scaling", "reward_clip_value")),
        ("of",),
        ("reward_scaling", "reward_clip_value"),
    ),
    "shaping": _Composed(
        lambda spec: PotentialShaping(
            spec.reward("of"), spec.potential(), **spec.settings("gamma", "bootstrapped")
        ),
        ("of",),
        ("potential", "gamma", "bootstrapped"),
    ),
}
"""Name -> how it is made; a new one is one entry."""


def compose(name: str, arguments: Mapping[str, Any], make: Make, find: Find) -> RewardFunction:
    """A reward of `COMPOSED` from its arguments; `make` makes the rewards in it.

    A term is a reward's name, or its name and arguments, with `weight` (in a gate `threshold`, 1 when left
    out) and, where a reward stands twice, `called`, its name in the breakdown. Raises ConfigurationError with
    what is wrong.
    """
    composed = COMPOSED[name]
    names = (*composed.needs, *composed.takes)
    for argument in arguments:
        if argument not in names:
            raise ConfigurationError(
                f"reward {name!r} has no argument {argument!r}{nearest(argument, names)}"
            )
    for argument in composed.needs:
        if argument not in arguments:
            raise ConfigurationError(f"reward {name!r} needs {argument}: {_EXAMPLES[argument]}")
    return composed.make(_Spec(name, arguments, make, find))


_EXAMPLES: Mapping[str, str] = {
    "terms": "a list such as [{name: task, weight: 0.8}, {name: conciseness, weight: 0.2}]",
    "gates": "a list such as [{name: safety, threshold: 0.9}]",
    "then": "the reward behind the last gate, such as then: conciseness",
    "of": "the reward it is put over, such as of: conciseness",
    "potential": "a function, such as potential: my_module:knows_the_order",
}


def _named(what: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise ConfigurationError(f"{what} must be a reward's name, or its name and arguments, got {value!r:.60}")
