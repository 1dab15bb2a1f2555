"""Generated load: requests per second over an episode, drawn from its seed alone.

A shape is relative load over time; its level is drawn log-uniformly, and each step's requests are Poisson.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from stateset_agents.numeric.autoscaling.queueing import Array
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that, nearest

_DAY = 24 * 3600.0
_LEAST = 0.02
"""Relative load is never less."""


class Workload(Protocol):
    """Source of an episode's load."""

    @property
    def mean_rate(self) -> float:
        """Requests per second, of a typical episode."""

    def draw(self, seed: int, num_steps: int, step_seconds: float) -> Array:
        """[num_steps] requests per second in each step, a function of the arguments alone."""


Shape = Callable[[np.random.Generator, Array, float], Array]
"""(generator, times [T] in seconds, severity) -> [T] relative load, about 1 in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedLoad:
    """Load of one kind, or of all kinds mixed.

    >>> GeneratedLoad(kind="diurnal").draw(3, 480, 15.0).shape
    (480,)
    """

    kind: str = "mixed"
    """Name of one of `SHAPES`."""
    rates: tuple[float, float] = (500.0, 5000.0)
    """Requests per second: between what the level of an episode is drawn."""
    severity: float = 1.0
    """Factor of the load's deviations from its level: 2 makes flash crowds twice as large, 0 none."""

    def __post_init__(self) -> None:
        if self.kind not in SHAPES:
            raise ConfigurationError(
                f"kind must be {alternatives(SHAPES)}, got {self.kind!r}{nearest(self.kind, SHAPES)}"
            )
        low, high = self.rates
        expect_that(0 < low <= high < math.inf, "rates", "be two that rise from above 0", self.rates)
        expect_that(0 <= self.severity < math.inf, "severity", "not be negative", self.severity)

    @property
    def mean_rate(self) -> float:
        """Requests per second in the middle, by ratio, of `rates`."""
        return math.sqrt(self.rates[0] * self.rates[1])

    def draw(self, seed: int, num_steps: int, step_seconds: float) -> Array:
        """[num_steps] requests per second."""
        generator = np.random.default_rng([seed, 1])
        low, high = self.rates
        level = math.exp(generator.uniform(math.log(low), math.log(high)))
        times: Array = np.multiply(np.arange(num_steps), step_seconds, dtype=np.float64)
        relative = SHAPES[self.kind](generator, times, self.severity).clip(min=_LEAST)
        return realised(generator, level * relative, step_seconds)


def realised(generator: np.random.Generator, rates: Array, step_seconds: float) -> Array:
    """Poisson requests of these mean rates, per second."""
    counts: Array = generator.poisson(rates * step_seconds).astype(np.float64)
    return counts / step_seconds


def _diurnal(generator: np.random.Generator, times: Array, severity: float) -> Array:
    """A window of a day: a wave of a day and one of half a day, and slow noise."""
    phase = generator.uniform(0, 2 * math.pi)
    angle = phase + 2 * math.pi * times / _DAY
    wave = 0.4 * np.sin(angle) + 0.15 * np.sin(2 * angle + generator.uniform(0, 2 * math.pi))
    return 1 + severity * (wave + _wander(generator, times, minutes=20, deviation=0.05))


def _bursts(generator: np.random.Generator, times: Array, severity: float) -> Array:
    """About four an hour, each a quarter to once the level more, up within a minute, over after 2 to 10."""
    return 1 + severity * _pulses(
        generator, times, per_hour=4, heights=(0.25, 1.0), rise=(15.0, 60.0), minutes=(2.0, 10.0)
    )


def _ramps(generator: np.random.Generator, times: Array, severity: float) -> Array:
    """Straight lines between levels of half to one and a half, 10 to 40 minutes each."""
    ends, levels = [0.0], [generator.uniform(0.5, 1.5)]
    while ends[-1] <= times[-1]:
        ends.append(ends[-1] + 60 * generator.uniform(10, 40))
        levels.append(generator.uniform(0.5, 1.5))
    return 1 + severity * (np.interp(times, ends, levels) - 1)


def _flash_crowds(generator: np.random.Generator, times: Array, severity: float) -> Array:
    """About one in two hours, one to three times the level more: there in 30 s, gone in half an hour."""
    return 1 + severity * _pulses(
        generator, times, per_hour=0.5, heights=(1.0, 3.0), rise=(15.0, 30.0), minutes=(10.0, 30.0)
    )


def _mixed(generator: np.random.Generator, times: Array, severity: float) -> Array:
    """A day's window times ramps in half of the episodes, times bursts; flash crowds in a quarter."""
    load = _diurnal(generator, times, severity)
    if generator.random() < 0.5:
        load = load * _ramps(generator, times, severity)
    if generator.random() < 0.75:
        load = load * _bursts(generator, times, severity)
    if generator.random() < 0.25:
        load = load * _flash_crowds(generator, times, severity)
    return load


SHAPES: Mapping[str, Shape] = {
    "diurnal": _diurnal,
    "bursts": _bursts,
    "ramps": _ramps,
    "flash_crowds": _flash_crowds,
    "mixed": _mixed,
}


def _pulses(
    generator: np.random.Generator,
    times: Array,
    *,
    per_hour: float,
    heights: tuple[float, float],
    rise: tuple[float, float],
    minutes: tuple[float, float],
) -> Array:
    """Additional load: up in a line within `rise` seconds, then down to 1/20 in `minutes`."""
    seconds = times[-1] + (times[1] - times[0] if len(times) > 1 else 1.0)
    number = generator.poisson(per_hour * seconds / 3600)
    begins = generator.uniform(0, seconds, number)[:, None]
    tops = generator.uniform(*heights, number)[:, None]
    up = generator.uniform(*rise, number)[:, None]
    fall = 60 * generator.uniform(*minutes, number)[:, None] / math.log(20)
    since = np.maximum(times - begins, 0)
    pulse = tops * np.minimum(since / up, 1) * np.exp(-np.maximum(since - up, 0) / fall)
    total: Array = pulse.sum(axis=0)
    return total


def _wander(generator: np.random.Generator, times: Array, *, minutes: float, deviation: float) -> Array:
    """Noise that forgets itself in `minutes`: values so far apart, in lines."""
    number = int(times[-1] / (60 * minutes)) + 2
    return np.interp(times, 60 * minutes * np.arange(number), generator.normal(0, deviation, number))
