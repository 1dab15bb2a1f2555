"""Starts the workers of a comparison, each in its own environment, and asks them in turn."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environments import ROOT, python_of

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_MODE": "disabled",
}
"""Of every side: one thread, no network."""
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_ARENA_MAX": "1",
}
"""Of every side while it is timed: memory is kept, which makes peers 9 to 30 % faster. With more than one
arena tensors beyond 64 MB would not be, outside the main thread, where ours updates. Peak memory is that of
other processes, which have the allocator as it is."""


class SideError(Exception):
    """A side could not do its work, and the text is its traceback; or sides did different work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: which worker, in which environment, and what it is to do."""

    module: str
    """Of `benchmarks.workers`."""
    job: Mapping[str, Any]
    environment: str = "own"


class Worker:
    """A living side. Use it as a context manager: it is stopped at the end, whatever happens."""

    def __init__(self, side: Side, log: Path, *, keeps_memory: bool) -> None:
        """`log` takes what the process prints; `keeps_memory`: with `ALLOCATOR`."""
        self.side = side
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("w", encoding="utf-8")
        is_own = side.environment == "own"
        # A peer may be called as we are: in its environment our folder comes last.
        path = f"sys.path.insert(0, {str(ROOT)!r})" if is_own else f"sys.path.append({str(ROOT)!r})"
        run = f"runpy.run_module('benchmarks.workers.{side.module}', run_name='__main__')"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(python_of(side.environment)), "-P", "-c", f"import runpy, sys; {path}; {run}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**environment, **SETTINGS, **(ALLOCATOR if keeps_memory else {})},
            cwd=log.parent,
            text=True,
        )

    def prepare(self) -> dict[str, Any]:
        """Load everything; versions, threads, and the memory in use after."""
        return self._ask({"do": "prepare", "job": dict(self.side.job)})

    def run(self, repetition: int) -> dict[str, Any]:
        """Do the work once."""
        return self._ask({"do": "run", "repetition": repetition})

    def profile(self, repetition: int) -> dict[str, Any]:
        """Do the work once under torch's profiler: CPU seconds in all and by operator."""
        return self._ask({"do": "profile", "repetition": repetition})

    def holdings(self) -> dict[str, Any]:
        """Bytes in use now, and of which tensors."""
        return self._ask({"do": "holdings"})

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words are in the log
        line = self._process.stdout.readline()
        if not line:
            raise SideError(f"{self.side.module} ended without an answer; its output: {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.side.module}: {answer['error']}")
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        if self._process.poll() is None:
            try:
                self._process.stdin.write('{"do": "stop"}\n')
                self._process.stdin.close()
                self._process.wait(timeout=20)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._log.close()
