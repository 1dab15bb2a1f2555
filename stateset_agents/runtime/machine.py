"""The machine: its memory, its disk and its GPUs, as this process sees them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from pathlib import Path

from stateset_agents.types.errors import ConfigurationError

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
        metrics["memory/gpu/allocated_peak_mib"] = torch.cuda.max_memory_allocated() / _MIB
        metrics["memory/gpu/limit_mib"] = total / _MIB
    return metrics


def gpu_memory(device: str) -> tuple[int, int] | None:
    """Bytes of the GPU that a model on `device` goes to, and of what others take there; None for a CPU."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return None
    index = (local_gpu() or 0) if device in ("auto", "cuda") else torch.device(device).index
    free, total = torch.cuda.mem_get_info(index)
    return total, total - free


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


def trim_memory() -> None:
    """Return freed memory to the system, if the C library is glibc; elsewhere a no-op.

    glibc keeps memory that a thread has freed for that thread. Generation and update run in two threads, so
    the process would hold the peaks of both, although they are not needed at the same time.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # macOS, musl, Windows
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def local_gpu() -> int | None:
    """Index of this process's GPU: LOCAL_RANK, or None without a launcher.

    A process that sees a single GPU uses that: some launchers show each process only its own. Raises
    ConfigurationError if more processes were started on this machine than it has GPUs.
    """
    import torch

    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return None
    count = torch.cuda.device_count()
    if count < 2:
        return 0
    started = int(os.environ.get("LOCAL_WORLD_SIZE", int(rank) + 1))
    if started > count:
        raise ConfigurationError(
            f"{started} processes were started on a machine with {count} GPUs: start {count} "
            f"(--nproc-per-node {count}), or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on its CPU"
        )
    return int(rank)
