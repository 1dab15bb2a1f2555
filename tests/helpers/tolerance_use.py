"""How much of each tolerance the suite's comparisons use, for a look at what another processor could break.

    export PYTHONPATH=tests/helpers TOLERANCES=/tmp/tolerances.tsv
    make test-avx2 PYTEST_ARGS="-p tolerance_use -o enable_assertion_pass_hook=true"
    sort -rn /tmp/tolerances.tsv | head -50

A line is the share of the tolerance that was used, from a fiftieth on, the comparison and the test. Seen are
`torch.allclose`, `assert_close` with tolerances, `pytest.approx` of numbers, and asserted bounds such as
`x < 1e-6`. A share above 1 is of a comparison that had to fail.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

_LEAST = 0.02
_BOUND = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?(?:e-?\d+)?) <=? (\d+(?:\.\d+)?e-\d+)")

_test = "?"


def _note(kind: str, share: float) -> None:
    if share > _LEAST:
        with Path(os.environ["TOLERANCES"]).open("a") as file:
            file.write(f"{share:.4f}\t{kind}\t{_test}\n")


def _share(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float) -> float:
    if not found.numel() or found.shape != wanted.shape:
        return 0.0
    return float(((found.double() - wanted.double()).abs() / (atol + rtol * wanted.double().abs())).max())


def _seen(real: Callable[..., Any], rtol: float | None, atol: float | None) -> Callable[..., Any]:
    """`real`, where the tolerances are these unless the call says others; None: only calls that do."""

    def compared(found: Any, wanted: Any, *rest: Any, **options: Any) -> Any:
        near, far = options.get("rtol", rtol), options.get("atol", atol)
        if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor) and None not in (near, far):
            _note(f"{real.__name__} rtol={near} atol={far}", _share(found, wanted, near, far))
        return real(found, wanted, *rest, **options)

    return compared


def pytest_configure() -> None:
    torch.allclose = _seen(torch.allclose, 1e-5, 1e-8)
    torch.testing.assert_close = _seen(torch.testing.assert_close, None, None)
    approx: Any = type(pytest.approx(1.0))
    equal = approx.__eq__

    def compared(self: Any, actual: Any) -> bool:
        numbers = isinstance(actual, int | float) and isinstance(self.expected, int | float)
        if numbers and math.isfinite(actual) and math.isfinite(self.expected) and self.tolerance > 0:
            _note(f"approx tolerance={self.tolerance:.3g}", abs(actual - self.expected) / self.tolerance)
        return bool(equal(self, actual))

    approx.__eq__ = compared


def pytest_assertion_pass(lineno: int, orig: str, expl: str) -> None:
    for found, bound in _BOUND.findall(expl):
        if float(bound):
            _note(f"line {lineno}: {orig[:80]}", float(found) / float(bound))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    global _test
    _test = item.nodeid
    return (yield)
