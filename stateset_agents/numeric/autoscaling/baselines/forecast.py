"""A forecast of the load from its past alone: a line through the last steps' logarithms, by least squares.

For h steps ahead

    log rate(t + h) = log rate(t) + c0 + sum_i c_i (log rate(t - i) - log rate(t))

with coefficients of each h fitted on training workloads, so that it has learned how bursts rise and fade. It
does not depend on the level. A season of a day is not in it: within the minutes that are planned a day's wave
moves by less than a hundredth, and an episode has no yesterday.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.autoscaling.workload import Workload
from stateset_agents.types.errors import ConfigurationError

Array = NDArray[np.float64]

_LEAST = 1e-3
_SHARES = (np.arange(128) + 0.5) / 128


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Fitted."""

    coefficients: Array  # [lags, steps ahead]; the first is the constant
    errors: Array  # [steps ahead, Q]
    """Equally likely errors of the logarithm, on what it was fitted to, rising."""

    @classmethod
    def fit(
        cls,
        workload: Workload,
        seeds: Sequence[int],
        *,
        num_steps: int,
        step_seconds: float,
        ahead: int,
        lags: int = 24,
    ) -> Self:
        """From episodes of `num_steps` with these seeds. `ahead`, `lags`: steps.

        Raises ConfigurationError where an episode is too short for one window.
        """
        if num_steps < lags + ahead:
            raise ConfigurationError(
                f"num_steps must be at least lags + ahead ({lags + ahead}), got {num_steps}"
            )
        traces = np.stack([workload.draw(seed, num_steps, step_seconds) for seed in seeds])
        logs = np.log(np.maximum(traces, _LEAST))
        windows = np.lib.stride_tricks.sliding_window_view(logs, lags + ahead, axis=1)
        windows = windows.reshape(-1, lags + ahead)
        features, newest = _features(windows[:, :lags].T)
        aims = windows[:, lags:] - newest[:, None]
        coefficients = np.linalg.lstsq(features, aims, rcond=None)[0]
        missed = aims - features @ coefficients
        errors: Array = np.quantile(missed, _SHARES, axis=0).T
        return cls(np.asarray(coefficients, dtype=np.float64), errors)

    @property
    def lags(self) -> int:
        """Steps of the past that it reads."""
        return len(self.coefficients)

    def __call__(self, rates: Array) -> Array:
        """[steps ahead, B] requests per second from [H, B], the newest last; the first of a shorter past is
        repeated."""
        past = np.log(np.maximum(rates[-self.lags :], _LEAST))
        if len(past) < self.lags:
            past = np.concatenate([past[:1].repeat(self.lags - len(past), axis=0), past])
        features, newest = _features(past)
        ahead: Array = np.exp(newest + (features @ self.coefficients).T)
        return ahead


def _features(past: Array) -> tuple[Array, Array]:
    """[N, lags] a constant and the distances of older steps from the newest one, and [N] the newest."""
    newest = past[-1]
    return np.concatenate([np.ones((1, past.shape[1])), past[:-1] - newest]).T, newest
