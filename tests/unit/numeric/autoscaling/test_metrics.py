"""Metrics become numbers within ±1, by name and not by order."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stateset_agents.numeric.autoscaling.metrics import RANGES, InfrastructureMetricsNormalizer
from stateset_agents.types.errors import ConfigurationError


def test_the_ends_of_each_range_are_the_ends_of_the_scale() -> None:
    documented = {
        100: {"cpu_percent", "memory_percent", "error_rate", "replica_count"},
        10_000: {"network_mbps", "latency_p99_ms", "queue_depth"},
        100_000: {"disk_iops", "request_rate"},
        1_000: {"latency_p50_ms"},
    }
    for highest, names in documented.items():
        assert {name: RANGES[name] for name in names} == dict.fromkeys(names, (0, highest))
        for value, expected in ((0, -1), (highest, 1), (highest / 2, 0), (2 * highest, 1), (-5, -1)):
            found = InfrastructureMetricsNormalizer().normalize(dict.fromkeys(names, value))
            assert found.dtype == np.float32
            assert found.tolist() == [expected] * len(names)


def test_columns_are_in_the_order_of_the_names() -> None:
    normalizer = InfrastructureMetricsNormalizer()
    first = normalizer.normalize({"queue_depth": 0, "cpu_percent": 75})
    assert normalizer.names == ("queue_depth", "cpu_percent")
    assert first.tolist() == normalizer.normalize({"cpu_percent": 75, "queue_depth": 0}).tolist() == [-1, 0.5]


def test_without_statistics_the_logarithm_stays_within_one() -> None:
    normalizer = InfrastructureMetricsNormalizer()
    values = np.array([0.0, np.e - 1, 1 - np.e, 1e30, -1e30])
    found = normalizer.normalize({"sessions": values})
    assert found[:, 0] == pytest.approx([0, 0.1, -0.1, 1, -1])


def test_running_statistics_give_clipped_deviations_in_any_split() -> None:
    seen = np.random.default_rng(0).normal(50, 4, 1000)
    whole, parts = InfrastructureMetricsNormalizer(), InfrastructureMetricsNormalizer()
    whole.observe({"sessions": seen})
    for part in (seen[:1], seen[1:300], seen[300:]):
        parts.observe({"sessions": part if len(part) > 1 else float(part[0])})
    asked = np.array([seen.mean(), seen.mean() + 1.5 * seen.std(), 1e9, -1e9])
    for normalizer in (whole, parts):
        assert normalizer.normalize({"sessions": asked})[:, 0] == pytest.approx([0, 0.5, 1, -1], abs=1e-6)
    logs = whole.normalize({"sessions": asked}, use_running_stats=False)
    assert logs[0, 0] == pytest.approx(np.log1p(seen.mean()) / 10)
    known = InfrastructureMetricsNormalizer()
    known.observe({"cpu_percent": np.array([1.0, 2.0])})
    assert known.normalize({"cpu_percent": 50}).tolist() == [0]  # a range comes first
    copy = InfrastructureMetricsNormalizer()
    copy.load_state_dict(json.loads(json.dumps(parts.state_dict())))
    assert np.array_equal(copy.normalize({"sessions": asked}), parts.normalize({"sessions": asked}))


def test_other_names_are_told_apart() -> None:
    normalizer = InfrastructureMetricsNormalizer()
    normalizer.normalize({"error_rate_percent": 0.1, "cpu_percent": 10})
    with pytest.raises(
        ConfigurationError,
        match=r"'error_rate', which was not among the first ones \(did you mean 'error_rate_percent'\?\)",
    ):
        normalizer.normalize({"error_rate": 0.1, "cpu_percent": 10})
    with pytest.raises(ConfigurationError, match="the metrics lack 'cpu_percent'"):
        normalizer.observe({"error_rate_percent": 0.1})
    with pytest.raises(ConfigurationError, match="cpu_percent must be finite, got nan"):
        normalizer.normalize({"error_rate_percent": 0.1, "cpu_percent": [1.0, np.nan]})
    with pytest.raises(ConfigurationError, match="names must be at least one, each once"):
        InfrastructureMetricsNormalizer(["cpu_percent", "cpu_percent"])
    own = InfrastructureMetricsNormalizer(metric_ranges={"sessions": (-50, 50)})
    assert own.normalize({"sessions": 25}).tolist() == [0.5]
    with pytest.raises(ConfigurationError, match=r"the range of sessions must rise, got \(5, 5\)"):
        InfrastructureMetricsNormalizer(metric_ranges={"sessions": (5, 5)})
