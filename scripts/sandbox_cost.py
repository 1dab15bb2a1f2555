"""What a submission to the sandbox costs: processor time of child and grader, memory, and how many a second.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/sandbox_cost.py
    .venv/bin/python scripts/sandbox_cost.py --submissions 50 --sandbox namespaces

A submission is a function and eight cases, or a program and eight texts for its stdin. Submissions a second
are those of one core: 1 over the processor time of child and grader together, which other load on the machine
changes little. Memory is the child's peak, sampled while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stateset_agents.sandbox import Job, Sandbox, what_is_there

CASES = 8
LEAST_A_SECOND = 20.0
"""For each core: the aim."""
FUNCTION = Job(
    program="def second(xs):\n    xs = sorted(set(xs))\n    return xs[-2] if len(xs) > 1 else None\n",
    entry_point="second",
    arguments=tuple(([number, 7, 9],) for number in range(CASES)),
)
PROGRAM = Job(
    program="print(sum(map(int, input().split())))",
    stdin=tuple(f"{number} 2\n" for number in range(CASES)),
)
IMPORTS = Job(
    program="import collections, functools, heapq, itertools, json, math, re\ndef f(n): return n",
    entry_point="f",
    arguments=tuple((number,) for number in range(CASES)),
)
WORKLOADS = {"function": FUNCTION, "program": PROGRAM, "function with imports": IMPORTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one submission, the median of many."""

    child_ms: float
    """Processor time."""
    grader_ms: float
    wall_ms: float

    @property
    def a_second(self) -> float:
        """Submissions for each core."""
        return 1000 / (self.child_ms + self.grader_ms)


async def measured(sandbox: Sandbox, job: Job, submissions: int) -> Cost:
    """One after another, so that the grader's time is theirs alone."""
    child, grader, wall = [], [], []
    for _ in range(submissions):
        cpu, begun = time.process_time(), time.perf_counter()
        claims = await sandbox.run(job)
        grader.append(time.process_time() - cpu)
        wall.append(time.perf_counter() - begun)
        child.append(claims.cpu_seconds)
        if len(claims.claimed) != job.num_cases:
            raise SystemExit(f"the submission failed: {claims}")
    return Cost(
        child_ms=1000 * statistics.median(child),
        grader_ms=1000 * statistics.median(grader),
        wall_ms=1000 * statistics.median(wall),
    )


async def peak_mib(sandbox: Sandbox) -> float:
    """The most that a child of a submission had resident, while its program spins for half a second."""
    spin = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\n"
    job = Job(program=spin + FUNCTION.program, entry_point="second", arguments=FUNCTION.arguments)
    peaks: dict[str, int] = {}
    """By process, the last value: before a child's exec it is ours."""
    is_over = threading.Event()
    others = {pid for pid, _ in _children()}

    def look() -> None:
        while not is_over.wait(0.02):
            peaks.update((pid, peak) for pid, peak in _children() if pid not in others)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        await sandbox.run(job)
    finally:
        is_over.set()
        watching.join()
    return max(peaks.values()) / 1024


def _children() -> Iterator[tuple[str, int]]:
    """Processes that this one has started, and theirs, and the KiB that each had resident at most."""
    statuses = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            lines = status.read_text().splitlines()
            statuses[status.parent.name] = dict(line.split(":", 1) for line in lines)
    for pid, fields in statuses.items():
        parent = fields["PPid"].strip()
        while parent in statuses and parent != str(os.getpid()):
            parent = statuses[parent]["PPid"].strip()
        if parent in statuses and "VmHWM" in fields:
            yield pid, int(fields["VmHWM"].split()[0])


def main() -> None:
    """Print a table, and end with 1 where a core does fewer than the aim."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--submissions", type=int, default=200)
    parser.add_argument("--sandbox", help="a level; every one where it is left out")
    args = parser.parse_args()
    levels = (args.sandbox,) if args.sandbox else (*what_is_there().levels, "unsafe")
    least = float("inf")
    print(
        "| sandbox | submission | child, CPU ms | grader, CPU ms | wall ms | a second and core | child, MiB |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for level in levels:
        sandbox = Sandbox(level)
        memory = asyncio.run(peak_mib(sandbox))
        for name, job in WORKLOADS.items():
            cost = asyncio.run(measured(sandbox, job, args.submissions))
            least = min(least, cost.a_second)
            print(
                f"| {level} | {name} | {cost.child_ms:.1f} | {cost.grader_ms:.1f} | {cost.wall_ms:.1f} | "
                f"{cost.a_second:.0f} | {memory:.1f} |"
            )
    if least < LEAST_A_SECOND:
        raise SystemExit(f"a core does {least:.1f} submissions a second, fewer than {LEAST_A_SECOND:g}")


if __name__ == "__main__":
    main()
