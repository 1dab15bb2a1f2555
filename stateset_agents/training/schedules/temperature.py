"""A sampling temperature that follows the reward. The trainer steps it after every rollout."""

from __future__ import annotations

from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError

__all__ = ["TemperatureScheduler", "next_temperature"]


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
        self.temperature = _moved(
            self.temperature, mean_reward, target, low=self.minimum, high=self.initial, decay=self.decay
        )
        return self.temperature


def next_temperature(config: TrainingConfig, temperature: float, mean_reward: float | None) -> float:
    """After a rollout at `temperature` with this mean reward; None (nothing was scored) moves nothing."""
    if config.temperature_schedule == "none" or mean_reward is None:
        return temperature
    return _moved(
        temperature,
        mean_reward,
        config.temperature_target,
        low=config.temperature_min,
        high=config.temperature,
        decay=config.temperature_decay,
    )


def _moved(
    temperature: float, mean_reward: float, target: float, *, low: float, high: float, decay: float
) -> float:
    if mean_reward < target:
        return min(high, temperature * TemperatureScheduler.WARMING)
    return max(low, temperature * decay)
