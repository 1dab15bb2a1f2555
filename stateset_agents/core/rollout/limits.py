"""Limits of rollouts: conversations at once, their time, and further tries."""

from __future__ import annotations

from dataclasses import dataclass, field

from stateset_agents.runtime.circuit_breakers import FaultPolicy
from stateset_agents.types.settings import expect_that


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
            expect_that(getattr(self, name) >= least, name, f"be at least {least}", getattr(self, name))
        for name in ("turn_timeout", "reward_timeout", "episode_timeout"):
            seconds = getattr(self, name)
            expect_that(seconds is None or seconds > 0, name, "be seconds above 0 or None", seconds)
