"""Servers of tests on this machine: `from loopback import free_port, serving`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["free_port", "serving"]


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@contextmanager
def serving(script: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python script PORT ...`, from when it answers at that port until the block ends."""
    process = subprocess.Popen([sys.executable, str(script), str(port), *arguments])
    try:
        deadline = time.monotonic() + 120
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{script.name} does not answer at port {port}")
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as door:
        return door.connect_ex(("127.0.0.1", port)) == 0
