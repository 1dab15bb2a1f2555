"""How long the event loop was kept from running, measured while a step goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

__all__ = ["LoopLag", "measure_loop_lag"]


class LoopLag:
    """The worst wait seen, in seconds."""

    worst: float = 0.0


@contextlib.asynccontextmanager
async def measure_loop_lag(interval: float = 0.02) -> AsyncIterator[LoopLag]:
    """Wakes every `interval` seconds while open; `worst` is the longest it was late."""
    lag = LoopLag()

    async def watch() -> None:
        while True:
            due = time.perf_counter() + interval
            await asyncio.sleep(interval)
            lag.worst = max(lag.worst, time.perf_counter() - due)

    task = asyncio.create_task(watch())
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.wait([task])  # not `await task`: it could not tell the caller's cancellation from this
