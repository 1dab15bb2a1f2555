"""The vision encoder of a model that reads pictures: left as it is where a training says so."""

from __future__ import annotations

from typing import Any

from stateset_agents.backends.pretrained.pictures import vision_tower
from stateset_agents.types.errors import ConfigurationError


def freeze_vision(model: Any) -> None:
    """Let no update move the vision encoder, an adapter's layers in it included.

    Raises ConfigurationError for a model that has none.
    """
    tower = vision_tower(model)
    if tower is None:
        raise ConfigurationError(
            f"freeze_vision is of models with a vision encoder, and {type(model).__name__} has none: leave "
            "it out"
        )
    tower.requires_grad_(False)
