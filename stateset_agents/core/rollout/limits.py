"""Limits of rollouts: conversations at once, their time, and further tries."""

from __future__ import annotations

from dataclasses import dataclass, field

from stateset_agents.runtime.circuit_breakers import FaultPolicy
from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """The limits of an engine's rollouts; the names are those of `TrainingConfig`.

    Raises ConfigurationError for a limit that no rollout could keep.
    """

    max_concurrent: int = 64
    """Conversations at once."""
    turn_timeout: float | None = 300.0
    """Seconds that the environment may take for one answer, or its conversation fails; None: no limit."""
    reward_timeout: float | None = 300.0
    """Seconds that a reward may take; members without a score by then stay unscored. None: no limit."""
    episode_timeout: float | None = None
    """Seconds that a conversation may take in all; then it is cut, judged and scored by what was said."""
    episode_retries: int = 1
    """Times that a failed conversation is played again."""
    faults: FaultPolicy = field(default_factory=FaultPolicy)
    """Further tries of single calls, and waits for a service that is down."""

    def __post_init__(self) -> None:
        for name, least in (("max_concurrent", 1), ("episode_retries", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        for name in ("turn_timeout", "reward_timeout", "episode_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigurationError(f"{name} must be seconds above 0 or None, got {seconds!r}")
