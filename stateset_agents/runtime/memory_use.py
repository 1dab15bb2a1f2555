"""How much memory this process has taken at most, of how much there is; logged with each step."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

_MIB = 2**20
_STATUS = Path("/proc/self/status")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def peak_memory() -> dict[str, float]:
    """`memory/peak_mib` and `memory/limit_mib` of main memory, and `memory/gpu/...` where a GPU is in use.

    The peak is that of the process's whole life, loading included: the largest resident set, and what torch
    has reserved on the current GPU. The limit is the machine's memory, or its container's where that is less.
    Empty where the system does not say (Windows).
    """
    peak = _peak()
    if peak is None:
        return {}
    metrics = {"memory/peak_mib": peak / _MIB, "memory/limit_mib": _limit() / _MIB}
    torch = sys.modules.get("torch")  # who has not loaded it has nothing on a GPU
    if torch is not None and torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        metrics["memory/gpu/peak_mib"] = torch.cuda.max_memory_reserved() / _MIB
        metrics["memory/gpu/limit_mib"] = total / _MIB
    return metrics


def _peak() -> int | None:
    """Bytes of the largest resident set."""
    try:  # getrusage would count what stood in the process that started this one
        status = _STATUS.read_text(encoding="ascii", errors="replace")
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@functools.cache
def _limit() -> int:
    """Bytes of main memory that this process may take."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine
