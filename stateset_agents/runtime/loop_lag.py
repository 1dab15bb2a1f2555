"""How long the event loop was kept from running while a step goes on, and whether by the user's code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType

import stateset_agents

__all__ = ["LoopLag", "measure_loop_lag"]

_PYTHON, _INSTALLED = (
    tuple(sysconfig.get_paths()[name] for name in names)
    for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
_ASYNCIO = str(Path(asyncio.__file__).parent)
_HERE = tuple(
    f"{folder}{os.sep}" for folder in (Path(stateset_agents.__file__).parent, *_PYTHON, *_INSTALLED)
)
"""Files below these folders are not the user's."""


class LoopLag:
    """The worst waits seen, in seconds."""

    worst: float = 0.0
    in_user_code: float = 0.0
    """The worst one during which code of the user's stood on the loop."""
    place: str | None = None
    """Where that was: `my_env.py:31, step`."""


@contextlib.asynccontextmanager
async def measure_loop_lag(interval: float = 0.02) -> AsyncIterator[LoopLag]:
    """Wakes every `interval` seconds while open; `worst` is the longest it was late.

    While it is late, a thread looks at what stands on the loop. A file is the user's unless it belongs to
    Python, to this package or to an installed one; what such a file calls counts as the user's. A wait is
    put down to the place that was seen most, where that is in at least half of the looks.
    """
    lag = LoopLag()
    sampler = _Sampler(threading.get_ident(), interval)

    async def watch() -> None:
        while True:
            due = time.perf_counter() + interval
            sampler.expect(due)
            await asyncio.sleep(interval)
            late, place = time.perf_counter() - due, sampler.place()
            lag.worst = max(lag.worst, late)
            if place is not None and late > lag.in_user_code:
                lag.in_user_code, lag.place = late, place

    task = asyncio.create_task(watch())
    sampler.start()
    try:
        yield lag
    finally:
        sampler.stop()
        task.cancel()
        await asyncio.wait([task])  # not `await task`: it could not tell the caller's cancellation from this


class _Sampler:
    """A thread that looks at another one's stack while that is late."""

    def __init__(self, thread: int, interval: float) -> None:
        self._thread = thread
        self._interval = interval
        self._due = time.perf_counter() + interval
        self._seen: list[str | None] = []
        self._ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._look, name="loop-lag", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def expect(self, due: float) -> None:
        self._due, self._seen = due, []

    def place(self) -> str | None:
        """Where the user's code stood while the thread was late."""
        seen = list(self._seen)
        users = [place for place in seen if place is not None]
        if not users or 2 * len(users) < len(seen):
            return None
        return max(set(users), key=users.count)

    def _look(self) -> None:
        while not self._ended.wait(self._interval):
            if time.perf_counter() - self._due > self._interval:
                seen = self._seen  # before the look: the thread may be on time again after it
                frame = sys._current_frames().get(self._thread)
                seen.append(_user_place(frame))


def _user_place(frame: FrameType | None) -> str | None:
    """The innermost frame of the user's among those that the event loop called; None without any."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_ASYNCIO) and frame.f_code.co_name in ("_run", "_run_once", "run_forever", "run"):
            return None  # what stands further out called the loop
        if not file.startswith((*_HERE, "<frozen ")):
            return f"{Path(file).name}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return None
