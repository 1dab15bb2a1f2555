"""Says who set each setting of a training: the user, the model's card, or a table that fills the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from stateset_agents.training.config import (
    PROFILES,
    TrainingConfig,
    distillation_defaults,
    estimator_defaults,
    loss_defaults,
)

USER, CARD, DEFAULT = "you", "the model's card", "default"


def setting_origins(config: TrainingConfig, recommended: Container[str] = ()) -> dict[str, str]:
    """Every setting's name -> its origin, such as `you`, `profile aggressive` or `default`.

    `recommended` names what was taken of the model's card, as `TrainingConfig.with_recommended` returns it.
    The first layer that has a setting wins: the user, the card, the loss's clip range, a teacher, the
    estimator, the profile.
    """
    layers: tuple[tuple[str, Container[str]], ...] = (
        (USER, config.model_fields_set),
        (CARD, recommended),
        (f"loss {config.loss_type}", loss_defaults(config.loss_type)),
        ("the teacher", distillation_defaults(config.distillation)),
        (f"estimator {config.advantage_estimator}", estimator_defaults(config.advantage_estimator)),
        (f"profile {config.profile}", PROFILES[config.profile]),
    )
    return {
        name: next((layer for layer, settings in layers if name in settings), DEFAULT)
        for name in type(config).model_fields
    }


def counted_origins(origins: Mapping[str, str]) -> str:
    """`3 by you, 8 by the model's card, 2 by estimator group, 89 default`."""
    counts = Counter(origins.values())
    num_defaults = counts.pop(DEFAULT, 0)
    by_origin = [f"{count} by {origin}" for origin, count in counts.items()]
    return ", ".join([*by_origin, f"{num_defaults} default"])


def origins_table(config: TrainingConfig, recommended: Container[str] = ()) -> str:
    """A line for each setting, with its value and its origin: the user's first, the defaults last."""
    origins = setting_origins(config, recommended)
    names = sorted(origins, key=lambda name: (origins[name] == DEFAULT, origins[name] != USER))
    width = max(map(len, names))
    return "\n".join(f"{name:{width}}  {getattr(config, name)!s:24}  {origins[name]}" for name in names)
