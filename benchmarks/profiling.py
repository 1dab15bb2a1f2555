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
    found = [
        {"name": one.key, "seconds": one.self_cpu_time_total / 1e6, "calls": one.count}
        for one in profiler.key_averages()
    ]
    return {**took, "operators": sorted(found, key=lambda one: -one["seconds"])}


def _all_threads() -> Any:
    """A setting of torch that is not public yet: backends compute in a thread of their own."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def tensors() -> dict[str, int]:
    """Bytes of all tensors that are alive, each piece of memory once, by what they are."""
    import torch

    made: defaultdict[str, int] = defaultdict(int)
    seen = set()
    for one in gc.get_objects():
        if not issubclass(type(one), torch.Tensor) or one.device.type != "cpu":  # some lie to isinstance
            continue
        if one.layout != torch.strided:
            made[str(one.layout).removeprefix("torch.")] += one.numel() * one.element_size()
            continue
        memory = one.untyped_storage()
        if memory.data_ptr() in seen:
            continue
        seen.add(memory.data_ptr())
        kind = "parameters" if isinstance(one, torch.nn.Parameter) else "other tensors"
        made[kind] += memory.nbytes()
        if one.is_leaf and one.grad is not None:
            made["gradients"] += one.grad.untyped_storage().nbytes()
            seen.add(one.grad.untyped_storage().data_ptr())
    return dict(made)


def table(told: Mapping[str, Any]) -> str:
    """What `operators`, `tensors` and the worker's memory say, for the terminal."""
    lines = [f"{told['cpu']:.2f} s CPU, {told['wall']:.2f} s wall under torch's profiler, by wall time"]
    shown = told["operators"][:_SHOWN]
    rest = sum(one["seconds"] for one in told["operators"][_SHOWN:])
    outside = max(0.0, told["wall"] - rest - sum(one["seconds"] for one in shown))
    parts = [(one["name"], one["seconds"], f"{one['calls']:,} calls") for one in shown]
    parts += [("other operators", rest, ""), ("outside operators (Python, waits)", outside, "")]
    for name, seconds, calls in parts:
        lines.append(f"  {seconds:8.3f} s  {seconds / told['wall']:4.0%}  {name[:52]:52} {calls}".rstrip())
    lines.append("memory, without the allocator's settings")
    held = {
        "Python and libraries": told["imported"],
        "when loaded": told["resting"],
        "between two runs": told["in_use"],
        "at most": told["peak"],
    }
    lines += [f"  {size / 2**20:8,.0f} MiB  {name}" for name, size in held.items()]
    lines.append("tensors between two runs")
    largest = sorted(told["tensors"].items(), key=lambda one: -one[1])
    return "\n".join([*lines, *(f"  {size / 2**20:8,.0f} MiB  {name}" for name, size in largest)])
