"""What is done instead of an action that may not be taken.

    the policy's action  ->  safe alternatives in order  ->  the fallback  ->  keep everything as it is, and
    alert

Each is checked before it is taken; only the last is taken unchecked, as nothing does less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stateset_agents.deployment.guards import Guard, Violation, violations_of
from stateset_agents.types.errors import ConfigurationError

Action = Mapping[str, Any]

ALTERNATIVES = ("MAINTAIN", "SCALE_UP_SMALL", "SCALE_DOWN_SMALL")
"""Scalings that are tried in the place of an unsafe one, in this order, with NO_CHANGE and the same
traffic."""


class ActionSpace(Protocol):
    """`control.infrastructure.actions.InfrastructureActionSpace`, or another with named actions."""

    @property
    def scaling_actions(self) -> Sequence[Any]:
        """Offered scalings, each with a `name`."""

    @property
    def config_actions(self) -> Sequence[Any]: ...

    def encode_action(self, action: Mapping[str, Any]) -> int: ...

    def decode_action(self, index: int) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What is done in the end."""

    action: dict[str, Any]
    source: str
    """policy, alternative, fallback, or maintain."""
    fallback_violations: tuple[Violation, ...] = ()
    """Of the fallback, if it was asked for and not allowed."""


def alternatives_to(action: Action, space: ActionSpace) -> Iterator[dict[str, Any]]:
    """Those of `ALTERNATIVES` that the space offers, as whole actions."""
    scalings = {choice.name: choice for choice in space.scaling_actions}
    configs = {choice.name: choice for choice in space.config_actions}
    for name in ALTERNATIVES:
        if name in scalings and "NO_CHANGE" in configs:
            yield {**action, "scaling": scalings[name], "config": configs["NO_CHANGE"]}


def executed_action(
    action: Action | None,
    violations: Iterable[Violation],
    fallback: Action,
    *,
    space: ActionSpace,
    guards: Sequence[Guard],
    state: Any,
) -> Executed:
    """The first that is allowed. `action`: the policy's, with its `violations`; None: its turn it is not.

    Raises ConfigurationError if the fallback is not allowed and the space has nothing that keeps everything.
    """
    if action is not None:
        if not tuple(violations):
            return Executed(action=dict(action), source="policy")
        for alternative in alternatives_to(action, space):
            if not violations_of(guards, alternative, state):
                return Executed(action=alternative, source="alternative")
    forbidden = violations_of(guards, fallback, state)
    if not forbidden:
        return Executed(action=dict(fallback), source="fallback")
    for kept in alternatives_to(fallback, space):
        if int(kept["scaling"]) == 0:
            return Executed(action=kept, source="maintain", fallback_violations=forbidden)
    raise ConfigurationError(
        f"the fallback is not allowed ({forbidden[0].guard}: {forbidden[0].why}) and the action space "
        f"does not "
        "offer MAINTAIN with NO_CHANGE: offer both"
    )
