"""Where a side's CPU time and memory go: by operator of torch, and by what the tensors are there for.

Workers import it in whatever environment they run in; torch is loaded when something is profiled.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

_SHOWN = 14


def operators(work: Callable[[], Any]) -> dict[str, Any]:
    """CPU seconds of `work` in all, and of each operator without those it calls, in all threads."""
    from torch.autograd.profiler import profile

    with profile(use_kineto=True, experimental_config=_all_threads()) as profiler:
        started, cpu = time.perf_counter(), time.process_time()
        work()
        took = {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}
    entries = [
        {"name": entry.key, "seconds": entry.self_cpu_time_total / 1e6, "calls": entry.count}
        for entry in profiler.key_averages()
    ]
    return {**took, "operators": sorted(entries, key=lambda entry: -entry["seconds"])}


def _all_threads() -> Any:
    """A setting of torch that is not public yet: backends compute in a thread of their own."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def tensors() -> dict[str, int]:
    """Bytes of all tensors that are alive, each piece of memory once, by what they are."""
    import torch

    num_bytes: defaultdict[str, int] = defaultdict(int)
    seen = set()
    for entry in gc.get_objects():
        if not issubclass(type(entry), torch.Tensor) or entry.device.type != "cpu":  # some lie to isinstance
            continue
        if entry.layout != torch.strided:
            num_bytes[str(entry.layout).removeprefix("torch.")] += entry.numel() * entry.element_size()
            continue
        memory = entry.untyped_storage()
        if memory.data_ptr() in seen:
            continue
        seen.add(memory.data_ptr())
        kind = "parameters" if isinstance(entry, torch.nn.Parameter) else "other tensors"
        num_bytes[kind] += memory.nbytes()
        if entry.is_leaf and entry.grad is not None:
            num_bytes["gradients"] += entry.grad.untyped_storage().nbytes()
            seen.add(entry.grad.untyped_storage().data_ptr())
    return dict(num_bytes)


def table(result: Mapping[str, Any]) -> str:
    """What `operators`, `tensors` and the worker's memory say, for the terminal."""
    lines = [f"{result['cpu']:.2f} s CPU, {result['wall']:.2f} s wall under torch's profiler, by wall time"]
    shown = result["operators"][:_SHOWN]
    other_seconds = sum(entry["seconds"] for entry in result["operators"][_SHOWN:])
    outside = max(0.0, result["wall"] - other_seconds - sum(entry["seconds"] for entry in shown))
    parts = [(entry["name"], entry["seconds"], f"{entry['calls']:,} calls") for entry in shown]
    parts += [("other operators", other_seconds, ""), ("outside operators (Python, waits)", outside, "")]
    for name, seconds, calls in parts:
        lines.append(f"  {seconds:8.3f} s  {seconds / result['wall']:4.0%}  {name[:52]:52} {calls}".rstrip())
    lines.append("memory, without the allocator's settings")
    sizes = {
        "Python and libraries": result["imported"],
        "when loaded": result["resting"],
        "between two runs": result["in_use"],
        "at most": result["peak"],
    }
    lines += [f"  {size / 2**20:8,.0f} MiB  {name}" for name, size in sizes.items()]
    lines.append("tensors between two runs")
    largest = sorted(result["tensors"].items(), key=lambda entry: -entry[1])
    return "\n".join([*lines, *(f"  {size / 2**20:8,.0f} MiB  {name}" for name, size in largest)])
