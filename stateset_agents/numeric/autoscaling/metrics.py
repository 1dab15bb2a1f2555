"""A cluster's metrics as the numbers that a network reads: the document's InfrastructureMetricsNormalizer.

Environments and live loops call it on what they measure. Names are told apart exactly: `error_rate` is not
`error_rate_percent`.

    {"queue_depth": 0, "cpu_percent": 75}  ->  [-1, .5]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stateset_agents.numeric.environments.base import FloatArray
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that, nearest

RANGES: Mapping[str, tuple[float, float]] = {
    "cpu_percent": (0, 100),
    "memory_percent": (0, 100),
    "network_mbps": (0, 10_000),
    "disk_iops": (0, 100_000),
    "latency_p50_ms": (0, 1_000),
    "latency_p99_ms": (0, 10_000),
    "request_rate": (0, 100_000),
    "error_rate": (0, 100),
    "error_rate_percent": (0, 100),
    "queue_depth": (0, 10_000),
    "replica_count": (0, 100),
}
"""Lower and upper ends of the known metrics. The document has all but error_rate_percent, the name under
which its own reward reads an error rate."""

_MOST_DEVIATIONS = 3.0
_LOG_SCALE = 10.0


class InfrastructureMetricsNormalizer:
    """Min-max scaling of known metrics, running z-scores of others (Welford 1962), all within ±1.

    The first metrics that are seen fix the names and the order of the columns, whatever the order of a later
    mapping is. A value is a number, or an array [B] of one per row.

    - a known metric: its lower to its upper end becomes -1 to 1;
    - another one that was observed at least twice: its z-score, clipped at ±3, over 3;
    - any other: sign(x) log(1 + |x|) / 10, clipped at ±1.
    """

    def __init__(
        self, names: Iterable[str] | None = None, *, metric_ranges: Mapping[str, tuple[float, float]] = RANGES
    ) -> None:
        """`names`: the metrics there will be, None to take the first ones; `metric_ranges`: ends by name.

        Raises ConfigurationError for a repeated name, and for ends that do not rise.
        """
        for name, (low, high) in metric_ranges.items():
            expect_that(0 < high - low < float("inf"), f"the range of {name}", "rise", (low, high))
        self.metric_ranges = dict(metric_ranges)
        """Ends of the known metrics; an entry that is added holds from the next call on."""
        self.running_stats: dict[str, tuple[float, float]] = {}
        """Mean and deviation of each other metric that was observed at least twice, or was entered here."""
        self.names: tuple[str, ...] = ()
        """The metrics in the order of the columns; none before the first were seen."""
        self._moments: dict[str, tuple[int, float, float]] = {}
        if names is not None:
            metric_names = list(names)
            if not metric_names or len(set(metric_names)) < len(metric_names):
                raise ConfigurationError(f"names must be at least one, each once, got {metric_names!r}")
            self.names = tuple(metric_names)

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Let the running mean and deviation of each metric without a range see these values.

        Raises ConfigurationError, with nothing changed, for other names, and for a value that is not finite.
        """
        values = self._checked(metrics)
        for name, sample in values.items():
            if name in self.metric_ranges:
                continue
            count, mean, squares = self._moments.get(name, (0, 0.0, 0.0))
            number, centre = sample.size, float(sample.mean())
            total, shift = count + number, centre - mean
            squares += float(((sample - centre) ** 2).sum()) + shift * shift * count * number / total
            self._moments[name] = (total, mean + shift * number / total, squares)
        self._follow_moments()

    def normalize(self, metrics: Mapping[str, Any], use_running_stats: bool = True) -> FloatArray:
        """[M] of numbers, or [B, M] of arrays, within ±1. `use_running_stats`: False takes the logarithm of
        every metric without a range.

        Raises ConfigurationError for other names than the first ones, and for a value that is not finite.
        """
        values = self._checked(metrics)
        columns = [self._normal(name, values[name], use_running_stats) for name in self.names]
        return np.stack(np.broadcast_arrays(*columns), axis=-1).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Names and running statistics, as plain JSON."""
        moments = {name: list(sums) for name, sums in self._moments.items()}
        return {"names": list(self.names), "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the names and statistics that `state_dict` gave."""
        self.names = tuple(state["names"])
        self._moments = {
            name: (int(count), float(mean), float(squares))
            for name, (count, mean, squares) in state["moments"].items()
        }
        self._follow_moments()

    def _follow_moments(self) -> None:
        for name, (count, mean, squares) in self._moments.items():
            if count > 1:
                self.running_stats[name] = (mean, float(np.sqrt(squares / count)))

    def _normal(self, name: str, values: NDArray[np.float64], use_running_stats: bool) -> NDArray[np.float64]:
        if name in self.metric_ranges:
            low, high = self.metric_ranges[name]
            return np.clip(2 * (values - low) / (high - low) - 1, -1, 1)
        if use_running_stats and name in self.running_stats:
            mean, deviation = self.running_stats[name]
            scores = (values - mean) / (deviation + 1e-8)
            return np.clip(scores, -_MOST_DEVIATIONS, _MOST_DEVIATIONS) / _MOST_DEVIATIONS
        return np.clip(np.sign(values) * np.log1p(np.abs(values)) / _LOG_SCALE, -1, 1)

    def _checked(self, metrics: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
        """The values as arrays; the first call fixes the names."""
        names = self.names or tuple(metrics)
        if not names:
            raise ConfigurationError("the metrics are empty: give at least one, by name")
        for name in metrics:
            if name not in names:
                raise ConfigurationError(
                    f"the metrics have {name!r}, which was not among the first ones{nearest(name, names)}: "
                    "keep the names, or make another normaliser"
                )
        for name in names:
            if name not in metrics:
                raise ConfigurationError(f"the metrics lack {name!r}: give it a value in every step")
        values = {name: np.asarray(metrics[name], dtype=np.float64) for name in names}
        for name, value in values.items():
            if not np.isfinite(value).all():
                raise ConfigurationError(f"{name} must be finite, got {value[~np.isfinite(value)].flat[0]}")
        self.names = names
        return values
