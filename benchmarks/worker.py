"""The process in which one side works: it makes its task once and runs it whenever it is told to.

One line of JSON in, one line out; see `benchmarks.sides` for who asks. Standard library only, for it runs in
every peer's environment.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from benchmarks import profiling

PACKAGES = ("torch", "transformers", "trl", "accelerate", "stateset-agents", "stable-baselines3")


class Task(Protocol):
    """What one side does in every repetition."""

    def run(self, repetition: int) -> Mapping[str, float]:
        """Do it once; counts of tokens and other numbers to report.

        A task that times only a part of it gives that part as "wall" and "cpu".
        """
        ...

    def close(self) -> None: ...


class Clock:
    """Adds up wall and CPU seconds of the blocks it surrounds; CPU seconds are those of all threads."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def __enter__(self) -> Clock:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.process_time() - self._cpu


def memory(name: str) -> int:
    """Bytes by a line of /proc/self/status: VmRSS now, VmHWM the most since `forget_peak`."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: memory is measured on Linux only")


def forget_peak() -> None:
    """Let VmHWM start again from what is in use now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def serve(make: Callable[[Mapping[str, Any]], Task]) -> None:
    """Answer lines of JSON until told to stop; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task: Task | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "stop":
                break
            answer, task = _obey(order, task, make)
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if task is not None:
        task.close()


def _obey(
    order: Mapping[str, Any], task: Task | None, make: Callable[[Mapping[str, Any]], Task]
) -> tuple[dict[str, Any], Task]:
    if order["do"] == "prepare":
        imported = memory("VmRSS")
        task = make(order["job"])
        gc.collect()
        gc.freeze()  # as `stateset-agents train` does; of every side
        forget_peak()
        memory_use = {"imported": imported, "resting": memory("VmRSS")}
        return {"versions": versions(), "threads": threads(), **memory_use}, task
    if task is None:
        raise RuntimeError("prepare comes first")
    gc.collect()
    if order["do"] == "profile":
        return profiling.operators(lambda: task.run(order["repetition"])), task
    if order["do"] == "holdings":
        return {"in_use": memory("VmRSS"), "tensors": profiling.tensors()}, task
    clock = Clock()
    with clock:
        result = dict(task.run(order["repetition"]))
    resources = {"wall": clock.wall, "cpu": clock.cpu, "peak": memory("VmHWM")}
    return {**resources, **result}, task


def versions() -> dict[str, str]:
    """Of Python and of those packages that this environment has."""
    versions_found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        try:
            versions_found[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_found


def threads() -> int:
    """How many threads torch computes with."""
    import torch

    return torch.get_num_threads()
