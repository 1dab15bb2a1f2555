"""Windows of an environment's observations, for networks that read what has been."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from stateset_agents.numeric.environments.base import (
    BatchedEnvironment,
    BoolArray,
    FloatArray,
    IntArray,
    Observations,
    Transition,
)
from stateset_agents.types.errors import ConfigurationError


class MetricsHistory:
    """An environment whose observations are the last ones, and the one of now.

    metrics_history [B, T, M], oldest first and the one of now last, and current_metrics [B, M]. Before the
    start the first observation is taken to have stood for ever. Starts, noise, rewards and forks are those of
    the environment inside.
    """

    def __init__(self, environment: BatchedEnvironment, history_length: int = 60) -> None:
        """Raises ConfigurationError for observations that are not one array [B, M]."""
        shape = environment.spec.observation_shape
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise ConfigurationError(
                f"{environment.spec.name}: observations must be one array [rows, metrics] to be remembered, "
                f"got the shape {shape!r}"
            )
        if history_length < 1:
            raise ConfigurationError(f"history_length must be at least 1, got {history_length!r}")
        self.environment, self.history_length = environment, history_length
        shapes = {"metrics_history": (history_length, *shape), "current_metrics": shape}
        self.spec = replace(environment.spec, observation_shape=shapes)

    def reset(self, seeds: Sequence[int]) -> Observations:
        """One episode per seed; see `BatchedEnvironment`."""
        first = self.environment.reset(seeds)
        assert isinstance(first, np.ndarray)  # as its spec says
        self._window: FloatArray = np.repeat(first[:, None], self.history_length, axis=1)
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """One action per row; see `BatchedEnvironment`."""
        transition = self.environment.step(actions)
        now = transition.observations
        assert isinstance(now, np.ndarray)
        self._window = np.concatenate([self._window[:, 1:], now[:, None]], axis=1)  # earlier ones are kept
        return replace(transition, observations=self._observations())

    def fork(self, rows: IntArray) -> Self:
        """Copies of these rows with what they remember; see `BatchedEnvironment`."""
        fork = copy.copy(self)
        fork.environment, fork._window = self.environment.fork(rows), self._window[rows]
        return fork

    def action_mask(self) -> BoolArray | None:
        """Of the environment inside."""
        return self.environment.action_mask()

    def _observations(self) -> Observations:
        return {"metrics_history": self._window, "current_metrics": self._window[:, -1]}
