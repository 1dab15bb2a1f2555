"""`python -m benchmarks.passes`: an update's passes side by side against one after the other, by wall time.

Several threads, as a user has them: the row `smollm2-desk-bf16`, a model in the shape of SmolLM2-135M on 32
conversations of three turns. Its passes go through `training/rows/parallel_passes.py` two at a time, each
with half of the threads, or one at a time with all of them; the ways are timed in turn.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.comparisons import comparisons
from benchmarks.models import ensure
from benchmarks.processors import this_processor
from benchmarks.workers.ours import Update
from stateset_agents.training.update.policy import Policy

_ROW = "smollm2-desk-bf16"
_TIMES = 7
_WAYS = {"side by side": 2, "one after the other": 1}


def main() -> None:
    """Print the seconds of each way, and their ratio."""
    threads = torch.get_num_threads()
    if threads < 2:
        sys.exit("passes are side by side only with two threads or more: OMP_NUM_THREADS=2")
    row = comparisons()[_ROW]
    assert row.model is not None
    ensure(**asdict(row.model))
    update = Update({**row.sides["ours"].job, "task": "update"})
    learner: Any = update.trainer.learner
    if learner.policy.passes_at_once < 2:
        sys.exit("this processor has no bf16 units, so passes run one after the other")
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(_TIMES + 1):
        for way, at_once in _WAYS.items():
            with patch.object(Policy, "passes_at_once", at_once):
                took = update.run(number)["update"]
            if number:
                seconds[way].append(took)
    update.close()
    print(this_processor().key, f"{threads} threads")
    for way, took_each in seconds.items():
        print(f"{way}: {median(took_each):.1f} s ({min(took_each):.1f} to {max(took_each):.1f})")
    beside, after = seconds.values()
    ratios = [slow / fast for fast, slow in zip(beside, after, strict=True)]
    print(f"ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
