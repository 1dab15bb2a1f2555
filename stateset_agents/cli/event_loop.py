"""The loop that verbs run in: `asyncio.run`, which no Ctrl-C slips past."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`; a signal wakes the loop even as it goes to sleep.

    asyncio.run alone hears Ctrl-C by a handler in Python. One that comes between the last look at handlers
    and the wait for events is heard at the next event, and a page that nobody opens has none.
    """
    if sys.platform == "win32":  # its loop is woken by signals
        return asyncio.run(main)
    return asyncio.run(_woken(main))


async def _woken(main: Coroutine[Any, Any, T]) -> T:
    loop = asyncio.get_running_loop()
    woken, wake = socket.socketpair()
    with woken, wake:
        woken.setblocking(False)
        wake.setblocking(False)
        loop.add_reader(woken, woken.recv, 4096)
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            return await main
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(woken)
