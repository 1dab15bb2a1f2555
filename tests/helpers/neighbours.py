"""Other work on a core, for tests of limits of processor time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["NEIGHBOURS", "neighbours"]

NEIGHBOURS = {
    "yielding": "import os\nwhile True: os.sched_yield()",
    "sleeping": """
import time
while True:
    time.sleep(0.0007)
    end = time.perf_counter() + 0.0012
    while time.perf_counter() < end: pass
""",
}
"""Of ticks that the kernel counts, each leaves its share to others."""


@contextmanager
def neighbours(kind: str, count: int) -> Iterator[None]:
    """So many processes on the one core that this thread, and what it starts, is then bound to."""
    cores = os.sched_getaffinity(0)
    with ExitStack() as running:
        os.sched_setaffinity(0, {min(cores)})
        running.callback(os.sched_setaffinity, 0, cores)
        for _ in range(count):
            process = running.enter_context(subprocess.Popen([sys.executable, "-I", "-c", NEIGHBOURS[kind]]))
            running.callback(process.kill)
        yield
