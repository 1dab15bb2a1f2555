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
from typing import Any

from stateset_agents.core.reward import CompositeReward, RewardFunction
from stateset_agents.rewards.composites import GatedReward, ProductReward
from stateset_agents.rewards.scaling import NormalizedReward, ScaledReward
from stateset_agents.rewards.shaping import PotentialShaping
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

__all__ = ["COMPOSED", "compose"]

Make = Callable[[Mapping[str, Any]], RewardFunction]
"""Makes a reward of its spec."""
Find = Callable[[str], Any]
"""What "module:name" leads to."""

COMPOSED: Mapping[str, tuple[str, ...]] = {
    "composite": ("terms",),
    "product": ("terms",),
    "gated": ("gates", "then"),
    "normalized": ("of",),
    "scaled": ("of", "reward_scaling", "reward_clip_value"),
    "shaping": ("of", "potential", "gamma", "bootstrapped"),
}
"""Name -> its arguments."""


def compose(name: str, arguments: Mapping[str, Any], make: Make, find: Find) -> RewardFunction:
    """A reward of `COMPOSED` from its arguments; `make` makes the rewards in it.

    A term is a reward's name, or its name and arguments, with `weight` (in a gate `threshold`, 1 when left
    out) and, where a reward stands twice, `called`, its name in the breakdown. Raises ConfigurationError with
    what is wrong.
    """
    for argument in arguments:
        if argument not in COMPOSED[name]:
            raise ConfigurationError(
                f"reward {name!r} has no argument {argument!r}{nearest(argument, COMPOSED[name])}"
            )
    needed = COMPOSED[name][0]
    if needed not in arguments or (name == "gated" and "then" not in arguments):
        missing = needed if needed not in arguments else "then"
        raise ConfigurationError(f"reward {name!r} needs {missing}: {_EXAMPLES[missing]}")
    rest = {key: value for key, value in arguments.items() if key not in ("terms", "gates", "then", "of")}
    match name:
        case "composite":
            return CompositeReward(_terms(name, arguments["terms"], "weight", make))
        case "product":
            return ProductReward(_terms(name, arguments["terms"], "weight", make))
        case "gated":
            gates = _terms(name, arguments["gates"], "threshold", make)
            return GatedReward(gates, then=make(_spec("then", arguments["then"])))
        case "normalized":
            return NormalizedReward(make(_spec("of", arguments["of"])))
        case "scaled":
            return ScaledReward(make(_spec("of", arguments["of"])), **rest)
    if not isinstance(rest.get("potential"), str):
        raise ConfigurationError(f"reward 'shaping' needs potential: {_EXAMPLES['potential']}")
    rest["potential"] = find(rest["potential"])
    return PotentialShaping(make(_spec("of", arguments["of"])), **rest)


_EXAMPLES: Mapping[str, str] = {
    "terms": "a list such as [{name: task, weight: 0.8}, {name: conciseness, weight: 0.2}]",
    "gates": "a list such as [{name: safety, threshold: 0.9}]",
    "then": "the reward behind the last gate, such as then: conciseness",
    "of": "the reward it is put over, such as of: conciseness",
    "potential": "a function, such as potential: my_module:knows_the_order",
}


def _terms(name: str, terms: Any, number: str, make: Make) -> dict[str, tuple[RewardFunction, float]]:
    wanted = "terms" if number == "weight" else "gates"
    if not isinstance(terms, Sequence) or isinstance(terms, str) or not terms:
        raise ConfigurationError(
            f"{wanted} of reward {name!r} must be {_EXAMPLES[wanted]}, got {terms!r:.60}"
        )
    made: dict[str, tuple[RewardFunction, float]] = {}
    for term in terms:
        spec = dict(_spec(f"a term of {name}", term))
        value, called = spec.pop(number, 1.0), spec.pop("called", None)
        other = "threshold" if number == "weight" else "weight"
        if other in spec:
            raise ConfigurationError(f"a term of reward {name!r} takes {number}, not {other}")
        reward = make(spec)
        key = reward.name if called is None else str(called)
        if key in made:
            raise ConfigurationError(
                f"reward {key!r} stands twice in {name!r}: give one of them a name, called: another_{key}"
            )
        made[key] = (reward, value)
    return made


def _spec(what: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    raise ConfigurationError(f"{what} must be a reward's name, or its name and arguments, got {value!r:.60}")
