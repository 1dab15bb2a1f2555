"""`python -m benchmarks.products`: how fast products are at each matmul_precision here, and how far off.

One thread; the ways are timed in turn, by the thread's own CPU seconds, medians of 15. A second table is of
decode steps, whose few rows are multiplied by a packed copy of the weights, as in packed_linear.py, or by the
weights as they lie. There every product has other weights, 64 MB in all, as a model's layers have.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.processors import this_processor
from stateset_agents.backends.linears import PackedLinear, linear, packing, product, rounded

_SHAPES = ((2048, 256, 864), (2048, 864, 256), (256, 2048, 864), (2048, 640, 1840), (1024, 640, 4096))
"""[M, K] by [K, N] of updates: layers of the 5.8M and 52M models, a weight's gradient, a head."""
_DECODES = (
    (32, 256, 512),
    (32, 256, 1728),
    (32, 864, 256),
    (32, 576, 3072),
    (32, 1536, 576),
    (128, 576, 3072),
)
"""The same of decode steps: layers of the 5.8M model and of SmolLM2-135M."""
_TIMES = 15


def main() -> None:
    """Print the two tables."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(this_processor().key)
    _print_precisions()
    _print_packings()


def _print_precisions() -> None:
    """GFLOP/s and the error, as a share of the product's norm, for each way of making a product."""
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


def _print_packings() -> None:
    """GFLOP/s with the weights as they lie and by packed copies, for each dtype."""
    dtypes = (torch.float32, torch.bfloat16)
    names = [f"{dtype}, {way}" for dtype in dtypes for way in ("plain", packing(torch.ones(1, dtype=dtype)))]
    print(f"\n| product | {' | '.join(name.removeprefix('torch.') for name in names)} |")
    for rows, inner, columns in _DECODES:
        work = 2 * rows * inner * columns / 1e9
        cells = []
        for dtype in dtypes:
            x = torch.randn(rows, inner, dtype=dtype)
            weights = [
                torch.randn(columns, inner, dtype=dtype)
                for _ in range(64_000_000 // (columns * inner * dtype.itemsize))
            ]
            ways = [
                cycle([PackedLinear([weight], [None], packed=packed) for weight in weights])
                for packed in (False, True)
            ]
            for way in ways:  # each makes its copy
                for _ in weights:
                    next(way)(x)
            seconds = _timed([lambda way=way, x=x: next(way)(x) for way in ways], times=20 * len(weights))  # type: ignore[misc]  # bound at once
            cells += [f"{work / one:.0f}" for one in seconds]
        print(f"| {rows} x {inner} x {columns} | {' | '.join(cells)} |")


def _implementations(x: Tensor, weight: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Rounding of the operands included."""
    return {
        "torch, highest": lambda: F.linear(x, weight),
        "ours, highest": lambda: linear(x, weight),
        "ours, medium": lambda: product(rounded(x, "medium"), rounded(weight, "medium")),
        "ours, high": lambda: product(rounded(x, "high"), rounded(weight, "high")),
    }


def _timed(implementations: list[Callable[[], Tensor]], times: int = _TIMES) -> list[float]:
    """Median CPU seconds of each, made in turn after one that is not counted."""
    durations: list[list[float]] = [[] for _ in implementations]
    for number in range(times + 1):
        for implementation, seconds in zip(implementations, durations, strict=True):
            started = time.thread_time()
            implementation()
            if number:
                seconds.append(time.thread_time() - started)
    return [median(seconds) for seconds in durations]


if __name__ == "__main__":
    main()
