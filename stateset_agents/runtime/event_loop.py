"""The event loop of a program: asyncio's own, which no Ctrl-C slips past."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, in a `runner`."""
    with runner() as loop:
        return loop.run(main)


@contextlib.contextmanager
def runner() -> Iterator[asyncio.Runner]:
    """As `asyncio.Runner`, for the main thread; a signal wakes the loop even as it goes to sleep.

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
