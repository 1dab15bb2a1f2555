"""A step's engine figures are what its backend counted meanwhile."""

from __future__ import annotations

import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.runtime.event_loop import measure_loop_lag
from stateset_agents.training.loop.step import StepWatch


class Counting(ScriptedBackend):
    def __init__(self) -> None:
        super().__init__([])
        self.counted = {"prefilled_tokens": 100, "decode_rows": 64, "idle_rows": 32}

    def counts(self) -> dict[str, int]:
        return self.counted


async def test_figures_are_differences_over_the_step() -> None:
    backend = Counting()
    async with measure_loop_lag() as lag:
        watch = StepWatch(backend, lag)
        backend.counted = {"prefilled_tokens": 130, "decode_rows": 144, "idle_rows": 52}
    metrics = watch.metrics()
    lags = [metrics.pop(name) for name in ("time/loop_lag", "time/loop_lag_user")]
    assert lags[0] >= lags[1] >= 0
    assert 0 < metrics.pop("memory/peak_mib") < metrics.pop("memory/limit_mib")
    assert metrics == {
        "engine/prefilled_tokens": 30,
        "engine/decode_rows": 80,
        "engine/occupancy": pytest.approx(1 - 20 / 80),
    }


async def test_a_backend_that_counts_nothing_or_did_nothing_gives_none() -> None:
    for backend in (ScriptedBackend([]), Counting()):
        async with measure_loop_lag() as lag:
            watch = StepWatch(backend, lag)
        assert {name.split("/")[0] for name in watch.metrics()} == {"time", "memory"}
