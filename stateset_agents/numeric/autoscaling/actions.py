"""The actions of a cluster: replicas, one setting up or down, canary traffic; as one index and back.

The index counts traffic fastest, then the setting, then replicas: 7 x 7 x 11 = 539 actions, 49 without
traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives


class ScalingAction(IntEnum):
    """Change of the number of replicas."""

    SCALE_DOWN_LARGE = -4
    SCALE_DOWN_MEDIUM = -2
    SCALE_DOWN_SMALL = -1
    MAINTAIN = 0
    SCALE_UP_SMALL = 1
    SCALE_UP_MEDIUM = 2
    SCALE_UP_LARGE = 4


class ConfigAction(IntEnum):
    """One setting of every replica, one level down or up."""

    DECREASE_BATCH_SIZE = 0
    INCREASE_BATCH_SIZE = 1
    DECREASE_TIMEOUT = 2
    INCREASE_TIMEOUT = 3
    DECREASE_CONCURRENCY = 4
    INCREASE_CONCURRENCY = 5
    NO_CHANGE = 6


TRAFFIC_WEIGHTS = tuple(range(0, 101, 10))
"""Per cent of the requests that go to the canary."""


class InfrastructureActionSpace:
    """Every combination of the offered actions, by index.

    >>> space = InfrastructureActionSpace()
    >>> space.total_actions, space.decode_action(538)["traffic_weight"]
    (539, 100)
    """

    def __init__(
        self,
        scaling_actions: Sequence[ScalingAction] | None = None,
        config_actions: Sequence[ConfigAction] | None = None,
        enable_traffic_actions: bool = True,
    ) -> None:
        """An argument that is None offers all actions of its kind. Raises ConfigurationError for an empty or
        repeated choice."""
        self.scaling_actions = _offered("scaling_actions", scaling_actions, ScalingAction)
        self.config_actions = _offered("config_actions", config_actions, ConfigAction)
        self.traffic_weights: tuple[int | None, ...] = TRAFFIC_WEIGHTS if enable_traffic_actions else (None,)

        self.enable_traffic_actions = enable_traffic_actions
        self.num_scaling, self.num_config = len(self.scaling_actions), len(self.config_actions)
        self.num_traffic = len(TRAFFIC_WEIGHTS) if enable_traffic_actions else 0
        self.total_actions = self.num_scaling * self.num_config * len(self.traffic_weights)
        """Indices are 0 to total_actions - 1."""

    def encode_action(
        self, scaling: ScalingAction, config: ConfigAction, traffic_weight: int | None = None
    ) -> int:
        """The index of an action; the inverse is `encode_action(**decode_action(index))`.

        Without `traffic_weight` nothing goes to the canary. Raises ConfigurationError for what is not there.
        """
        if traffic_weight is None:
            traffic_weight = self.traffic_weights[0]
        index = 0
        values = (scaling, config, traffic_weight)
        for (key, offered), value in zip(self._parts().items(), values, strict=True):
            if isinstance(value, bool) or value not in offered:
                names = alternatives(str(getattr(choice, "name", choice)) for choice in offered)
                raise ConfigurationError(f"{key} must be {names}, got {getattr(value, 'name', value)!r}")
            index = index * len(offered) + offered.index(value)
        return index

    def decode_action(self, action_idx: int) -> dict[str, Any]:
        """{scaling, config, traffic_weight} of an index; raises ConfigurationError outside the space."""
        if isinstance(action_idx, bool) or not 0 <= action_idx < self.total_actions:
            raise ConfigurationError(f"an action must be 0 to {self.total_actions - 1}, got {action_idx!r}")
        index = int(action_idx)
        action: dict[str, Any] = {}
        for key, offered in reversed(self._parts().items()):
            index, place = divmod(index, len(offered))
            action[key] = offered[place]
        return {key: action[key] for key in self._parts()}

    def _parts(self) -> dict[str, tuple[Any, ...]]:
        return {
            "scaling": self.scaling_actions,
            "config": self.config_actions,
            "traffic_weight": self.traffic_weights,
        }


def _offered(name: str, chosen: Sequence[Any] | None, kind: type[IntEnum]) -> tuple[Any, ...]:
    if chosen is None:
        return tuple(kind)
    wrong = [choice for choice in chosen if not isinstance(choice, kind)]
    if wrong:
        raise ConfigurationError(f"{name} must be of {kind.__name__}, got {wrong[0]!r}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ConfigurationError(f"{name} must name at least one action, each once, got {list(chosen)!r}")
    return tuple(chosen)
