"""A sampling temperature that follows the reward. The trainer steps it after every rollout."""

from __future__ import annotations

from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError


class TemperatureScheduler:
    """Cools while the reward is at its target, warms again (slower) while it is below.

    An agent that is good enough samples closer to what it knows; one that falls back explores more.

    >>> scheduler = TemperatureScheduler(1.0, minimum=0.3, decay=0.5)
    >>> scheduler.step(0.9)  # at or above the target of .7: times the decay
    0.5
    >>> scheduler.step(0.2)  # below it: 1 % warmer
    0.505
    """

    WARMING = 1.01
    """Factor while the reward is below the target."""

    def __init__(self, initial: float = 1.0, *, minimum: float = 0.3, decay: float = 0.995) -> None:
        """It starts at `initial` and never rises above it, nor falls below `minimum`."""
        if not 0 < minimum <= initial:
            raise ConfigurationError(
                f"the lowest temperature must be above 0 and at most the initial {initial!r}, got {minimum!r}"
            )
        if not 0 < decay <= 1:
            raise ConfigurationError(f"the decay must be above 0 and at most 1, got {decay!r}")
        self.initial = initial
        self.minimum = minimum
        self.decay = decay
        self.temperature = initial
        """The present one; a resume sets it."""

    def step(self, mean_reward: float, target: float = 0.7) -> float:
        """The temperature after a rollout with this mean reward."""
        if mean_reward < target:
            self.temperature = min(self.initial, self.temperature * self.WARMING)
        else:
            self.temperature = max(self.minimum, self.temperature * self.decay)
        return self.temperature


def next_temperature(config: TrainingConfig, temperature: float, mean_reward: float | None) -> float:
    """After a rollout at `temperature` with this mean reward; None (nothing was scored) moves nothing."""
    if config.temperature_schedule == "none" or mean_reward is None:
        return temperature
    scheduler = TemperatureScheduler(
        config.temperature, minimum=config.temperature_min, decay=config.temperature_decay
    )
    scheduler.temperature = temperature
    return scheduler.step(mean_reward, config.temperature_target)
