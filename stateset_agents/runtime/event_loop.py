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
    lag, loop_thread, ended = LoopLag(), threading.get_ident(), threading.Event()
    due = time.perf_counter() + interval
    samples: list[str | None] = []
    """Lines of user code, or None, that were sampled since the loop is late."""

    def sample() -> None:
        while not ended.wait(interval):
            if time.perf_counter() - due > interval:
                of_this_delay = samples  # before the sample: after it the thread may be on time again
                of_this_delay.append(_user_place(sys._current_frames().get(loop_thread)))

    async def watch() -> None:
        nonlocal due, samples
        while True:
            due, samples = time.perf_counter() + interval, []
            await asyncio.sleep(interval)
            late = time.perf_counter() - due
            lag.longest = max(lag.longest, late)
            places = [place for place in samples if place is not None]
            if places and 2 * len(places) >= len(samples) and late > lag.in_user_code:
                lag.in_user_code, lag.place = late, max(set(places), key=places.count)

    task = asyncio.create_task(watch())
    sampling = threading.Thread(target=sample, name="loop-lag", daemon=True)
    sampling.start()
    try:
        yield lag
    finally:
        ended.set()
        sampling.join()  # it wakes at once
        task.cancel()
        await asyncio.wait([task])  # not `await task`: it could not tell the caller's cancellation from this


def _user_place(frame: FrameType | None) -> str | None:
    """The innermost frame of user code among the frames that the event loop called; None without any."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == "<string>":  # generated code, such as a dataclass's `__init__`: it is its module's
            file = str(frame.f_globals.get("__file__") or file)
        if file.startswith(_ASYNCIO) and frame.f_code.co_name in ("_run", "_run_once", "run_forever", "run"):
            return None  # frames further out called the loop
        if not file.startswith((*_HERE, "<frozen ", _TEMPLATE)):
            return f"{Path(file).name}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return None


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
        with asyncio.Runner() as loop_runner:
            yield loop_runner
        return
    woken, wake = socket.socketpair()
    with woken, wake:
        woken.setblocking(False)
        wake.setblocking(False)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            with asyncio.Runner() as loop_runner:
                loop_runner.get_loop().add_reader(woken, woken.recv, 4096)
                yield loop_runner
        finally:
            signal.set_wakeup_fd(before)
