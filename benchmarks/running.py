"""Runs a comparison: every side stays alive, and repetitions go round in turn."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.comparisons import Comparison
from benchmarks.environments import FOLDER
from benchmarks.sides import Side, SideError, Worker
from stateset_agents.algorithms.intervals import wilson

WARM_UPS = 1


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one side reported."""

    prepared: dict[str, Any]
    repetitions: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)
    """Of another process: "peak", the most it held, and "extra", how much more than when it had loaded."""

    def values(self, name: str) -> list[float]:
        """One quantity of every repetition."""
        if name in self.memory:
            return [self.memory[name]]
        return [side[name] for side in self.repetitions]


def measure(comparison: Comparison, *, repetitions: int) -> dict[str, Measured]:
    """Prepare and warm up every side, then run them in turn; who goes first changes."""
    names = list(comparison.sides)
    with contextlib.ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(side, _log(comparison, name), keeps_memory=True))
            for name, side in comparison.sides.items()
        }
        measured = {name: Measured(prepared=worker.prepare()) for name, worker in workers.items()}
        for number in range(WARM_UPS):
            for name in names:
                workers[name].run(number)
        for number in range(repetitions):
            for name in _order(names, number):
                measured[name].repetitions.append(workers[name].run(WARM_UPS + number))
    if comparison.memory:
        for name, side in comparison.sides.items():
            measured[name].memory = _memory(side, _log(comparison, f"{name}-memory"))
    _expect_equal_work(comparison, measured)
    _expect_equal_success(comparison, measured)
    return measured


def profiled(comparison: Comparison, name: str) -> dict[str, Any]:
    """Where one side's CPU time and memory go, in a process of its own; see `benchmarks.profiling`."""
    log = _log(comparison, f"{name}-profile")
    with Worker(comparison.sides[name], log, keeps_memory=True) as worker:
        worker.prepare()
        for number in range(WARM_UPS):
            worker.run(number)
        times = worker.profile(WARM_UPS)
    with Worker(comparison.sides[name], log, keeps_memory=False) as worker:
        prepared = worker.prepare()
        peak = max(worker.run(number)["peak"] for number in range(2))
        return {**times, **worker.holdings(), **prepared, "peak": peak}


class Others:
    """How many cores other processes than ours kept busy, on average, while this was open; None: unknown."""

    def __enter__(self) -> Others:
        self.cores: float | None = None
        self._started, self._busy, self._own = time.perf_counter(), _busy(), _cpu_seconds()
        return self

    def __exit__(self, *exc: object) -> None:
        busy = _busy()
        if busy is not None and self._busy is not None:
            took = time.perf_counter() - self._started
            self.cores = round(max(0.0, busy - self._busy - (_cpu_seconds() - self._own)) / took, 2)


def _busy() -> float | None:
    """CPU seconds of the whole machine since it started, those taken by its host included; Linux only."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _, _, irq, softirq, stolen, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that ended, as all workers have after `measure`."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(side.ru_utime + side.ru_stime for side in used)


def _log(comparison: Comparison, name: str) -> Path:
    return FOLDER / "logs" / f"{comparison.name}-{name}.log"


def _memory(side: Side, log: Path) -> dict[str, float]:
    """The peak of two runs: the second has the optimiser's state as well."""
    with Worker(side, log, keeps_memory=False) as worker:
        resting = worker.prepare()["resting"]
        peak = max(worker.run(number)["peak"] for number in range(2))
    return {"peak": peak, "extra": peak - resting}


def _order(names: Sequence[str], number: int) -> list[str]:
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def success(measured: Measured) -> tuple[int, int]:
    """Successes and conversations of all repetitions."""
    return int(sum(measured.values("successes"))), int(sum(measured.values("conversations")))


def _expect_equal_success(comparison: Comparison, measured: Mapping[str, Measured]) -> None:
    """Sides that learn must do so alike: their shares of success may differ by chance only."""
    shares = {name: success(side) for name, side in measured.items() if "successes" in side.repetitions[0]}
    bands = {name: wilson(*share) for name, share in shares.items()}
    if bands and max(low for low, _ in bands.values()) > min(high for _, high in bands.values()):
        raise SideError(f"sides succeeded differently often: {shares}")


def _expect_equal_work(comparison: Comparison, measured: Mapping[str, Measured]) -> None:
    threads = {name: side.prepared["threads"] for name, side in measured.items()}
    if set(threads.values()) != {1}:
        raise SideError(f"every side must compute with one thread, got {threads}")
    tokens = {name: side.values("tokens") for name, side in measured.items()}
    if comparison.same_tokens and len({tuple(counts) for counts in tokens.values()}) != 1:
        raise SideError(f"sides made different numbers of tokens: {tokens}")
