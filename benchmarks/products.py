"""`python -m benchmarks.products`: how fast products are at each matmul_precision here, and how far off.

One thread; the ways are timed in turn, by the thread's own CPU seconds, medians of 15.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.processors import this_processor
from stateset_agents.backends.matmul_precision import product, rounded
from stateset_agents.backends.onednn_linear import linear

_SHAPES = ((2048, 256, 864), (2048, 864, 256), (256, 2048, 864), (2048, 640, 1840), (1024, 640, 4096))
"""[M, K] by [K, N] of updates: layers of the 5.8M and 52M models, a weight's gradient, a head."""
_TIMES = 15


def main() -> None:
    """Print GFLOP/s and the error, as a share of the product's norm, for each way of making it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(this_processor().key)
    print("| product | " + " | ".join(_implementations(torch.ones(8, 8), torch.ones(8, 8))) + " |")
    for rows, inner, columns in _SHAPES:
        x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
        exact = x.double() @ weight.double().t()
        work = 2 * rows * inner * columns / 1e9
        cells = []
        implementations = _implementations(x, weight)
        for seconds, implementation in zip(
            _timed(list(implementations.values())), implementations.values(), strict=True
        ):
            off = float((implementation().double() - exact).norm() / exact.norm())
            cells.append(f"{work / seconds:.0f} ({off:.1e})")
        print(f"| {rows} x {inner} x {columns} | {' | '.join(cells)} |")


def _implementations(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Rounding of the operands included."""
    return {
        "torch, highest": lambda: F.linear(x, weight),
        "ours, highest": lambda: linear(x, weight),
        "ours, medium": lambda: product(rounded(x, "medium"), rounded(weight, "medium")),
        "ours, high": lambda: product(rounded(x, "high"), rounded(weight, "high")),
    }


def _timed(implementations: list[Callable[[], Tensor]]) -> list[float]:
    """Median CPU seconds of each, made in turn after one that is not counted."""
    durations: list[list[float]] = [[] for _ in implementations]
    for number in range(_TIMES + 1):
        for implementation, seconds in zip(implementations, durations, strict=True):
            started = time.thread_time()
            implementation()
            if number:
                seconds.append(time.thread_time() - started)
    return [median(seconds) for seconds in durations]


if __name__ == "__main__":
    main()
