"""The settings of a training that say what is done when something fails; `TrainingConfig` has them."""

from __future__ import annotations

from dataclasses import fields

from pydantic import Field

from stateset_agents.runtime.retries import FaultPolicy
from stateset_agents.types.settings import Settings


class FaultSettings(Settings):
    """How long is waited, how often is tried again, and when the run stops."""

    episode_retries: int = Field(default=1, ge=0, description="Times a failed conversation is played again.")
    turn_retries: int = Field(
        default=0,
        ge=0,
        description="Times an answer of the environment (user, tools) that failed is asked for again, "
        "on a copy of the conversation taken before it: the environment must be able to fork.",
    )
    reward_retries: int = Field(
        default=1, ge=0, description="Times a reward that broke is asked again before it is left unscored."
    )
    retry_backoff: float = Field(
        default=0.5,
        ge=0.0,
        description="Seconds before the first such try; they double up to 30, and half of them is random.",
    )
    turn_timeout: float | None = Field(
        default=300.0,
        gt=0.0,
        description="Seconds the environment (its user, its tools) may take for one answer; a conversation "
        "that waits longer fails. None: for ever.",
    )
    reward_timeout: float | None = Field(
        default=300.0,
        gt=0.0,
        description="Seconds that a reward may take, each time it is asked; members without a score by then "
        "stay unscored. None: for ever.",
    )
    episode_timeout: float | None = Field(
        default=None,
        gt=0.0,
        description="Seconds that a conversation may take in all; then it is cut, judged and scored by what "
        "was said. None: as long as it lasts.",
    )
    breaker_failures: int = Field(
        default=10,
        ge=0,
        description="Failures in a row of the environment or of a reward after which all work waits for it, "
        "and one probe at a time asks whether it is back. 0: never.",
    )
    breaker_pause: float = Field(
        default=5.0, gt=0.0, description="Seconds until the first such probe; they double up to 60."
    )
    outage_patience: float = Field(
        default=300.0,
        ge=0.0,
        description="Seconds that work waits for what is down; then its conversations fail at once, and "
        "max_failed_steps ends the run. What has never worked is not waited for.",
    )
    max_failed_steps: int = Field(
        default=3, ge=1, description="Steps in a row without a usable group that stop."
    )

    @property
    def faults(self) -> FaultPolicy:
        """What is tried again, and when work waits for what is down."""
        return FaultPolicy(**{field.name: getattr(self, field.name) for field in fields(FaultPolicy)})
