"""What a step cost beside its time: the engine's counts, the event loop's worst wait; for trainer.py."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from stateset_agents.backends.base import Backend
from stateset_agents.runtime.loop_lag import LoopLag, measure_loop_lag

__all__ = ["StepWatch", "watch_step"]


class StepWatch:
    """Figures of one step, once it is over."""

    def __init__(self, backend: Backend, lag: LoopLag) -> None:
        self._backend = backend
        self._lag = lag
        self._before = dict(backend.counts())

    def metrics(self) -> dict[str, float]:
        """`engine/*`, where the backend counts and did anything, `time/loop_lag` and `time/loop_lag_user`."""
        now = self._backend.counts()
        done = {name: float(now[name] - self._before.get(name, 0)) for name in now}
        metrics = {"time/loop_lag": self._lag.longest, "time/loop_lag_user": self._lag.in_user_code}
        if any(done.values()):
            idle, rows = done.pop("idle_rows", 0.0), done.get("decode_rows", 0.0)
            metrics |= {f"engine/{name}": count for name, count in done.items()}
            metrics["engine/occupancy"] = 1 - idle / rows if rows else 1.0
        return metrics

    @property
    def lag_place(self) -> str | None:
        """Where the user's code stood on the event loop the longest."""
        return self._lag.place


@contextlib.asynccontextmanager
async def watch_step(backend: Backend) -> AsyncIterator[StepWatch]:
    """Watch from here on; `metrics` says what happened since."""
    async with measure_loop_lag() as lag:
        yield StepWatch(backend, lag)
