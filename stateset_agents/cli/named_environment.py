"""What ENV of a verb names: an environment alone, or a file's with its reward and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.training.config import TrainingConfig


class NamedEnvironment(NamedTuple):
    """As `make_environment` and `make_reward` take them."""

    environment: Mapping[str, Any]
    reward: Mapping[str, Any]
    training: TrainingConfig
    """For its time limits."""


def named_environment(name: str, reward: str | None = None) -> NamedEnvironment:
    """A name, `module:Class`, `{name: ..., argument: ...}`, a YAML file or a run folder; `reward` stands in
    for the file's. A name alone needs no torch."""
    from stateset_agents.training.components import ENVIRONMENTS, read_spec
    from stateset_agents.training.config import TrainingConfig

    if not name.strip():
        raise ConfigurationError(
            f"ENV is empty: give one of {', '.join(ENVIRONMENTS)}, module:Class, a YAML file or a run folder"
        )
    spec = None if reward is None else read_spec("--reward", reward)
    is_file = name.endswith((".yaml", ".yml")) or Path(name).exists()
    if name in ENVIRONMENTS or not is_file:
        return NamedEnvironment(read_spec("ENV", name), spec or {"name": "environment"}, TrainingConfig())
    from stateset_agents.training.experiment import load_experiment

    config = load_experiment(name, {} if spec is None else {"reward": spec})
    return NamedEnvironment(config.environment, config.reward, config.training)
