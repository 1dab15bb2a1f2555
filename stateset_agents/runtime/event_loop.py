"""The event loop: run it so that Ctrl-C is heard, and measure what blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

_PYTHON, _INSTALLED = (
    tuple(sysconfig.get_paths()[name] for name in names)
    for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
)
_ASYNCIO = str(Path(asyncio.__file__).parent)
_HERE = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).resolve().parent.parent, *_PYTHON, *_INSTALLED)
)
"""Files below these folders are not the user's."""
_TEMPLATE = "<template>"
"""The file name that jinja gives the code of a chat template."""


class LoopLag:
    """The longest delays of the event loop, in seconds."""

    longest: float = 0.0
    in_user_code: float = 0.0
    """The longest delay during which the user's code ran on the loop."""
    place: str | None = None
    """The line of that code: `my_env.py:31, step`."""


@contextlib.asynccontextmanager
async def measure_loop_lag(interval: float = 0.02) -> AsyncIterator[LoopLag]:
    """Measure while the context is open: a task wakes every `interval` seconds and notes how late it is.

    While it is late, a thread samples the stack of the event loop's thread. A file is the user's unless it
    belongs to Python, to this package or to an installed package; whatever such a file calls counts as the
    user's code. A delay is attributed to the line that was sampled most, if that is user code in at least
    half of the samples.
    """
    lag = LoopLag()
    sampler = _Sampler(threading.get_ident(), interval)

    async def watch() -> None:
        while True:
            due = time.perf_counter() + interval
            sampler.expect(due)
            await asyncio.sleep(interval)
            late, place = time.perf_counter() - due, sampler.place()
            lag.longest = max(lag.longest, late)
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
    """A thread that samples another thread's stack while that thread is late."""

    def __init__(self, thread: int, interval: float) -> None:
        self._thread = thread
        self._interval = interval
        self._due = time.perf_counter() + interval
        self._seen: list[str | None] = []
        self._ended = threading.Event()
        self._sampling = threading.Thread(target=self._sample, name="loop-lag", daemon=True)

    def start(self) -> None:
        self._sampling.start()

    def stop(self) -> None:
        self._ended.set()
        self._sampling.join()  # it wakes at once

    def expect(self, due: float) -> None:
        self._due, self._seen = due, []

    def place(self) -> str | None:
        """The line of user code that was sampled most while the thread was late, if any."""
        samples = list(self._seen)
        places = [place for place in samples if place is not None]
        if not places or 2 * len(places) < len(samples):
            return None
        return max(set(places), key=places.count)

    def _sample(self) -> None:
        while not self._ended.wait(self._interval):
            if time.perf_counter() - self._due > self._interval:
                seen = self._seen  # before the sample: after it the thread may be on time again
                frame = sys._current_frames().get(self._thread)
                seen.append(_user_place(frame))


def _user_place(frame: FrameType | None) -> str | None:
    """The innermost frame of user code among the frames that the event loop called; None without any."""
    while frame is not None:
        file = _source_file(frame)
        if file.startswith(_ASYNCIO) and frame.f_code.co_name in ("_run", "_run_once", "run_forever", "run"):
            return None  # frames further out called the loop
        if not file.startswith((*_HERE, "<frozen ", _TEMPLATE)):
            return f"{Path(file).name}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _source_file(frame: FrameType) -> str:
    """The file of the code; of generated code, such as a dataclass's `__init__`, that of its module."""
    file = frame.f_code.co_filename
    return str(frame.f_globals.get("__file__") or file) if file == "<string>" else file


# --- the loop of a program: asyncio's own, which no Ctrl-C slips past

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run`, in a `runner`."""
    with runner() as loop:
        return loop.run(main)


@contextlib.contextmanager
def runner() -> Iterator[asyncio.Runner]:
    """A runner like `asyncio.Runner`, for the main thread; a signal wakes the loop even as it goes to sleep.

    asyncio alone hears Ctrl-C by a handler in Python. One that comes between the last look at handlers and
    the wait for events is heard at the next event, and a page that nobody opens has none.
    """
    if sys.platform == "win32":  # its loop is woken by signals
        with asyncio.Runner() as made:
            yield made
        return
    woken, wake = socket.socketpair()
    with woken, wake:
        woken.setblocking(False)
        wake.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            with asyncio.Runner() as made:
                made.get_loop().add_reader(woken, woken.recv, 4096)
                yield made
        finally:
            signal.set_wakeup_fd(before)
