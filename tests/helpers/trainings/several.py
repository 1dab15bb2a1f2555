"""Two processes that train together, on loopback: `from several import in_two`.

Each is a fork of one that has imported torch and this package and runs nothing, and is told by the same
environment variables as torchrun's who it is.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from killed_runs import forks

__all__ = ["Broke", "in_two", "met"]

_LONGEST = 300.0
"""Seconds that anything may take, on a machine that has no time at all."""


class Broke(Exception):
    """What one process ended with, as text."""


def in_two(work: Callable[..., Any], *arguments: Any, started: int = 2) -> list[Any]:
    """What `work(*arguments)` gives in each process, by rank, or a Broke where it raised.

    `work` is a function of a module."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [forks().Pipe(duplex=False) for _ in range(started)]
    running = [
        forks().Process(
            target=_member, args=(rank, started, port, pipes[rank][1], work, arguments), daemon=True
        )
        for rank in range(started)
    ]
    for process in running:
        process.start()
    for _, sending in pipes:
        sending.close()
    try:
        return [_answer(pipe, process) for (pipe, _), process in zip(pipes, running, strict=True)]
    finally:
        for process in running:
            process.kill()
            process.join()


def _answer(pipe: Connection, process: Any) -> Any:
    if not pipe.poll(_LONGEST):
        raise AssertionError("a process hangs")
    try:
        return pipe.recv()
    except EOFError:
        return Broke("it is gone")


def _member(
    rank: int, count: int, port: int, pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        pipe.send(work(*arguments))
    except Exception as error:
        pipe.send(Broke(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    pipe.close()


def met(sign: Path, *, writes: bool) -> bool:
    """Does the sign stand there, in the end?"""
    if writes:
        sign.touch()
    last = time.monotonic() + 60
    while not sign.exists() and time.monotonic() < last:
        time.sleep(0.05)
    return sign.exists()
